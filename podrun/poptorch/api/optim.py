"""``poptorch.optim``: torch's optimizers with the additions for IPUs.

An attribute is a constant of the compiled program or a variable that the host can change between calls. Attributes
that the constructor of a poptorch optimizer is given are variable; `VariableAttributes` changes that before the model
is compiled.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from podrun.poptorch.api.signatures import checks_methods
from podrun.poptorch.errors import ArgumentError

Kind = TypeVar("Kind", bound=type)

UNLIMITED_NORM = math.inf
LARGEST_WEIGHT_NORM = 65500.0
"""LAMB's default bound of a weight's norm: the largest that a half holds."""


class VariableAttributes:
    """The attributes of an optimizer that the host may change. ArgumentError for a name that the optimizer lacks."""

    def __init__(self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]) -> None:
        self._allowed = list(allowed_attributes)
        self._variable = set(variable_attributes)
        self._frozen = False

    def isConstant(self, attr: str) -> bool:
        """Whether the attribute is part of the compiled program."""
        self._check(attr)
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Make an attribute part of the compiled program."""
        self._check(attr)
        self._variable.discard(attr)

    def markAsVariable(self, attr: str) -> None:
        """Let the host change an attribute."""
        self._check(attr)
        self._variable.add(attr)

    def _check(self, attr: str) -> None:
        if attr not in self._allowed:
            raise ArgumentError(f"{attr} is not an attribute of the optimizer: {', '.join(self._allowed)}")


_OWN = (
    *("variable_attrs", "ipu_state", "ipu_param", "loss_scaling", "accum_type", "max_grad_norm"),
    *("use_combined_accum", "velocity_accum_type", "bias_correction", "use_tf_variant"),
    *("first_order_momentum_accum_type", "second_order_momentum_accum_type"),
)
"""Attributes that poptorch's optimizers have in addition to torch's."""


def shown_as(name: str) -> Callable[[Kind], Kind]:
    """Give a class the name that PopTorch shows. In podrun's code the plain name means PopART's optimizer."""

    def rename(kind: Kind) -> Kind:
        kind.__name__ = kind.__qualname__ = name
        return kind

    return rename


@shown_as("Optimizer")
class TorchOptimizer:
    """The additions of poptorch's optimizers to torch's: IPU state in ``state_dict``, constant and variable
    attributes.
    """

    _child_vars: Sequence[str] = ("loss_scaling",)
    """Attributes of the whole optimizer."""
    _group_vars: Sequence[str] = ()
    """Attributes that parameter groups may have of their own."""
    _type_names: Sequence[str] = (
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
    )
    """Attributes with the types of states and sums."""
    variable_attrs: VariableAttributes
    param_groups: list[dict[str, Any]]  # Set by torch's optimizers.

    def _set_up(
        self, arguments: Mapping[str, Any], loss_scaling: float | None, types: Sequence[torch.dtype | None]
    ) -> None:
        """Set the attributes that torch's optimizer does not have. ``arguments``: those that the program gave;
        ``types``: of `_type_names`, float32 where the program gave none.
        """
        arguments = {**arguments, "loss_scaling": loss_scaling}
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        for name, dtype in zip(self._type_names, types, strict=True):
            setattr(self, name, dtype or torch.float32)
        names = [*self._child_vars, *self._group_vars]
        self.variable_attrs = VariableAttributes([n for n in names if arguments.get(n) is not None], names)
        self.ipu_state: dict[str, torch.Tensor] | None = None
        self.ipu_param: dict[str, torch.Tensor] | None = None
        self._state_dirty = False
        self._read_state: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state that torch saves of an optimizer, the IPU's state, and the attributes that only poptorch's have."""
        if self._read_state is not None:
            self._read_state()
        own = {name: self.__dict__[name] for name in _OWN if name in self.__dict__}
        return {**super().__getstate__(), **own}  # type: ignore[dict-item]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._read_state, self._state_dirty = None, self.has_state()

    def has_state(self) -> bool:
        """Whether there is state of the IPU."""
        return self.ipu_state is not None and self.ipu_param is not None

    def get_state_dict(self) -> dict[str, Any]:
        """Torch's state with ``ipu_state`` and ``ipu_param``; both None before the model is compiled."""
        if self._read_state is not None:
            self._read_state()
        plain = torch.optim.Optimizer.state_dict(self)  # type: ignore[arg-type]
        return {**plain, "ipu_state": self.ipu_state, "ipu_param": self.ipu_param}

    def state_dict(self) -> dict[str, Any]:
        """See `get_state_dict`."""
        return self.get_state_dict()

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use IPU state that `state_dict` returned. RuntimeError for an empty one, or one without IPU state."""
        if not state:
            raise RuntimeError("Cannot load an empty optimizer state_dict")
        if "ipu_state" not in state or "ipu_param" not in state:
            raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU: ipu_state is missing")
        self.ipu_state, self.ipu_param = state["ipu_state"], state["ipu_param"]
        self._state_dirty = True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use torch's and the IPU's state; the IPU's is sent before the next call."""
        self.set_state_dict(state)
        rest = {key: value for key, value in state.items() if key not in ("ipu_state", "ipu_param")}
        torch.optim.Optimizer.load_state_dict(self, rest)  # type: ignore[arg-type]


