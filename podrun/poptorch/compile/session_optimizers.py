"""Torch's and poptorch's optimizers as the runtime's updates: hyper-parameters, constants and variables, types."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.api import optim
from podrun.poptorch.errors import ArgumentError
from podrun.runtime.loss_scaling import TRANSFORM
from podrun.runtime.optimizers.adam import AdamForm, AdamRule
from podrun.runtime.optimizers.adaptive import AdaptiveForm, AdaptiveKind, AdaptiveRule
from podrun.runtime.optimizers.hyperparameters import Clipping, Hyperparameter, UpdateContext
from podrun.runtime.optimizers.rules import Rule
from podrun.runtime.optimizers.sgd import SgdForm, SgdRule
from podrun.runtime.optimizers.value_checks import (
    ADAM_LIMITS,
    ADAPTIVE_LIMITS,
    SGD_LIMITS,
    ValueLimits,
    check_bounds,
    check_forms,
    check_loss_scaling,
    check_replaced,
    check_weights,
)
from podrun.runtime.settings import RunSettings

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
_TYPES = {torch.float32: "float32", torch.float16: "float16"}


def check_supported(optimizer: object) -> None:
    """AssertionError for an optimizer that does not run on IPUs."""
    names = ", ".join(kind.__name__ for kind in SUPPORTED)
    if not isinstance(optimizer, SUPPORTED):
        raise ArgumentError(f"{type(optimizer).__name__} is not supported on the IPU. Supported are {names}.")

    if isinstance(optimizer, torch.optim.Adam) and any(
        group.get("amsgrad") for group in optimizer.param_groups
    ):
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")


def warn_of_subclass(optimizer: optim.ProgramOptimizer) -> None:
    """Warn of an optimizer whose class is the program's own: its attributes count, its Python code does not run."""
    if type(optimizer).__module__.startswith(("torch.optim", "podrun.poptorch")):
        return
    name = type(optimizer).__name__
    base = next(kind.__name__ for kind in SUPPORTED if isinstance(optimizer, kind))
    warnings.warn(f"{name} is run as {base}: the Python code of {name} does not run on the IPU", stacklevel=4)


def needs_running_mean(optimizer: optim.ProgramOptimizer) -> bool:
    """Whether gradients are accumulated in half precision apart from the velocity."""
    combined = getattr(optimizer, "use_combined_accum", False)
    return getattr(optimizer, "accum_type", torch.float32) == torch.float16 and not combined


def clips_gradients(optimizer: optim.ProgramOptimizer) -> bool:
    """Whether an optimizer bounds the norm of the gradients."""
    return not math.isinf(getattr(optimizer, "max_grad_norm", math.inf))


def attributes_of(optimizer: optim.ProgramOptimizer) -> set[str]:
    """The names of everything that an optimizer and its groups have."""
    return {*vars(optimizer), *(key for group in optimizer.param_groups for key in group)}


