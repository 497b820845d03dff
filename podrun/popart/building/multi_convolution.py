"""The arguments of ai.graphcore's multiconv: lists for each convolution, flat lists in its node."""

from __future__ import annotations

from typing import Any

from podrun.popart.errors import popart_exception


def multi_convolution(builder: Any, bound: dict[str, Any]) -> dict[str, Any]:
    """The arguments of multiconv, which come as a list for each convolution, as the node has them: one after the other.

    popart_exception, in PopART's words, for lists that do not fit together.
    """
    sets = bound["args"]
    if not isinstance(sets, (list, tuple)) or not all(isinstance(item, (list, tuple)) for item in sets):
        raise TypeError(
            "multiconv(): incompatible function arguments. Inputs are a list for each convolution: [[data, weights], "
            f"[data, weights, bias]], not {sets!r}."
        )
    for index, item in enumerate(sets):
        if len(item) < 2:
            raise popart_exception(
                f"MultiConv: input set {index} must have at least two inputs - data and weights"
            )
        if len(item) > 3:
            raise popart_exception(
                f"MultiConv: input set {index} can have at most three inputs - data, weights, and bias"
            )
    spatial = [_spatial(builder, item[0]) for item in sets]
    for name, times in (("dilations", 1), ("inDilations", 1), ("pads", 2), ("outPads", 2), ("strides", 1)):
        given = bound[name]
        if given and len(given) != len(sets):
            raise popart_exception(
                f"MultiConv: the number of {name} parameter sets ({len(given)}) does not match the number of input "
                f"sets ({len(sets)})"
            )
        for values, axes in zip(given, spatial, strict=False):
            if axes is not None and len(values) != times * axes:
                what = (
                    "number of spatial dimensions" if times == 1 else "twice the number of spatial dimensions"
                )
                raise popart_exception(f"Length of {name} vector {len(values)} != {what} {times * axes}")
    flat = {name: [v for item in bound[name] for v in item] for name in _MULTI_CONV_LISTS}
    return {
        **bound,
        **flat,
        "args": [name for item in sets for name in item],
        "counts": [len(item) for item in sets],
    }


_MULTI_CONV_LISTS = ("dilations", "inDilations", "pads", "outPads", "strides")


def _spatial(builder: Any, data: str) -> int | None:
    try:
        return len(builder.getTensorShape(data)) - 2
    except popart_exception:
        return None