ProgramOptimizer = torch.optim.Optimizer | TorchOptimizer
"""An optimizer that a program gives: torch's own, or one of poptorch's."""


def _checked(params: object) -> list[Any]:
    """The parameters or groups of an optimizer. TypeError for what is neither, where the program gives it."""
    if isinstance(params, (torch.Tensor, str)) or not isinstance(params, Iterable):
        raise TypeError(f"params is an iterable of tensors or of groups (model.parameters()), not {params!r}")
    listed = list(params)
    for item in listed:
        if not (isinstance(item, (torch.Tensor, tuple)) or (isinstance(item, dict) and "params" in item)):
            raise TypeError(f"params holds tensors, or groups with 'params', not {item!r}")
    return listed


def _given(**values: object) -> dict[str, Any]:
    """The arguments that were given."""
    return {name: value for name, value in values.items() if value is not None}


@shown_as("SGD")
@checks_methods()
class TorchSGD(TorchOptimizer, torch.optim.SGD):
    """torch.optim.SGD with loss scaling, velocity scaling and one or two states a weight."""

    _group_vars = ("lr", "momentum", "weight_decay", "dampening", "velocity_scaling", "nesterov")
    _type_names = ("accum_type", "velocity_accum_type")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        arguments = _given(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        torch.optim.SGD.__init__(self, _checked(params), **arguments, nesterov=bool(nesterov))
        own = {**arguments, "velocity_scaling": velocity_scaling}
        self._set_up(own, loss_scaling, (accum_type, velocity_accum_type))
        self.use_combined_accum = bool(use_combined_accum)
        if velocity_scaling is not None and not self.use_combined_accum:
            warnings.warn(
                "velocity_scaling has no effect without use_combined_accum=True: it is the loss scaling",
                stacklevel=3,
            )
        self.max_grad_norm = UNLIMITED_NORM if max_grad_norm is None else max_grad_norm
        self.defaults["velocity_scaling"] = 1.0 if velocity_scaling is None else velocity_scaling
        for group in self.param_groups:
            group.setdefault("velocity_scaling", self.defaults["velocity_scaling"])


def _refuse_amsgrad(amsgrad: bool | None) -> None:
    if amsgrad:
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")


@shown_as("Adam")
@checks_methods()
class TorchAdam(TorchOptimizer, torch.optim.Adam):
    """torch.optim.Adam, whose weight decay is added to the gradient. ValueError for amsgrad."""

    _group_vars = ("lr", "betas", "weight_decay", "eps")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        arguments = _given(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        torch.optim.Adam.__init__(self, _checked(params), **arguments)
        types = (accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type)
        self._set_up(arguments, loss_scaling, types)
        self.max_grad_norm = UNLIMITED_NORM if max_grad_norm is None else max_grad_norm
        self.bias_correction = True


@checks_methods()
class AdamW(TorchOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW, whose weight decay shrinks the weight. ValueError for amsgrad."""

    _group_vars = ("lr", "betas", "weight_decay", "eps")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        arguments = _given(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        torch.optim.AdamW.__init__(self, _checked(params), **arguments)
        types = (accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type)
        self._set_up(arguments, loss_scaling, types)
        self.max_grad_norm = UNLIMITED_NORM if max_grad_norm is None else max_grad_norm
        self.bias_correction = True if bias_correction is None else bias_correction


@checks_methods()
class RMSprop(TorchOptimizer, torch.optim.RMSprop):
    """torch.optim.RMSprop; ``use_tf_variant`` adds eps inside the root."""

    _group_vars = ("lr", "momentum", "weight_decay", "alpha", "eps", "centered")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        arguments = _given(
            lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered
        )
        torch.optim.RMSprop.__init__(self, _checked(params), **arguments)
        types = (accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type)
        self._set_up(arguments, loss_scaling, types)
        self.use_tf_variant = bool(use_tf_variant)


@checks_methods("step")
class LAMB(TorchOptimizer, torch.optim.Optimizer):
    """LAMB: Adam whose step is scaled by the norms of weight and step (You et al., 2020)."""

    _group_vars = ("lr", "betas", "weight_decay", "eps", "max_weight_norm")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        arguments = _given(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_weight_norm=max_weight_norm
        )
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
        torch.optim.Optimizer.__init__(
            self, _checked(params), {**defaults, "max_weight_norm": LARGEST_WEIGHT_NORM, **arguments}
        )
        types = (accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type)
        self._set_up(arguments, loss_scaling, types)
        self.bias_correction = True if bias_correction is None else bias_correction

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update on the host, for models that run there."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        first, second = state["exp_avg"], state["exp_avg_sq"]
        if self.bias_correction:
            first, second = first / (1 - beta1 ** state["step"]), second / (1 - beta2 ** state["step"])
        step = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * parameter
        norm, size = parameter.norm().clamp(max=group["max_weight_norm"]), step.norm()
        trust = float(norm / size) if norm > 0 and size > 0 else 1.0
        parameter.add_(step, alpha=-group["lr"] * trust)


Optimizer = TorchOptimizer
SGD = TorchSGD
Adam = TorchAdam
"""The names that programs use."""
