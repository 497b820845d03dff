"""Torch's and poptorch's optimizers as a session's: names of hyper-parameters, constants and variables, state types."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from podrun.popart.enums import AdamMode, AdaptiveMode, DataType, SGDAccumulatorAndMomentum, WeightDecayMode
from podrun.popart.optimizers import SGD, Adam, Adaptive, ClipNormSettings
from podrun.poptorch.api import optim
from podrun.runtime.optimizers.adam import AdamForm
from podrun.runtime.optimizers.sgd import SgdForm

SUPPORTED = (
    torch.optim.SGD,
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    optim.LAMB,
)
_REFERENCE_CONSTANTS: Mapping[str, tuple[float, ...]] = {
    "momentum": (0.0,),
    "dampening": (0.0,),
    "weight_decay": (0.0,),
    "eps": (1e-8,),
    "velocity_scaling": (1.0,),
    "max_weight_norm": (optim.LARGEST_WEIGHT_NORM,),
}
"""Values of torch's attributes that are constants of the program."""
_ALWAYS_CONSTANT = ("betas", "alpha", "nesterov")
_SGD_NAMES = {
    "lr": "learningRate",
    "momentum": "momentum",
    "weight_decay": "weightDecay",
    "dampening": "dampening",
    "velocity_scaling": "velocityScaling",
    "nesterov": "nesterov",
}
_ADAM_NAMES = {
    "lr": "learningRate",
    "weight_decay": "weightDecay",
    "eps": "eps",
    "max_weight_norm": "maxWeightNorm",
}
_RMSPROP_NAMES = {
    "lr": "learningRate",
    "weight_decay": "weightDecay",
    "alpha": "alpha",
    "momentum": "momentum",
    "eps": "eps",
}
_TYPES = {torch.float32: DataType.FLOAT, torch.float16: DataType.FLOAT16}


def check_supported(optimizer: Any) -> None:
    """AssertionError for an optimizer that does not run on IPUs."""
    names = ", ".join(kind.__name__ for kind in SUPPORTED)
    assert isinstance(optimizer, SUPPORTED), (
        f"{type(optimizer).__name__} is not supported on the IPU. Supported are {names}."
    )

    if isinstance(optimizer, torch.optim.Adam) and any(
        group.get("amsgrad") for group in optimizer.param_groups
    ):
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")


def warn_of_subclass(optimizer: Any) -> None:
    """Warn of an optimizer whose class is the program's own: its attributes count, its Python code does not run."""
    if type(optimizer).__module__.startswith(("torch.optim", "podrun.poptorch")):
        return
    name = type(optimizer).__name__
    base = next(kind.__name__ for kind in SUPPORTED if isinstance(optimizer, kind))
    warnings.warn(f"{name} is run as {base}: the Python code of {name} does not run on the IPU", stacklevel=4)


def needs_running_mean(optimizer: Any) -> bool:
    """Whether gradients are accumulated in half precision apart from the velocity."""
    combined = getattr(optimizer, "use_combined_accum", False)
    return getattr(optimizer, "accum_type", torch.float32) == torch.float16 and not combined


def clips_gradients(optimizer: Any) -> bool:
    """Whether an optimizer bounds the norm of the gradients."""
    return not math.isinf(getattr(optimizer, "max_grad_norm", math.inf))


def attributes_of(optimizer: Any) -> set[str]:
    """The names of everything that an optimizer and its groups have."""
    return {*vars(optimizer), *(key for group in optimizer.param_groups for key in group)}


def session_optimizer(optimizer: Any, names: Mapping[int, str]) -> Any:
    """The session's optimizer. ``names``: of parameters, by ``id``. Groups become values of their own weights."""
    check_supported(optimizer)
    convert, constructor = _family(optimizer)
    groups = optimizer.param_groups
    first = {key: _value(optimizer, key, value) for key, value in convert(groups[0]).items()}
    scaling = float(getattr(optimizer, "loss_scaling", 1.0))
    values = {_constructor_key(constructor, key): value for key, value in first.items()}
    values["lossScaling"] = (scaling, _is_constant(optimizer, "loss_scaling", scaling, (1.0,)))
    made = constructor(values)
    for group in groups[1:] if len(groups) > 1 else ():
        specific = {key: _value(optimizer, key, value) for key, value in convert(group).items()}
        for parameter in group["params"]:
            if id(parameter) in names:
                made.insertSpecific(names[id(parameter)], specific)
    return made


def _family(optimizer: Any) -> tuple[Any, Any]:
    if isinstance(optimizer, torch.optim.SGD):
        kind = _GradientClippingSgd if clips_gradients(optimizer) else SGD
        return _sgd_values, lambda values: kind(values, _clipping(optimizer), **_sgd_options(optimizer))
    if isinstance(optimizer, torch.optim.RMSprop):
        return _rmsprop_values, lambda values: Adaptive(values, **_rmsprop_options(optimizer))
    adam = _GradientClippingAdam if clips_gradients(optimizer) else Adam
    return _adam_values, lambda values: adam(
        values, clip_norm_settings=_clipping(optimizer), **_adam_options(optimizer)
    )


