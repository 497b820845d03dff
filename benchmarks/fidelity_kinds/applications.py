"""Records about whole networks: rates, step times and memory.

A network is traced as a JAX function, costed on tiles, and put on the system by `podrun.device.tiles.batch`. What a
record leaves open is filled from the tables here: one layout per network, one length per task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fidelity_kinds.record import TYPES, NotPredicted, Record
from networks import trace
from podrun.device.target import GC2
from podrun.device.tiles.batch import Batch, batch_seconds, tied_pipeline

IMAGE_SIDE = {
    "resnet18": 224,
    "resnet50": 224,
    "resnext101": 224,
    "alexnet": 224,
    "efficientnet_b0": 224,
    "efficientnet_b4": 380,
}
"""Image networks and the side of their input where a record does not say."""
TRANSFORMERS = {
    "bert_base": (12, 768, 12, 3072, 30528),
    "bert_large": (24, 1024, 16, 4096, 30528),
    "gpt_117m": (12, 768, 12, 3072, 50257),
    "roberta": (12, 768, 12, 3072, 50265),
    "bert_3_layer": (3, 768, 12, 3072, 30528),
}
"""Layers, hidden size, heads, feed-forward size and vocabulary."""
SEQUENCE_LENGTH = {
    "pretrain_phase_1": 128,
    "pretrain_phase_2": 512,
    "squad": 384,
    "mlperf_closed": 512,
    "mlperf_open": 512,
}
SEQUENCE_LENGTH |= {"mlperf_open_or_closed_unstated": 512}
"""Tokens of a sequence (or pack) by task; 128 otherwise, 1,024 for GPT."""
PACKING = {"pretrain_phase_1": 1.2}
"""Mean sequences per pack where text is packed and the factor is not stated; 2 otherwise."""
INFERENCE_PACKING = 1.7
"""Sequences per pack of a served model where text is packed."""
GLOBAL_BATCH = {"mlperf": 3072, "other": 16384}
"""Sequences per weight update where a training record of text states none."""
IPUS_PER_REPLICA = {"bert_large": 4, "bert_base": 4, "gpt_117m": 4, "efficientnet_b4": 1}
"""IPUs that a training replica spans where the record does not say; 1 otherwise and for inference."""
TRAINING_TOKENS = 1024
"""Tokens of a training micro-batch of text where the record does not say: what fits an IPU beside its weights."""
TRAINING_IMAGES = {"resnet50": 20, "efficientnet_b0": 16, "efficientnet_b4": 6}
"""Images of a training micro-batch on a POD where the record does not say; 1 otherwise."""
OPTIMIZER = {"resnet50": "lars", "bert_base": "lamb", "bert_large": "lamb", "gpt_117m": "adam"}
BATCHES_IN_FLIGHT = 4
"""Batches in flight when a serving harness measures latency."""
LIBRARY_2018 = 1.35
"""Cycles of the 2018 library on GC2 over those of the formulas, which describe the library of 2023. Fitted, once."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A network on a system: cycles of a micro-batch per layer, and what the batch needs beside."""

    samples_per_micro_batch: float
    micro_batch: int
    batch: Batch


def network(record: Record) -> float:
    """A network's rate, step time or cycles."""
    params = record.params
    if params["phase"] != "total":
        raise NotPredicted(f"phase {params['phase']!r} of a network is not separated by tile averages")
    if record.metric == "fraction":
        raise NotPredicted("shares of a pre-silicon model's step")
    load = workload(record)
    seconds = sum(batch_seconds(record.chip, load.batch).values())
    if record.chip is GC2:
        seconds *= LIBRARY_2018
    samples = load.samples_per_micro_batch * load.batch.accumulation * load.batch.replicas
    if record.metric == "samples_per_s":
        return samples / seconds
    if record.metric == "tokens_per_s":
        return samples / seconds * (sequence_length(record) / packing(record))
    if record.metric == "latency_ms":
        return BATCHES_IN_FLIGHT * seconds * 1e3
    if record.metric in ("time_s", "cycles"):
        if params.get("epochs") or (params["mode"] == "inference" and params.get("mlperf_round")):
            raise NotPredicted("the samples of an epoch or evaluation pass are not in the record")
        return record.rate(seconds * record.chip.clock_hz)
    raise NotPredicted(f"metric {record.metric!r} of a network is not modelled")


def workload(record: Record) -> Workload:
    """The record's network on its target.

    Raises:
        NotPredicted: the network is not one that podrun builds, or the record leaves its shape open.
    """
    (name,) = record.need("name")
    if name in IMAGE_SIDE:
        return _image(record, name)
    if name in TRANSFORMERS:
        return _transformer(record, name)
    if name == "lstm":
        return _lstm(record)
    raise NotPredicted(f"network {name!r} is not among those podrun builds, or its size is not stated")


def _training(record: Record) -> bool:
    return bool(record.params["mode"] == "train")


