"""Records about whole networks: rates and step times.

A network is traced as a JAX function, costed on tiles, and put on the system by
`podrun.costmodel.batch`. What a record leaves open is filled from the tables here: one layout per
network, one length per task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from networks import trace

from fidelity_kinds.benchmark_only import benchmark_only
from fidelity_kinds.layouts import Layout, layout_of, proportion
from fidelity_kinds.record import TYPES, NotPredicted, Record
from podrun.costmodel import vertices
from podrun.costmodel.batch import BatchWork, batch_seconds
from podrun.costmodel.exchange import all_reduce_seconds
from podrun.costmodel.target import GC2, Chip
from podrun.models import CATALOGUE, TRANSFORMERS

ASSUMED_VARIANT = {
    "vit_variant_unstated": "vit_b16",
    "resnet_depth_unstated": "resnet50",
    "clip_text": "clip_text_large",
}
"""The variant taken where the source names none. CLIP's text tower that is served is Stable Diffusion's encoder of
prompts (ByteMLPerf's `clip-text-encoder.onnx`)."""
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
PIPELINE_IMBALANCE = 1.25
"""Cycles of the slowest stage over those of the mean stage, of an image network cut into a pipeline. Assumed; the
published cuts are more even, so it stands for other waiting too (`docs/fidelity.md`, *Considered, and left*)."""
OPTIMIZER = {"resnet50": "lars", "bert_base": "lamb", "bert_large": "lamb", "gpt_117m": "adam"}
COUNTED = ("cycles", "tile_mean_cycles", "fraction")
"""Metrics read from the device's own counters, which do not count what it waits for the host's first word."""
ITEM = {"float16": 2.0, "float32": 4.0}
WEIGHTS_PER_HIDDEN = 12.0
"""Weights of an encoder layer over its hidden size squared: four products in attention, eight behind it."""
PACKED_TOKEN_SECONDS = 80e-9
"""Seconds that PyTorch's host program takes for each token of packed text, while the IPUs wait. Derived from the
vendor's rates alone, PyTorch's against PopART's: what a batch of BERT-Large loses on 64 IPUs that it does not
lose on 16 (85 ns at 128 tokens, 77 ns at 512). One process feeds them, as its benchmark's commands say."""
CODE_SHARE = 0.05
"""Share of a tile that code and state take. Derived: 20 to 45 KB of 624 KiB in the published profiles."""
LEAST_PROPORTION = 0.05
"""Least proportion a planner is given."""
STATISTICS_BYTES = 2 * 512 * 4.0
"""Bytes of a normalisation's two statistics: those of 512 channels, the middle of ResNet-50's."""
VALIDATION = {"resnet50": 50_000, "bert_large": 10_000}
"""Samples of one evaluation pass. Published: the benchmark's rules."""
LIBRARY_2018 = 1.5
"""Cycles of the 2018 library on GC2 over those of the formulas, which describe the library of 2023. Fitted:
mean of thirteen rows."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A network on a system: cycles of a micro-batch per layer, and what the batch needs beside."""

    samples_per_micro_batch: float
    batch: BatchWork
    causes: Mapping[str, float] | None = None
    """Cycles of a micro-batch by cause, where one IPU runs all of it."""


def network(record: Record) -> float:
    """A network's rate, step time or cycles."""
    params = record.params
    load = workload(record)
    causes = batch_seconds(record.chip, load.batch)
    if record.metric in COUNTED and not is_training(record):
        causes["host"] = 0.0
    samples = load.samples_per_micro_batch * load.batch.accumulation * load.batch.replicas
    causes["front_end"] = _front_end_seconds(record, samples)
    seconds = sum(causes.values())
    if record.chip is GC2:
        seconds *= LIBRARY_2018
    if params["phase"] != "total" or record.metric == "fraction":
        return _phase(record, load, causes, seconds)
    if record.metric == "samples_per_s":
        return samples / seconds
    if record.metric == "tokens_per_s":
        return samples / seconds * (sequence_length(record) / packing(record))
    if record.metric == "latency_ms":
        return layout_of(record, network_name(record)).in_flight * seconds * 1e3
    if record.metric in ("time_s", "cycles"):
        evaluation = params["mode"] == "inference" and str(params.get("task")).startswith("mlperf")
        if evaluation and params["name"] in VALIDATION:
            return record.rate(VALIDATION[params["name"]] / samples * seconds * record.chip.clock_hz)
        if params.get("epochs") or evaluation:
            raise NotPredicted("the samples of an epoch or evaluation pass are not in the record")
        return record.rate(seconds * record.chip.clock_hz)
    raise NotPredicted(f"metric {record.metric!r} of a network is not modelled")


def _front_end_seconds(record: Record, samples: float) -> float:
    """What a batch waits for the program on the host: PyTorch's packs text of all replicas in one process."""
    params = record.params
    if params.get("framework") != "pytorch" or not params.get("packed") or not is_training(record):
        return 0.0
    return samples / packing(record) * sequence_length(record) * PACKED_TOKEN_SECONDS


def _phase(record: Record, load: Workload, causes: Mapping[str, float], seconds: float) -> float:
    """A phase of a step on one IPU as tiles see it on average: whatever is neither compute nor exchange is
    waiting for others at a barrier.
    """
    if load.causes is None or record.params["phase"] not in ("total", "compute", "exchange", "sync"):
        raise NotPredicted(f"phase {record.params['phase']!r} of this network is not separated")
    micro = load.batch.accumulation / record.chip.clock_hz
    phases = {
        "total": seconds,
        "compute": micro * (load.causes["compute"] + load.causes["rearrange"]) + causes.get("update", 0.0),
        "exchange": micro * load.causes["exchange"],
    }
    phases["sync"] = seconds - phases["compute"] - phases["exchange"]
    found = phases[record.params["phase"]]
    return found / seconds if record.metric == "fraction" else record.rate(found * record.chip.clock_hz)


def workload(record: Record) -> Workload:
    """The record's network on its target.

    Raises:
        NotPredicted: the network is not one that podrun builds, or the record leaves its shape open.
    """
    name = network_name(record)
    if record.params["input_type"] == "fp8" and "amp_inputs_float8" not in record.chip.facts:
        raise NotPredicted(f"the matrix unit of {record.chip.title} takes no float8")
    if name in CATALOGUE:
        return _image(record, name)
    if name in TRANSFORMERS:
        return _transformer(record, name)
    if name == "lstm":
        return _lstm(record)
    raise NotPredicted(f"network {name!r} is not among those podrun builds, or its size is not stated")


def network_name(record: Record) -> str:
    """The network's name in the catalogue, as far as it is there."""
    (name,) = record.need("name")
    return ASSUMED_VARIANT.get(name, str(name))


def is_training(record: Record) -> bool:
    """Whether the record is of training."""
    return bool(record.params["mode"] == "train")


def _spread(record: Record, layout: Layout) -> tuple[int, int]:
    """IPUs per replica and replicas."""
    ipus = max(record.ipus, record.params.get("ipus") or 1)
    stated = record.params["ipus_per_replica"]
    per = min(int(stated) if stated > 1 else layout.ipus, ipus)
    return per, max(1, ipus // per)


def _accumulating(record: Record, weights: float) -> float:
    """Cycles in which a micro-batch's gradients of ``weights`` parameters are added to those before it."""
    if not is_training(record) or record.ipus == 1:
        return 0.0
    return float(vertices.scaled_add_cycles(weights / record.chip.tiles, operand_type(record)))


def _shared_statistics(record: Record, span: int, report: Mapping[str, Any], recompute: bool) -> float:
    """Cycles in which ``span`` replicas sum the two statistics of each normalisation: forward, again where the
    forward pass is made again, and those of its gradient (the library's distributed normalisation).
    """
    norms, times = report["normalisations"], 3 if recompute else 2
    seconds = all_reduce_seconds(record.chip, span, STATISTICS_BYTES)
    return norms * times * seconds * record.chip.clock_hz


def _accumulation(record: Record, samples: float, replicas: int) -> int:
    stated = int(record.params["gradient_accumulation"])
    total = record.params.get("global_batch")
    if not total and record.params.get("name") in TRANSFORMERS:
        total = GLOBAL_BATCH["mlperf" if str(record.params.get("task")).startswith("mlperf") else "other"]
    if stated == 1 and total and is_training(record) and record.ipus > 1:
        return max(1, round(total / (samples * replicas)))
    return stated


def _image(record: Record, name: str) -> Workload:
    params, train = record.params, is_training(record)
    side = params.get("image_size") or CATALOGUE[name].side
    layout = layout_of(record, name)
    per, replicas = _spread(record, layout)
    micro = _stated_micro_batch(record, replicas) or layout.samples
    recompute = bool(params["recompute"]) or (train and (record.ipus > 1 or per > 1))
    question = (
        name,
        record.chip.name,
        micro,
        side,
        train,
        params.get("norm") or layout.norm,
        recompute,
        operand_type(record),
        partials_type(record),
        proportion(record, layout),
        int(params.get("norm_group_size") or 1),
        params["input_type"] == "fp8",
    )
    report, weights = trace.image_network(*question)
    cycles = float(report["step"]["cycles"]) + _accumulating(record, weights)
    if train and layout.norm_span > 1:
        cycles += _shared_statistics(record, layout.norm_span, report, recompute)
    if per > 1:
        # Whole blocks never split evenly. (Stages of a pipeline recompute their forward pass, as above.)
        cycles *= PIPELINE_IMBALANCE
    batch = BatchWork(
        cycles / per,
        per,
        _accumulation(record, micro, replicas),
        replicas,
        boundary_bytes=micro * side * side * ITEM[operand_type(record)],
        weights=weights / per,
        optimizer=params.get("optimizer") or OPTIMIZER.get(name, "momentum"),
        input_bytes=_from_host(record) * micro * side * side * 3 * (1.0 if train else 2.0),
        training=train,
    )
    return Workload(micro, batch, report["step"]["by_cause"] if per == 1 and not recompute else None)


def operand_type(record: Record) -> str:
    """Type of weights and activations; of FP8 networks, what lies between their products is halves."""
    return "float32" if record.params["input_type"] == "fp32" else "float16"


def partials_type(record: Record) -> str:
    """Type of partial sums; halves on Mk2 (the published configurations) and singles on GC2 where not
    stated.
    """
    stated = record.params.get("partials_type")
    if record.params["input_type"] == "fp32":
        return "float32"
    return TYPES[stated] if stated else ("float32" if record.chip is GC2 else "float16")


def _stated_micro_batch(record: Record, replicas: int) -> int | None:
    """Samples of a micro-batch, as far as the record fixes them."""
    params = record.params
    if params.get("micro_batch"):
        return int(params["micro_batch"])
    total, steps = params.get("global_batch"), params["gradient_accumulation"]
    if total and (not is_training(record) or steps > 1 or record.ipus == 1):
        return max(1, round(total / (steps * replicas)))
    return None


def _from_host(record: Record) -> float:
    """1 where the samples come from the host, 0 where they are made on the device."""
    return 0.0 if record.params.get("data_source") == "on_device" else 1.0


def sequence_length(record: Record) -> int:
    """Tokens of a sequence or pack."""
    stated = record.params.get("sequence_length")
    if stated:
        return int(stated)
    if record.params.get("name") == "gpt_117m":
        return 1024
    served = layout_of(record, network_name(record)).length
    if served:
        return served
    return SEQUENCE_LENGTH.get(str(record.params.get("task")), 128)


def packing(record: Record) -> float:
    """Sequences per pack."""
    if record.params["packing_factor"] > 1.0:
        return float(record.params["packing_factor"])
    task = str(record.params.get("task"))
    if not is_training(record):
        packed = record.params.get("packed") or layout_of(record, network_name(record)).packed
        return INFERENCE_PACKING if packed else 1.0
    if record.params.get("packed") or task.startswith("mlperf"):
        return PACKING.get(task, 2.0)
    return 1.0


def _transformer(record: Record, name: str) -> Workload:
    params, train = record.params, is_training(record)
    layers, hidden = int(params.get("layers") or TRANSFORMERS[name].layers), TRANSFORMERS[name].hidden
    tokens, packs = sequence_length(record), packing(record)
    layout = layout_of(record, name)
    per, replicas = _spread(record, layout)
    micro = int(params.get("micro_batch") or 0)
    if not micro and train and params.get("samples_per_micro_step"):
        micro = max(1, round(params["samples_per_micro_step"] / packs))
    if not micro:
        micro = layout.sequences(tokens) if train else int(params.get("global_batch") or replicas) // replicas
    micro = max(1, micro)
    question, item = (record.chip.name, micro, tokens, name), ITEM[operand_type(record)]
    share = proportion(record, layout)
    if not train:
        # A served model's weights stay on its chip: products have what they leave.
        held = item * WEIGHTS_PER_HIDDEN * layers * hidden**2 / record.chip.sram_bytes
        share = max(LEAST_PROPORTION, min(share, 1.0 - held - CODE_SHARE))
    how = (partials_type(record), share, 1.0 if TRANSFORMERS[name].causal else 0.15)
    kind = {"dtype": operand_type(record), "eight_bit": params["input_type"] == "fp8"}
    costs = trace.transformer_parts(*question, train, *how, layout.attention_dropout, **kind)
    cycles = {part: float(report["step"]["cycles"]) for part, (report, _) in costs.items()}
    if train and per > 1:
        again = trace.transformer_parts(*question, False, *how, **kind)
        cycles["layer"] += again["layer"][0]["step"]["cycles"]
    cycles["layer"] += _accumulating(record, costs["layer"][1])
    # Answers to questions are two numbers a token; words are predicted in pretraining alone.
    head = cycles["head"] if train and params.get("task") != "squad" else 0.0
    ends = cycles["embedding"] + head
    slowest = tied_pipeline(
        record.chip,
        layers,
        cycles["layer"],
        ends,
        per,
        float(costs["layer"][1]),
        float(costs["embedding"][1]),
        pieces=2 if layout.halves else 1,
        first=layout.first if per == layout.ipus else None,
    )
    weights = costs["layer"][1] * layers + costs["embedding"][1]
    task = str(params.get("task"))
    streamed = name == "bert_large" and task.startswith(("pretrain", "mlperf"))
    batch = BatchWork(
        slowest,
        per,
        _accumulation(record, micro * packs, replicas),
        replicas,
        boundary_bytes=micro * tokens * hidden * item,
        weights=weights / per,
        gradient_bytes=item,
        state_bytes=8.0 if streamed else 0.0,
        optimizer=params.get("optimizer") or OPTIMIZER.get(name, "adam"),
        input_bytes=_from_host(record) * micro * tokens * 8.0,
        training=train,
    )
    return Workload(micro * packs, batch)


def _lstm(record: Record) -> Workload:
    hidden, steps = record.need("hidden_size", "time_steps")
    micro, train = int(record.params.get("micro_batch") or 1), is_training(record)
    layers = int(record.params.get("layers") or 1)
    report, weights = trace.lstm_network(
        record.chip.name,
        micro,
        int(steps),
        layers,
        int(hidden),
        train,
        partials_type(record),
        operand_type(record),
    )
    optimizer = record.params.get("optimizer") or "sgd"
    batch = BatchWork(report["step"]["cycles"], weights=weights, optimizer=optimizer, training=train)
    return Workload(micro, batch, report["step"]["by_cause"])


WEIGHT_SHARE = 0.4
"""Share of a chip's SRAM that weights and their accumulated gradients may take beside activations and code. Assumed:
with it, published layouts of BERT-Large on four IPUs get seven layers per IPU.
"""


@benchmark_only
def tied_pipeline(
    chip: Chip,
    layers: int,
    layer: float,
    ends: float,
    stages: int,
    layer_weights: float,
    end_weights: float,
    *,
    pieces: int = 1,
    first: float | None = None,
) -> float:
    """Cycles of the slowest IPU when embedding and head share a table and so stand on the first IPU.

    The first IPU takes as many layers as its memory allows beside the table (two bytes for each weight and
    two for its gradient); the rest are spread evenly over the others. ``ends``: cycles of embedding and
    head. ``pieces``: equal parts of a layer that may stand on different IPUs. ``first``: layers on the first
    IPU, where a layout says.
    """
    layers, layer, layer_weights = layers * pieces, layer / pieces, layer_weights / pieces
    if stages <= 1:
        return layers * layer + ends
    room = chip.sram_bytes * WEIGHT_SHARE / 4.0
    best = math.inf
    for held in range(layers + 1) if first is None else (round(first * pieces),):
        others = math.ceil((layers - held) / (stages - 1))
        heaviest = max(end_weights + held * layer_weights, others * layer_weights)
        if heaviest <= room or held == 0 or first is not None:
            best = min(best, max(held * layer + ends, others * layer))
    return best
