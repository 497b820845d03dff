"""Records about memory: bytes of a compiled network by category, on the chip or on a tile."""

from __future__ import annotations

from typing import Any

from networks import trace

from fidelity_kinds.applications import is_training, network_name, operand_type, sequence_length
from fidelity_kinds.record import NotPredicted, Record
from podrun.costmodel.cost import TILE_IMBALANCE
from podrun.costmodel.equations import REPEATED
from podrun.costmodel.target import GC2
from podrun.models import CATALOGUE, TRANSFORMERS

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
VERTEX_DATA_2018 = 1.8
"""Vertex data of the 2018 library on GC2 over today's. Fitted: pointers were not packed yet."""
VARIABLES_2018 = 1.425
"""Bytes of variables over the most that live at one time: every tile has its own fullest moment. Derived:
mean of two profiles of 2018 (1.35 and 1.50); the library of today shares storage better.
"""
IMBALANCE_2018 = 1.14
"""Fullest tile over mean tile with the library of 2018 and 2019. Derived: eight profiles give 1.10 to
1.20."""
INTERLEAVED_SHARE = {"train": 0.75, "inference": 0.4}
"""Share of variables in interleaved memory. Derived from two profiles of 2018."""
PARTS = {"layer_norm": {"layer_norm", "layer_norm2"}}
"""Scopes of an operation's row, where it has more than one. The normalisations' state counted once for each
would exceed, with the other operations', all state of a layer in the same profile: the row is of both."""


def memory(record: Record) -> float:
    """Bytes of a compiled network."""
    (category,) = record.need("category")
    name = network_name(record)
    if record.metric != "bytes":
        raise NotPredicted(f"metric {record.metric!r} of kind 'memory' is not modelled")
    old = record.chip is GC2
    parts = _transformer(record, name) if name in TRANSFORMERS else _network(record, name)
    code = parts["code"]
    vertex_data = code["vertex_state"] * (VERTEX_DATA_2018 if old else 1.0)
    exchange = code["exchange_code"]
    executable = EXECUTABLE_CODE_GC2 * record.chip.tiles if old else code.get("vertex_code", 0.0)
    control = 0.0 if old else code["control_code"]
    variables = parts["always"] + parts["peak"]
    if old:
        variables = max(variables, VARIABLES_2018 * (parts["always"] + parts["live"]))
    total = variables + vertex_data + exchange + executable + control
    interleaved = INTERLEAVED_SHARE["train" if is_training(record) else "inference"]
    figures = {
        "total": total,
        "total_including_gaps": total,
        "total_excluding_gaps": total,
        "mean_tile": total / record.chip.tiles,
        "max_tile": total / record.chip.tiles * (IMBALANCE_2018 if old else TILE_IMBALANCE),
        "variables": variables,
        "variables_peak": variables,
        "variables_interleaved": variables * interleaved,
        "variables_non_interleaved": variables * (1.0 - interleaved),
        "max_live": parts["always"] + parts["peak"],
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


def _network(record: Record, name: str) -> dict[str, Any]:
    """An image network or an LSTM stack, one IPU."""
    params, train = record.params, is_training(record)
    if name == "lstm":
        hidden, steps = record.need("hidden_size", "time_steps")
        layers = int(params.get("layers") or 1)
        report, _ = trace.lstm_network(
            record.chip.name,
            int(params["micro_batch"]),
            int(steps),
            layers,
            int(hidden),
            train,
            "float32",
            operand_type(record),
        )
    elif name in CATALOGUE:
        kind = operand_type(record)
        partials = "float32" if record.chip is GC2 or kind == "float32" else "float16"
        report, _ = trace.image_network(
            name,
            record.chip.name,
            int(params["micro_batch"]),
            CATALOGUE[name].side,
            train,
            params["norm"],
            False,
            kind,
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


def _transformer(record: Record, name: str) -> dict[str, Any]:
    """Encoder layers ``first_layer`` to ``last_layer`` of a transformer, or one operation of a layer."""
    layers = int(record.params.get("layers") or TRANSFORMERS[name].layers)
    tokens, train = sequence_length(record), is_training(record)
    costs = trace.transformer_parts(
        record.chip.name,
        int(record.params["micro_batch"]),
        tokens,
        name,
        train,
        operand_type(record),
        record.params["available_memory_proportion"],
        dtype=operand_type(record),
    )
    first, last = record.params.get("first_layer"), record.params.get("last_layer")
    held = layers if first is None or last is None else int(last) - int(first) + 1
    starts = first in (None, 0)
    layer, embedding = costs["layer"][0], costs["embedding"][0]
    op = record.params.get("op")
    if op is not None:
        # A product's row is of the product alone, not of the bias and the rearrangements around it.
        node = "MatMul:" if op.endswith("_matmul") else ""
        names = PARTS.get(op, {op})
        inside = [
            code
            for scope, code in layer["code_by_scope"].items()
            if names & set(scope.split("/")) and node in scope
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