def _layout(record: Record, name: str) -> tuple[int, int]:
    """IPUs per replica and replicas."""
    ipus = max(record.ipus, record.params.get("ipus") or 1)
    stated = record.params["ipus_per_replica"]
    per = int(stated) if stated > 1 else (IPUS_PER_REPLICA.get(name, 1) if _training(record) else 1)
    per = min(per, ipus)
    return per, max(1, ipus // per)


def _accumulation(record: Record, samples: float, replicas: int) -> int:
    stated = int(record.params["gradient_accumulation"])
    total = record.params.get("global_batch")
    if not total and record.params.get("name") in TRANSFORMERS:
        total = GLOBAL_BATCH["mlperf" if str(record.params.get("task")).startswith("mlperf") else "other"]
    if stated == 1 and total and _training(record) and record.ipus > 1:
        return max(1, round(total / (samples * replicas)))
    return stated


def _image(record: Record, name: str) -> Workload:
    params, train = record.params, _training(record)
    side = params.get("image_size") or IMAGE_SIDE[name]
    per, replicas = _layout(record, name)
    micro = int(params["micro_batch"])
    if micro == 1 and train and record.ipus > 1:
        micro = TRAINING_IMAGES.get(name, 1)
    partials = TYPES[params["partials_type"]]
    if record.chip is not GC2 and params["input_type"] != "fp32":
        partials = "float16"
    recompute = bool(params["recompute"]) or (train and record.ipus > 1)
    report, weights = trace.image_network(
        name,
        record.chip.name,
        micro,
        side,
        train,
        params.get("norm") or "batch",
        recompute,
        "float32" if params["input_type"] == "fp32" else "float16",
        partials,
        params["available_memory_proportion"],
        int(params.get("norm_group_size") or 1),
        params["input_type"] == "fp8",
    )
    batch = Batch(
        report["step"]["cycles"] / per,
        per,
        _accumulation(record, micro, replicas),
        replicas,
        boundary_bytes=micro * side * side / 256 * 256 * 2.0,
        weights=weights / per,
        optimizer=OPTIMIZER.get(name, "momentum"),
        input_bytes=micro * side * side * 3 * (1.0 if train else 2.0),
        training=train,
    )
    return Workload(micro, micro, batch)


def sequence_length(record: Record) -> int:
    """Tokens of a sequence or pack."""
    stated = record.params.get("sequence_length")
    if stated:
        return int(stated)
    if record.params.get("name") == "gpt_117m":
        return 1024
    return SEQUENCE_LENGTH.get(str(record.params.get("task")), 128)


def packing(record: Record) -> float:
    """Sequences per pack."""
    if record.params["packing_factor"] > 1.0:
        return float(record.params["packing_factor"])
    task = str(record.params.get("task"))
    if not _training(record):
        return INFERENCE_PACKING if record.params.get("packed") else 1.0
    if record.params.get("packed") or task.startswith("mlperf"):
        return PACKING.get(task, 2.0)
    return 1.0


def _transformer(record: Record, name: str) -> Workload:
    params, train = record.params, _training(record)
    layers, hidden, heads, feed_forward, vocabulary = TRANSFORMERS[name]
    tokens, packs = sequence_length(record), packing(record)
    per, replicas = _layout(record, name)
    micro = int(params["micro_batch"])
    if micro == 1 and train:
        if params.get("samples_per_micro_step"):
            micro = max(1, round(params["samples_per_micro_step"] / packs))
        else:
            micro = max(1, TRAINING_TOKENS // tokens)
    elif micro == 1 and params.get("global_batch"):
        micro = int(params["global_batch"])
    question = (record.chip.name, micro, tokens, hidden, heads, feed_forward, vocabulary)
    proportion = params["available_memory_proportion"]
    partials = "float16"
    share = 1.0 if name.startswith("gpt") else 0.15
    costs = trace.transformer_parts(*question, train, partials, proportion, share)
    cycles = {part: float(report["step"]["cycles"]) for part, (report, _) in costs.items()}
    if train and per > 1:
        again = trace.transformer_parts(*question, False, partials, proportion, share)
        cycles["layer"] += again["layer"][0]["step"]["cycles"]
    head = cycles["head"] if train else 0.0
    ends = cycles["embedding"] + head
    slowest = tied_pipeline(
        record.chip,
        layers,
        cycles["layer"],
        ends,
        per,
        float(costs["layer"][1]),
        float(costs["embedding"][1]),
    )
    weights = costs["layer"][1] * layers + costs["embedding"][1]
    large = name == "bert_large"
    batch = Batch(
        slowest,
        per,
        _accumulation(record, micro * packs, replicas),
        replicas,
        boundary_bytes=micro * tokens * hidden * 2.0,
        weights=weights / per,
        gradient_bytes=2.0,
        state_bytes=8.0 if large else 0.0,
        optimizer=OPTIMIZER.get(name, "adam"),
        input_bytes=micro * tokens * 8.0,
        training=train,
    )
    return Workload(micro * packs, micro, batch)


def _lstm(record: Record) -> Workload:
    hidden, steps = record.need("hidden_size", "time_steps")
    micro, train = int(record.params["micro_batch"]), _training(record)
    layers = int(record.params.get("layers") or 1)
    report, weights = trace.lstm_network(
        record.chip.name, micro, int(steps), layers, int(hidden), train, TYPES[record.params["partials_type"]]
    )
    batch = Batch(report["step"]["cycles"], weights=weights, optimizer="sgd", training=train)
    return Workload(micro, micro, batch)


def memory(record: Record) -> float:
    """Bytes of a compiled network."""
    raise NotPredicted("to do")


def _unused() -> Any:
    return None
