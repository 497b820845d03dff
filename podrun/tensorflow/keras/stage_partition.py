"""``auto_pipeline``: layers of a model divided into stages by what each costs, and what layers read, write and carry.

A profile has ``layerName``, ``layerType`` and ``layerInfo``: cycles and bytes of each layer. A cluster has ``clock`` in
Hz, ``memory`` of an IPU in MiB and ``connection``, for each IPU its speeds in GiB/s and idle cycles.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    import tf_keras

    from podrun.tensorflow.keras.stage_classes import FunctionalLayerPipelineStageAssignment

_MIB, _GIB = 1024**2, 1024**3
NOT_POSSIBLE = int(1e16)
"""The cost of what cannot be."""


def empty_layer_profile() -> dict[str, Any]:
    """The profile of a layer that costs nothing."""
    memory = {"inputs": 0, "outputs": 0, "maxTemporary": 0, "curCarryOver": 0, "curActivation": 0}
    return {"cycle": {"forward": 0, "backward": 0}, "memory": {"shared": {}, "exclusive": {}, **memory}}


def empty_range_profile() -> dict[str, Any]:
    """The profile of no layers, to which layers are added."""
    memory = {"maxTemporary": 0, "curActivation": 0, "totalMemory": 0}
    return {"cycle": {"forward": 0, "backward": 0}, "memory": {"shared": {}, "exclusive": {}, **memory}}


def copied_profile(info: dict[str, Any]) -> dict[str, Any]:
    """An equal profile that may be changed."""
    return copy.deepcopy(info)


def add_layer_to_range(range_info: dict[str, Any], layer_info: dict[str, Any]) -> dict[str, Any]:
    """Add a layer to the profile of a range, which is returned. What layers share counts once; temporary memory is the
    most of any layer, with what is carried past it.
    """
    for name, cycles in layer_info["cycle"].items():
        range_info["cycle"][name] += cycles
    whole, own = range_info["memory"], layer_info["memory"]
    whole.setdefault("inputs", own["inputs"])
    whole["outputs"] = own["outputs"]
    temporary = own["maxTemporary"] + own["curCarryOver"] + whole["curActivation"]
    more = max(0, temporary - whole["maxTemporary"])
    whole["maxTemporary"] += more
    whole["curActivation"] += own["curActivation"]
    fresh = {name: size for name, size in own["shared"].items() if name not in whole["shared"]}
    whole["shared"] |= fresh
    for name, size in own["exclusive"].items():
        whole["exclusive"][name] = whole["exclusive"].get(name, 0) + size
    whole["totalMemory"] += more + sum(fresh.values()) + sum(own["exclusive"].values())
    return range_info


def stage_transfer_cycles(
    cluster_info: dict[str, Any], ipu_id: int, model_profile: dict[str, Any], range_start: int, range_end: int
) -> int:
    """The cycles in which an IPU with a range of layers gets and gives values, and the host those of the model."""
    links, layers = cluster_info["connection"], model_profile["layerInfo"]

    def cycles(ipu: int, layer: int, way: str, side: str) -> int:
        per_clock = links[ipu][f"{way}GBps"] * _GIB / cluster_info["clock"]
        return int(links[ipu][f"{way}IdleCycle"] + layers[layer]["memory"][side] / per_clock)

    last = len(links) - 1
    total = cycles(0, 0, "recv", "inputs") + cycles(last, len(layers) - 1, "send", "outputs")
    if ipu_id:
        total += cycles(ipu_id, range_start, "recv", "inputs")
    if ipu_id != last:
        total += cycles(ipu_id, range_end, "send", "outputs")
    return total


def range_cost_matrix(model_profile: dict[str, Any], mem_limit: int) -> np.ndarray:
    """The cycles of each range of layers ``[start, end]`` as a stage; `NOT_POSSIBLE` if it does not fit, or if a layer
    of it is called in another range too.
    """
    names, layers = model_profile["layerName"], model_profile["layerInfo"]
    calls = Counter(names)
    costs = np.full((len(layers), len(layers)), NOT_POSSIBLE, np.int64)
    for start in range(len(layers)):
        profile, inside = empty_range_profile(), Counter[str]()
        for end in range(start, len(layers)):
            add_layer_to_range(profile, layers[end])
            if profile["memory"]["totalMemory"] > mem_limit:
                break
            inside[names[end]] += 1
            if all(calls[name] == count for name, count in inside.items()):
                costs[start, end] = profile["cycle"]["forward"]
    return costs


def transfer_cost_matrix(model_profile: dict[str, Any], cluster_info: dict[str, Any]) -> np.ndarray:
    """`stage_transfer_cycles` of each IPU and range ``[ipu, start, end]``."""
    count, ipus = len(model_profile["layerInfo"]), len(cluster_info["connection"])
    costs = np.full((ipus, count, count), NOT_POSSIBLE, np.int64)
    for ipu, start in np.ndindex(ipus, count):
        for end in range(start, count):
            costs[ipu, start, end] = stage_transfer_cycles(cluster_info, ipu, model_profile, start, end)
    return costs


def partition_by_cycles(
    model_profile: dict[str, Any], cluster_info: dict[str, Any], config: dict[str, Any]
) -> list[int]:
    """The first layer of each stage, and the number of layers at the end, so that the slowest stage and the slowest
    exchange take the fewest cycles together. ValueError if no division fits.

    For a limit on an exchange: the division whose slowest stage is fastest (Harlap et al., PipeDream, 2018). It gets no
    slower as the limit rises, so that limits between two others are tried only if they can be better than the best.
    """
    limit = int(cluster_info["memory"] * config["memoryProportion"] * _MIB)
    costs = range_cost_matrix(model_profile, limit)
    transfers = transfer_cost_matrix(model_profile, cluster_info)
    limits = np.unique(transfers[transfers < NOT_POSSIBLE])
    best, chosen = (NOT_POSSIBLE, NOT_POSSIBLE), list[int]()

    def tried(place: int) -> int:
        nonlocal best, chosen
        most = int(limits[place])
        slowest, starts = _fastest_division(np.where(transfers <= most, costs[None], NOT_POSSIBLE))
        if slowest < NOT_POSSIBLE and (slowest + most, most) < best:
            best, chosen = (slowest + most, most), starts
        return slowest

    places = len(limits) if len(costs) >= len(transfers) else 0
    between = [(-1, places - 1, tried(places - 1))] if places else []
    while between:
        low, high, fastest = between.pop()
        if high - low > 1 and (fastest + limits[low + 1], limits[low + 1]) < best:
            middle = (low + high) // 2
            between += [(middle, high, fastest), (low, middle, tried(middle))]
    if not chosen:
        raise ValueError(
            f"no division of {len(costs)} layers fits {len(transfers)} IPUs: take more of them, or a larger "
            "memoryProportion"
        )
    return chosen


def _fastest_division(costs: np.ndarray) -> tuple[int, list[int]]:
    """The least cost of the costliest stage, of stages ``[ipu, start, end]`` for all layers, and their limits."""
    ipus, count, _ = costs.shape
    reached, before = costs[0, 0], np.zeros((ipus, count), np.int64)
    for ipu in range(1, ipus):
        candidates = np.maximum(reached[:-1, None], costs[ipu, 1:])
        before[ipu] = candidates.argmin(0)
        reached = candidates.min(0)
    limits, end = [count], count - 1
    for ipu in range(ipus - 1, 0, -1):
        end = int(before[ipu, end])
        limits.append(end + 1)
    return int(reached[-1]), [0, *reversed(limits)]


def _symbolic(structure: object) -> Iterator[tf.Tensor]:
    """The tensors in what a layer was called with."""
    return (t for t in tf.nest.flatten(structure) if hasattr(t, "shape") and hasattr(t, "dtype"))


def _sized(shape: Sequence[int | None], batch_size: int) -> tuple[int, ...]:
    """A shape with the batch size; ValueError if another dimension is not known."""
    if not shape:
        return ()
    first, *rest = shape
    if None in rest:
        raise ValueError(f"the shape {shape} has unknown dimensions besides that of the batch")
    return (batch_size if first is None else first, *(int(d or 0) for d in rest))


def with_batch_size(shape: Sequence[int | None], batch_size: int) -> Sequence[int | None]:
    """The shape, with the batch size in the place of a first dimension that is not known."""
    return (batch_size, *shape[1:]) if shape[0] is None else shape


def tensor_bytes(tensor: tf.Tensor | tf.TensorSpec, batch_size: int) -> int:
    """The bytes of a tensor of this batch size."""
    return int(np.prod(_sized(tensor.shape.as_list(), batch_size), dtype=np.int64)) * int(tensor.dtype.size)


def parse_model_intermediate(
    model: tf_keras.Model, batch_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bytes that each call of a layer carries past it for later ones, gets and gives, both with what is carried."""
    calls = [
        a.layer.inbound_nodes[getattr(a, "node_index", 0)] for a in model.get_pipeline_stage_assignment()
    ]
    births = {id(t): (-1, t) for t in _symbolic(model.input)}
    births |= {id(t): (place, t) for place, call in enumerate(calls) for t in _symbolic(call.output_tensors)}
    read = [{id(t) for t in _symbolic([c.call_args, c.call_kwargs])} & births.keys() for c in calls]
    sizes = {key: tensor_bytes(t, batch_size) for key, (_, t) in births.items()}
    carried = np.zeros(len(calls), np.int64)
    entering, leaving = np.zeros_like(carried), np.zeros_like(carried)
    for key, (birth, _) in births.items():
        uses = [place for place, names in enumerate(read) if key in names]
        last = max(uses, default=birth)
        carried[birth + 1 : last] += sizes[key]
        for place in uses:
            entering[place] += 0 if birth < place < last else sizes[key]
        if birth >= 0:
            leaving[birth] += sizes[key]
    return carried, carried + entering, carried + leaving