def _constructor_key(constructor: Any, key: str) -> str:
    return key if key in ("nesterov", "maxWeightNorm") else f"default{key[0].upper()}{key[1:]}"


def _value(optimizer: Any, key: str, pair: tuple[str, float]) -> tuple[float, bool]:
    attribute, value = pair
    return float(value), _is_constant(
        optimizer, attribute, float(value), _REFERENCE_CONSTANTS.get(attribute, ())
    )


def _is_constant(optimizer: Any, attribute: str, value: float, reference: tuple[float, ...]) -> bool:
    marks = getattr(optimizer, "variable_attrs", None)
    if marks is not None:
        return attribute not in marks._variable
    if attribute == "lr":
        return False
    if isinstance(optimizer, torch.optim.AdamW) and attribute == "weight_decay":
        reference = (1e-2,)
    return attribute in _ALWAYS_CONSTANT or value in reference


def _sgd_values(group: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    return {name: (key, group[key]) for key, name in _SGD_NAMES.items() if key in group}


def _adam_values(group: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    found = {name: (key, group[key]) for key, name in _ADAM_NAMES.items() if key in group}
    return found | {"beta1": ("betas", group["betas"][0]), "beta2": ("betas", group["betas"][1])}


def _rmsprop_values(group: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    return {name: (key, group[key]) for key, name in _RMSPROP_NAMES.items()}


def _clipping(optimizer: Any) -> list[ClipNormSettings]:
    return [ClipNormSettings.clipAllWeights(optimizer.max_grad_norm)] if clips_gradients(optimizer) else []


class _GradientClippingSgd(SGD):
    """SGD that clips gradients as torch.nn.utils.clip_grad_norm_ does; PopART clips steps."""

    def form(self) -> SgdForm:
        return replace(super().form(), clips_gradient=True)

    def _modes(self) -> tuple[Any, ...]:
        return (
            *super()._modes(),
            self.lossScaling.val(),
        )  # The bound of the norm is a constant of the program.


class _GradientClippingAdam(Adam):
    """Adam that clips gradients before the weight decay is added, as torch.nn.utils.clip_grad_norm_ does."""

    def form(self) -> AdamForm:
        return replace(super().form(), clips_gradient=True)


def _type(optimizer: Any, name: str) -> DataType:
    return _TYPES[getattr(optimizer, name, torch.float32)]


def _sgd_options(optimizer: Any) -> dict[str, Any]:
    combined = getattr(optimizer, "use_combined_accum", False)
    modes = SGDAccumulatorAndMomentum
    return {
        "accumulatorAndMomentum": modes.Combined if combined else modes.Separate,
        "accumType": _type(optimizer, "accum_type"),
        "accl1Type": _type(optimizer, "velocity_accum_type"),
    }


def _adam_options(optimizer: Any) -> dict[str, Any]:
    corrected = getattr(optimizer, "bias_correction", True)
    if isinstance(optimizer, optim.LAMB):
        mode = AdamMode.Lamb if corrected else AdamMode.LambNoBias
    elif isinstance(optimizer, torch.optim.Adamax):
        mode = AdamMode.AdaMax
    else:
        mode = AdamMode.Adam if corrected else AdamMode.AdamNoBias
    decoupled = isinstance(optimizer, (torch.optim.AdamW, optim.LAMB))
    return {
        "mode": mode,
        "weight_decay_mode": WeightDecayMode.Decay if decoupled else WeightDecayMode.L2Regularization,
        "accum_type": _type(optimizer, "accum_type"),
        "accl1_type": _type(optimizer, "first_order_momentum_accum_type"),
        "accl2_type": _type(optimizer, "second_order_momentum_accum_type"),
    }


def _rmsprop_options(optimizer: Any) -> dict[str, Any]:
    centered = bool(optimizer.param_groups[0]["centered"])
    assert all(bool(group["centered"]) == centered for group in optimizer.param_groups), (
        "RMSprop: centered has to be the same for all parameter groups"
    )
    return {
        "mode": AdaptiveMode.CenteredRMSProp if centered else AdaptiveMode.RMSProp,
        "weight_decay_mode": WeightDecayMode.L2Regularization,
        "accum_type": _type(optimizer, "accum_type"),
        "accl1_type": _type(optimizer, "first_order_momentum_accum_type"),
        "rmsprop_tf_variant": getattr(optimizer, "use_tf_variant", False),
    }


def shown_scalars(scalars: Mapping[str, Any], parameters: Sequence[str]) -> dict[str, Any]:
    """Variable hyper-parameters under the SDK's names: ``learningRate___specific___<parameter>`` for each parameter,
    and ``lossScaling_FLOAT``."""
    ending = "___default___FLOAT"
    made = {}
    for name, value in scalars.items():
        kind = name.removesuffix(ending)
        if kind == name:
            made[name] = value
        elif kind == "lossScaling":
            made["lossScaling_FLOAT"] = value
        else:
            each = [f"{kind}___specific___{parameter}" for parameter in parameters]
            made |= {key: value for key in each if key not in scalars}
    return made