@dataclass(frozen=True, slots=True)
class TorchUpdate:
    """The values of a torch optimizer and the form of its update: a `podrun.runtime.model_lowering.UpdateSource`.

    ``own``: values of single weights, by the weight's name; they have all values that ``defaults`` has.
    """

    form: SgdForm | AdamForm | AdaptiveForm
    limits: ValueLimits
    defaults: Mapping[str, Hyperparameter]
    own: Mapping[str, Mapping[str, Hyperparameter]]
    loss_scaling: Hyperparameter
    clipping: tuple[Clipping, ...] = ()

    def hyperparameter(self, name: str, weight: str) -> Hyperparameter:
        """See `podrun.runtime.optimizers.hyperparameters.Hyperparameters`."""
        return self.own.get(weight, self.defaults)[name]

    def is_specific(self, name: str, weight: str) -> bool:
        """See `podrun.runtime.optimizers.hyperparameters.Hyperparameters`."""
        return weight in self.own

    def rule(self, context: UpdateContext) -> Rule:
        """The update rule with these values."""
        if isinstance(self.form, SgdForm):
            return SgdRule(self, context, self.form)
        if isinstance(self.form, AdamForm):
            return AdamRule(self, context, self.form)
        return AdaptiveRule(self, context, self.form)

    def check(self) -> None:
        """UsageError for values that make no sense."""
        self.limits.check("the defaults", self.defaults)
        check_loss_scaling(self.limits.owner, self.loss_scaling)
        check_bounds(group.max_norm for group in self.clipping)
        for weight, values in self.own.items():
            self.limits.check(f"weight {weight!r}", values)

    def check_replaces(self, other: TorchUpdate) -> None:
        """UsageError unless these values may replace ``other`` in a running program."""
        same = (self.form, self.clipping) == (other.form, other.clipping)
        if isinstance(self.form, SgdForm) and self.form.clips_gradient:
            # There the bound of the norm is a constant of the program, and the loss scaling is a factor of it.
            same = same and self.loss_scaling.value == other.loss_scaling.value
        check_forms((other.limits.owner, self.limits.owner), same)
        check_replaced("lossScaling", other.loss_scaling, self.loss_scaling)
        check_weights(other.own, self.own)
        for name, value in self.defaults.items():
            check_replaced(name, other.defaults[name], value)
            for weight, values in self.own.items():
                check_replaced(f"{name} of weight {weight!r}", other.own[weight][name], values[name])


def check_scaling(settings: RunSettings, optimizer: TorchUpdate) -> None:
    """UsageError for an optimizer, or an update period, that automatic loss scaling cannot work with."""
    if settings.loss_scale is None:
        return
    if optimizer.loss_scaling.constant:
        raise UsageError(
            f"{TRANSFORM} The optimizer must have non-const loss scaling",
            hint='Call optimizer.variable_attrs.markAsVariable("loss_scaling").',
        )
    if settings.loss_scale.period < 1:
        raise UsageError(f"updatePeriod must be at least 1, not {settings.loss_scale.period}.")


_Values = Callable[[Mapping[str, Any]], dict[str, tuple[str, float]]]


def session_optimizer(optimizer: optim.ProgramOptimizer, names: Mapping[int, str]) -> TorchUpdate:
    """The update that a torch optimizer stands for. ``names``: of parameters, by ``id``. Groups become values of their
    own weights.
    """
    check_supported(optimizer)
    form, convert, limits = _family(optimizer)

    def values(group: Mapping[str, Any]) -> dict[str, Hyperparameter]:
        return {
            **_LEFT_OUT[limits.owner],
            **{key: _value(optimizer, *pair) for key, pair in convert(group).items()},
        }

    first, *others = optimizer.param_groups
    defaults = values(first)
    scaling = float(getattr(optimizer, "loss_scaling", 1.0))
    update = TorchUpdate(
        form,
        limits,
        defaults,
        {
            names[id(parameter)]: values(group)
            for group in others
            for parameter in group["params"]
            if id(parameter) in names
        },
        Hyperparameter(scaling, _is_constant(optimizer, "loss_scaling", scaling, (1.0,))),
        _clipping(optimizer),
    )
    update.check()
    return update


_LEFT_OUT: Mapping[str, Mapping[str, Hyperparameter]] = {
    "SGD": {"velocityScaling": Hyperparameter(1.0)},
    "Adam": {"maxWeightNorm": Hyperparameter(10.0)},
    "Adaptive": {},
}
"""Values that some optimizers of a family do not have."""


def _family(
    optimizer: optim.ProgramOptimizer,
) -> tuple[SgdForm | AdamForm | AdaptiveForm, _Values, ValueLimits]:
    if isinstance(optimizer, torch.optim.SGD):
        return _sgd_form(optimizer), _sgd_values, SGD_LIMITS
    if isinstance(optimizer, torch.optim.RMSprop):
        return _rmsprop_form(optimizer), _rmsprop_values, ADAPTIVE_LIMITS
    return _adam_form(optimizer), _adam_values, ADAM_LIMITS


