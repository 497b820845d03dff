"""Options of the libraries that plan convolutions, products and LSTMs: dictionaries of texts, which front ends pass on.

The type of partial sums and the part of memory for temporary data count here (modelled cycles and memory); the others
are accepted, because programs set them, and change nothing. What the libraries do not know is an error in their words.

Source of the names: graphcore/poplibs, lib/poplin/ConvOptions.cpp and MatMul.cpp, lib/popnn/Lstm.cpp; of the words:
include/poputil/OptionParsing.hpp.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping

from podrun.core.errors import InvalidOptionError

CONVOLUTIONS, PRODUCTS, LSTMS = "convolutionOptions", "matmulOptions", "lstmOptions"
"""What PopART calls the three dictionaries."""

_BOOL = ("false", "true")
_PARTIALS = ("float", "half")
_PASSES = ("INFERENCE_FWD", "NONE", "TRAINING_BWD", "TRAINING_FWD", "TRAINING_WU")
OptionValues = type[float] | type[int] | type[str] | tuple[str, ...]
"""What an option can be: a number, a text, or one of some words."""

_SHARED: dict[str, OptionValues] = {
    "availableMemoryProportion": float,
    "enableFastReduce": _BOOL,
    "enableMultiStageReduce": _BOOL,
    "partialsType": _PARTIALS,
    "planConstraints": str,
    "remapOutputTensor": _BOOL,
    "use128BitConvUnitLoad": _BOOL,
}

KNOWN: Mapping[str, Mapping[str, OptionValues]] = {
    CONVOLUTIONS: {
        **_SHARED,
        "disableTransformations": _BOOL,
        "enableConvDithering": _BOOL,
        "enableTransformsConvTable": _BOOL,
        "gatherConvOutput": _BOOL,
        "insertTransformsCycleCountProgs": _BOOL,
        "partialsType.interIPU": _PARTIALS,
        "partialsType.interTile": _PARTIALS,
        "pass": tuple(
            sorted(("NONE_MATMUL", *_PASSES, *(f"FC_{name}" for name in _PASSES if name != "NONE")))
        ),
        "planConstraintsOutputFilename": str,
    },
    PRODUCTS: {
        **_SHARED,
        "fullyConnectedPass": _PASSES,
        "gatherOutput": _BOOL,
        "inputRHSIsPreArranged": _BOOL,
    },
    LSTMS: {
        "availableMemoryProportion": float,
        "disableWUPartialInterleaving": _BOOL,
        "inferenceOnly": _BOOL,
        "numShards": int,
        "partialsType": _PARTIALS,
        "preCalcWeights": _BOOL,
        "recomputationMode": ("cellAndTanh", "full", "none"),
        "rnnCodeReuse": _BOOL,
        "rnnStepsPerWU": int,
        "weightAccumulatorsType": _PARTIALS,
    },
}


def check_planner_options(options: Mapping[str, Mapping[str, str]]) -> None:
    """InvalidOptionError for an option, by the name of its dictionary, that the libraries do not know, and for a value
    that it cannot have.
    """
    for source, chosen in options.items():
        for name, value in chosen.items():
            if name not in KNOWN[source]:
                close = difflib.get_close_matches(name, KNOWN[source], n=1)
                meant = f"Did you mean {close[0]!r}? " if close else ""
                raise InvalidOptionError(
                    f"{source}: Unrecognised option '{name}'",
                    hint=f"{meant}Valid: {', '.join(sorted(KNOWN[source]))}.",
                )
            wrong = _wrong(KNOWN[source][name], value)
            if wrong:
                raise InvalidOptionError(f"{source}: Invalid value '{value}' for option '{name}': {wrong}")


def _wrong(values: OptionValues, value: str) -> str:
    """What is wrong with a value, in the libraries' words; empty if nothing is."""
    if isinstance(values, tuple):
        return "" if value in values else f"Not one of the values: {list(values)}"
    with contextlib.suppress(ValueError):
        values(value)
        return ""
    return "Not a floating point number" if values is float else "Not a valid integer"


def memory_share(options: Mapping[str, str]) -> float | None:
    """The part of tile memory for temporary data that a dictionary asks for; None without one, or with a wrong one."""
    with contextlib.suppress(KeyError, ValueError):
        return round(float(options["availableMemoryProportion"]), 6)
    return None


def partials_of(options: Mapping[str, str]) -> str:
    """The dtype of partial sums that a dictionary asks for: float32 unless it says ``half``."""
    return "float16" if options.get("partialsType") == "half" else "float32"
