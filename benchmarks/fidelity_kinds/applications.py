"""Records about whole networks: rates, step times and memory.

A network is traced as a JAX function, costed on tiles, and put on the system by
`podrun.device.tiles.batch`. What a record leaves open is filled from the tables here: one layout per
network, one length per task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from networks import trace

from fidelity_kinds.record import TYPES, NotPredicted, Record
from podrun.device.target import GC2
from podrun.device.tiles.batch import Batch, batch_seconds, tied_pipeline
from podrun.device.tiles.code import REPEATED
from podrun.device.tiles.cost import TILE_IMBALANCE
from podrun.models import CATALOGUE, TRANSFORMERS

ASSUMED_VARIANT = {
    "vit_variant_unstated": "vit_b16",
    "resnet_depth_unstated": "resnet50",
}
"""The variant taken where the source names none."""
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
IPUS_PER_REPLICA = {"bert_large": 4, "bert_base": 4, "gpt_117m": 4, "efficientnet_b4": 2}
"""IPUs that a training replica spans where the record does not say; 1 otherwise and for inference."""
TRAINING_TOKENS = 1024
"""Tokens of a training micro-batch of text where the record does not say: what fits an IPU beside its
weights."""
TRAINING_IMAGES = {"resnet50": 20, "efficientnet_b0": 16, "efficientnet_b4": 3}
"""Images of a training micro-batch on a POD where the record does not say; 1 otherwise."""
PIPELINE_IMBALANCE = 1.25
"""Slowest stage over mean stage of an image network cut into a pipeline of whole blocks. Assumed."""
OPTIMIZER = {"resnet50": "lars", "bert_base": "lamb", "bert_large": "lamb", "gpt_117m": "adam"}
BATCHES_IN_FLIGHT = 4
"""Batches in flight when a serving harness measures latency."""
WEIGHTS_PER_HIDDEN = 12.0
"""Weights of an encoder layer over its hidden size squared: four products in attention, eight behind it."""
CODE_SHARE = 0.05
"""Share of a tile that code and state take. Derived: 20 to 45 KB of 624 KiB in the published profiles."""
LEAST_PROPORTION = 0.05
"""Least proportion a planner is given."""
VALIDATION = {"resnet50": 50_000, "bert_large": 10_000}
"""Samples of one evaluation pass. Published: the benchmark's rules."""
LIBRARY_2018 = 1.45
"""Cycles of the 2018 library on GC2 over those of the formulas, which describe the library of 2023. Fitted,
once."""


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
        evaluation = params["mode"] == "inference" and str(params.get("task")).startswith("mlperf")
        if evaluation and params["name"] in VALIDATION:
            return record.rate(VALIDATION[params["name"]] / samples * seconds * record.chip.clock_hz)
        if params.get("epochs") or evaluation:
            raise NotPredicted("the samples of an epoch or evaluation pass are not in the record")
        return record.rate(seconds * record.chip.clock_hz)
    raise NotPredicted(f"metric {record.metric!r} of a network is not modelled")


def workload(record: Record) -> Workload:
    """The record's network on its target.

    Raises:
        NotPredicted: the network is not one that podrun builds, or the record leaves its shape open.
    """
    name = _name(record)
    if name in CATALOGUE:
        return _image(record, name)
    if name in TRANSFORMERS:
        return _transformer(record, name)
    if name == "lstm":
        return _lstm(record)
    raise NotPredicted(f"network {name!r} is not among those podrun builds, or its size is not stated")