def _value(optimizer: optim.ProgramOptimizer, attribute: str, value: float) -> Hyperparameter:
    value = float(value)
    return Hyperparameter(
        value, _is_constant(optimizer, attribute, value, _REFERENCE_CONSTANTS.get(attribute, ()))
    )


def _is_constant(
    optimizer: optim.ProgramOptimizer, attribute: str, value: float, reference: tuple[float, ...]
) -> bool:
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
    values = {name: (key, group[key]) for key, name in _ADAM_NAMES.items() if key in group}
    return values | {"beta1": ("betas", group["betas"][0]), "beta2": ("betas", group["betas"][1])}


def _rmsprop_values(group: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    return {name: (key, group[key]) for key, name in _RMSPROP_NAMES.items()}


def _clipping(optimizer: optim.ProgramOptimizer) -> tuple[Clipping, ...]:
    norm = float(getattr(optimizer, "max_grad_norm", math.inf))
    return () if isinstance(optimizer, torch.optim.RMSprop) or math.isinf(norm) else (Clipping(norm),)


def _type(optimizer: optim.ProgramOptimizer, name: str) -> str:
    return _TYPES[getattr(optimizer, name, torch.float32)]


def _sgd_form(optimizer: optim.ProgramOptimizer) -> SgdForm:
    return SgdForm(
        combined=getattr(optimizer, "use_combined_accum", False),
        clips_gradient=clips_gradients(optimizer),
        gradient_type=_type(optimizer, "accum_type"),
        state_type=_type(optimizer, "velocity_accum_type"),
    )


def _adam_form(optimizer: optim.ProgramOptimizer) -> AdamForm:
    largest, lamb = isinstance(optimizer, torch.optim.Adamax), isinstance(optimizer, optim.LAMB)
    return AdamForm(
        corrected=largest or getattr(optimizer, "bias_correction", True),
        largest=largest,
        lamb=lamb,
        decoupled_decay=lamb or isinstance(optimizer, torch.optim.AdamW),
        clips_gradient=clips_gradients(optimizer),
        gradient_type=_type(optimizer, "accum_type"),
        first_type=_type(optimizer, "first_order_momentum_accum_type"),
        second_type=_type(optimizer, "second_order_momentum_accum_type"),
    )


def _rmsprop_form(optimizer: optim.ProgramOptimizer) -> AdaptiveForm:
    centered = bool(optimizer.param_groups[0]["centered"])
    if not all(bool(group["centered"]) == centered for group in optimizer.param_groups):
        raise ArgumentError("RMSprop: centered has to be the same for all parameter groups")
    moments = _type(optimizer, "first_order_momentum_accum_type")
    return AdaptiveForm(
        AdaptiveKind.CENTERED_RMSPROP if centered else AdaptiveKind.RMSPROP,
        decoupled_decay=False,
        tensorflow=getattr(optimizer, "use_tf_variant", False),
        gradient_type=_type(optimizer, "accum_type"),
        first_type=moments,
        second_type=moments,
    )


def shown_scalars(scalars: Mapping[str, Any], parameters: Sequence[str]) -> dict[str, Any]:
    """Variable hyper-parameters under the SDK's names: ``learningRate___specific___<parameter>`` for each parameter,
    and ``lossScaling_FLOAT``."""
    ending = "___default___FLOAT"
    shown = {}
    for name, value in scalars.items():
        kind = name.removesuffix(ending)
        if kind == name:
            shown[name] = value
        elif kind == "lossScaling":
            shown["lossScaling_FLOAT"] = value
        else:
            names = [f"{kind}___specific___{parameter}" for parameter in parameters]
            shown |= {key: value for key in names if key not in scalars}
    return shown