def print_profile_differences(
    estimated_profile: Sequence[dict[str, Any]], actual_profile: Sequence[dict[str, Any]]
) -> None:
    """Print thousands of cycles and MiB of each IPU, actual and estimated; rows that are zero in fact are left out."""
    for ipu, pair in enumerate(zip(actual_profile, estimated_profile, strict=False)):
        print(f"IPU {ipu}")
        for kind, unit, digits in (("cycle", 1000, 0), ("memory", _MIB, 2)):
            print(kind)
            actual, estimated = (_amounts(info, kind) for info in pair)
            for name, amount in ((n, a) for n, a in actual.items() if a):
                other = estimated.get(name, 0)
                columns = [round(value / unit, digits) for value in (amount, other, other - amount)]
                texts = (f"{k}: {v:>10}" for k, v in zip(("Act", "Est", "Diff"), columns, strict=True))
                percent = round((other - amount) / amount * 100, 2)
                print(f"{name:>20} |", *texts, f"Percent: {percent:>7}%", sep="  ")


def _amounts(info: dict[str, Any], kind: str) -> dict[str, int]:
    """The rows of a profile of a stage: its cycles, or its bytes by what they hold."""
    part = info[kind]
    if kind == "cycle":
        return {name: part[name] for name in ("total", "forward", "backward")}
    amounts = Counter({"total": part["totalMemory"], "notAlwaysAlive": part["maxTemporary"]})
    for name, size in (*part["shared"].items(), *part["exclusive"].items()):
        amounts[name.split("_")[0]] += size
    return dict(amounts)


def layer_call_type(assignment: FunctionalLayerPipelineStageAssignment, batch_size: int) -> str:
    """A text that is equal for calls that compute the same, be it with other weights: class, shapes and options."""
    layer = assignment.layer
    call = layer.inbound_nodes[getattr(assignment, "node_index", 0)]

    def told(value: object) -> str:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"{_sized(tf.TensorShape(value.shape).as_list(), batch_size)} {value.dtype}"
        return str(value)

    options = {
        name: str(value)
        for name, value in layer.get_config().items()
        if not any(word in name for word in ("trainable", "initializer", "name"))
        and not isinstance(value, float)
    }
    return json.dumps(
        {
            "class": [type(layer).__module__, type(layer).__name__],
            "args": [told(value) for value in tf.nest.flatten([call.call_args, call.call_kwargs])],
            "weight": [told(weight) for weight in layer.get_weights()],
            "config": options,
        },
        sort_keys=True,
    )