def _name(record: Record) -> str:
    """The network's name in the catalogue, as far as it is there."""
    (name,) = record.need("name")
    return ASSUMED_VARIANT.get(name, str(name))


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
    side = params.get("image_size") or CATALOGUE[name].side
    per, replicas = _layout(record, name)
    micro = int(params["micro_batch"])
    if micro == 1 and record.ipus > 1:
        micro = TRAINING_IMAGES.get(name, 1)
    partials = TYPES[params["partials_type"]]
    if record.chip is not GC2 and params["input_type"] != "fp32":
        partials = "float16"
    recompute = bool(params["recompute"]) or (train and (record.ipus > 1 or per > 1))
    question = (
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
    report, weights = trace.image_network(*question)
    cycles = float(report["step"]["cycles"])
    if per > 1:
        # Whole blocks never split evenly. (Stages of a pipeline recompute their forward pass, as above.)
        cycles *= PIPELINE_IMBALANCE
    batch = Batch(
        cycles / per,
        per,
        _accumulation(record, micro, replicas),
        replicas,
        boundary_bytes=micro * side * side * 2.0,
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
    layers, hidden = TRANSFORMERS[name].layers, TRANSFORMERS[name].hidden
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
    question = (record.chip.name, micro, tokens, name)
    proportion = params["available_memory_proportion"]
    if not train:
        # A served model's weights stay on its chip: products have what they leave.
        held = 2.0 * WEIGHTS_PER_HIDDEN * layers * hidden**2 / record.chip.sram_bytes
        proportion = max(LEAST_PROPORTION, min(proportion, 1.0 - held - CODE_SHARE))
    partials = "float16"
    share = 1.0 if TRANSFORMERS[name].causal else 0.15
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
    task = str(params.get("task"))
    streamed = name == "bert_large" and task.startswith(("pretrain", "mlperf"))
    batch = Batch(
        slowest,
        per,
        _accumulation(record, micro * packs, replicas),
        replicas,
        boundary_bytes=micro * tokens * hidden * 2.0,
        weights=weights / per,
        gradient_bytes=2.0,
        state_bytes=8.0 if streamed else 0.0,
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


VERTEX_SHARES = {
    "vertex_state": 0.34,
    "edge_pointers": 0.236,
    "copy_pointers": 0.134,
    "vertex_padding": 0.0425,
    "vector_descriptors": 0.0876,
    "run_instructions": 0.161,
}
"""How vertex data divides on GC2. Derived from one profile of 2018."""
EXECUTABLE_CODE_GC2 = 8192
"""Bytes of vertex and runtime code on each tile with the library of 2018. Published: the same on every
tile."""
VERTEX_DATA_2018 = 1.9
"""Vertex data of the 2018 library on GC2 over today's. Fitted: pointers were not packed yet."""
VARIABLES_2018 = 1.4
"""Bytes of variables over the most that live at one time: every tile has its own fullest moment. Derived
from two profiles of 2018 (1.35 and 1.50); the library of today shares storage better.
"""
INTERLEAVED_SHARE = {"train": 0.75, "inference": 0.4}
"""Share of variables in interleaved memory. Derived from two profiles of 2018."""


def memory(record: Record) -> float:
    """Bytes of a compiled network."""
    (category,) = record.need("category")
    name = _name(record)
    if record.metric != "bytes":
        raise NotPredicted(f"metric {record.metric!r} of kind 'memory' is not modelled")
    old = record.chip is GC2
    parts = _transformer_memory(record, name) if name in TRANSFORMERS else _network_memory(record, name)
    code = parts["code"]
    vertex_data = code["vertex_state"] * (VERTEX_DATA_2018 if old else 1.0)
    exchange = code["exchange_code"]
    executable = EXECUTABLE_CODE_GC2 * record.chip.tiles if old else code.get("vertex_code", 0.0)
    control = 0.0 if old else code["control_code"]
    variables = parts["always"] + parts["peak"]
    if old:
        variables = max(variables, VARIABLES_2018 * (parts["always"] + parts["live"]))
    total = variables + vertex_data + exchange + executable + control
    interleaved = INTERLEAVED_SHARE["train" if _training(record) else "inference"]
    figures = {
        "total": total,
        "total_including_gaps": total,
        "total_excluding_gaps": total,
        "mean_tile": total / record.chip.tiles,
        "max_tile": total / record.chip.tiles * TILE_IMBALANCE,
        "variables": variables,
        "variables_peak": variables,
        "variables_interleaved": variables * interleaved,
        "variables_non_interleaved": variables * (1.0 - interleaved),
        "max_live": parts["always"] + parts["live"],
        "vertex_data": vertex_data,
        "vertex_state": vertex_data,
        "vertex_code": code.get("vertex_code", 0.0),
        "exchange_code": exchange,
        "control_code": code["control_code"],
        "executable_code": executable,
    }
    if old:
        figures.update({part: share * vertex_data for part, share in VERTEX_SHARES.items()})
    if category not in figures:
        raise NotPredicted(f"memory category {category!r} is not modelled")
    return float(figures[category])


def _network_memory(record: Record, name: str) -> dict[str, Any]:
    """An image network or an LSTM stack, one IPU."""
    params, train = record.params, _training(record)
    if name == "lstm":
        hidden, steps = record.need("hidden_size", "time_steps")
        layers = int(params.get("layers") or 1)
        report, _ = trace.lstm_network(
            record.chip.name, int(params["micro_batch"]), int(steps), layers, int(hidden), train, "float32"
        )
    elif name in CATALOGUE:
        partials = "float32" if record.chip is GC2 else "float16"
        report, _ = trace.image_network(
            name,
            record.chip.name,
            int(params["micro_batch"]),
            CATALOGUE[name].side,
            train,
            params["norm"],
            False,
            "float16",
            partials,
            params["available_memory_proportion"],
            int(params.get("norm_group_size") or 1),
        )
    else:
        raise NotPredicted(f"network {name!r} is not among those podrun builds, or its size is not stated")
    found = report["memory"]
    return {
        "always": found["always_live_bytes"],
        "peak": found["not_always_live_peak_bytes"],
        "live": found["activations_peak_bytes"],
        "code": found["code"],
    }


def _transformer_memory(record: Record, name: str) -> dict[str, Any]:
    """Encoder layers ``first_layer`` to ``last_layer`` of a transformer, or one operation of a layer."""
    layers = TRANSFORMERS[name].layers
    tokens, train = sequence_length(record), _training(record)
    costs = trace.transformer_parts(
        record.chip.name,
        int(record.params["micro_batch"]),
        tokens,
        name,
        train,
        "float16",
        record.params["available_memory_proportion"],
    )
    first, last = record.params.get("first_layer"), record.params.get("last_layer")
    held = layers if first is None or last is None else int(last) - int(first) + 1
    starts = first in (None, 0)
    layer, embedding = costs["layer"][0], costs["embedding"][0]
    op = record.params.get("op")
    if op is not None:
        # A product's row is of the product alone, not of the bias and the rearrangements around it.
        node = "MatMul:" if op.endswith("_matmul") else ""
        inside = [
            code for scope, code in layer["code_by_scope"].items() if op in scope.split("/") and node in scope
        ]
        if not inside:
            raise NotPredicted(f"operation {op!r} is not one of the layer's")
        summed = {part: float(sum(code[part] for code in inside)) for part in inside[0]}
        return {"always": 0.0, "peak": 0.0, "live": 0.0, "code": {"vertex_code": 0.0, **summed}}
    found, table = layer["memory"], embedding["memory"]
    code = {
        "vertex_code": max(found["code"]["vertex_code"], table["code"]["vertex_code"]),
        "vertex_state": held * found["code"]["vertex_state"],
        "exchange_code": found["code"]["exchange_code"] * (1.0 + REPEATED * (held - 1)),
        "control_code": held * found["code"]["control_code"],
    }
    for part in ("vertex_state", "exchange_code", "control_code"):
        code[part] += table["code"][part] if starts else 0.0
    always = held * found["always_live_bytes"] + (table["always_live_bytes"] if starts else 0.0)
    stash = found["activations_peak_bytes"] * (held - 1) if train else 0.0
    return {
        "always": always,
        "peak": found["not_always_live_peak_bytes"] + stash,
        "live": found["activations_peak_bytes"] + stash,
        "code": code,
    }
