"""Annotations in a model: blocks of operators, scopes, groups of convolutions.

Outside the capture of a model they are no-ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import field
from typing import Any, TypeVar

import torch

from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.api.signatures import checks_arguments, checks_arguments_but, checks_methods
from podrun.poptorch.api.strategies import ExecutionStrategy, PipelinedExecution
from podrun.poptorch.capture.graph import BlockPlacement
from podrun.poptorch.errors import ArgumentError, Error

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class CaptureAnnotations:
    """The state of annotations since a capture began.

    Operators before the first block belong to IPU 0 and stage 0.
    """

    strategy: ExecutionStrategy = field(default_factory=PipelinedExecution)
    current: BlockPlacement | None = field(default_factory=BlockPlacement)
    ended: str = ""
    """The block that ended without another one beginning."""
    automatic: int = -1
    """The last automatic block id; -1 before `Block.useAutoId`."""
    scopes: list[str] = field(default_factory=list)
    attributes: list[dict[str, Any]] = field(default_factory=list)
    multi_convolution: torch.nn.Module | None = None

    def enter(self, user_id: object, ipu_id: int | None) -> None:
        """Begin a block: operators from here on belong to it."""
        if user_id is None:
            self.automatic += 1
            user_id = str(self.automatic)
        ipu, stage, phase = self.strategy.placement(str(user_id), ipu_id)
        self.current = BlockPlacement(ipu, stage, phase)
        self.ended = ""

    def leave(self, name: str) -> None:
        """End a block: operators from here on belong to none."""
        self.current, self.ended = None, name

    def placement(self) -> BlockPlacement:
        """Where an operator that is called now runs. Error if the last block has ended."""
        if self.current is None:
            raise Error(
                f"No active Block: an operator follows the end of block {self.ended!r}",
                hint="Put it into a poptorch.Block, or begin the last block with poptorch.Block.start.",
            )
        return self.current

    def scope(self) -> str:
        """The prefix of an operator that is called now: the names of the scopes around it."""
        return "/".join(self.scopes)


_capturing: list[CaptureAnnotations] = []


def capturing() -> CaptureAnnotations | None:
    """The annotations of the capture that is under way; None outside one."""
    return _capturing[-1] if _capturing else None


class following:
    """Follow annotations while a model is captured: ``with following(annotations): ...``."""

    def __init__(self, annotations: CaptureAnnotations) -> None:
        self._annotations = annotations

    def __enter__(self) -> CaptureAnnotations:
        _capturing.append(self._annotations)
        return self._annotations

    def __exit__(self, *error: object) -> None:
        _capturing.pop()


def isRunningOnIpu() -> bool:
    """True while a model's forward is captured for the IPU, False on the host."""
    return bool(_capturing)


@checks_methods()
class Block(torch.nn.Module):
    """Operators called inside belong to one block: ``with poptorch.Block("encoder", ipu_id=1): ...``."""

    def __init__(self, user_id: object = None, ipu_id: int | None = None) -> None:
        super().__init__()
        self._user_id, self._ipu_id = user_id, ipu_id
        self._outer: BlockPlacement | None = None

    def __enter__(self) -> Block:
        annotations = capturing()
        if annotations is not None:
            annotations.enter(self._user_id, self._ipu_id)
        return self

    def __exit__(self, *error: object) -> None:
        annotations = capturing()
        if annotations is not None:
            annotations.leave(str(self._user_id))

    @staticmethod
    @checks_arguments
    def useAutoId() -> None:
        """Number blocks without an id from 0; call it at the start of forward."""
        annotations = capturing()
        if annotations is not None:
            annotations.automatic = -1

    @staticmethod
    @checks_arguments
    def start(user_id: object = None, ipu_id: int | None = None) -> None:
        """Begin a block that lasts until the next one."""
        annotations = capturing()
        if annotations is not None:
            annotations.enter(user_id, ipu_id)


class _BeginBlockHook:
    """The hook by which a module begins a block."""

    def __init__(self, user_id: object, ipu_id: int | None) -> None:
        self.user_id, self.ipu_id = user_id, ipu_id

    def __call__(self, module: torch.nn.Module, args: object) -> None:
        Block.start(self.user_id, self.ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self.user_id}, ipu_id={self.ipu_id})"


class LegacyBeginBlockFn(torch.nn.Module):
    """A function that begins a block whenever it is called."""

    def __init__(
        self, layer_to_call: Callable[..., Any], user_id: object = None, ipu_id: int | None = None
    ) -> None:
        super().__init__()
        self._layer, self._user_id, self._ipu_id = layer_to_call, user_id, ipu_id

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Begin the block and call the function."""
        Block.start(self._user_id, self._ipu_id)
        return self._layer(*args, **kwargs)


@checks_arguments
def BeginBlock(layer_to_call: F, user_id: object = None, ipu_id: int | None = None) -> F | LegacyBeginBlockFn:
    """Let a module begin a block whenever it is called; the block lasts until the next one. Returns the same module.

    Error for a module that begins a block already, and for an object that cannot be called.
    """
    if not callable(layer_to_call):
        raise Error("poptorch.BeginBlock takes a module or a function")
    if not isinstance(layer_to_call, torch.nn.Module):
        return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
    if begins_block(layer_to_call):
        raise Error(
            "the module begins a block already",
            hint="Call poptorch.removeBlocks(module) before you annotate it again.",
        )
    hook = _BeginBlockHook(user_id, ipu_id)
    layer_to_call.register_forward_pre_hook(hook)
    return layer_to_call


def begins_block(module: torch.nn.Module) -> bool:
    """Whether a module begins a block when it is called."""
    return any(isinstance(hook, _BeginBlockHook) for hook in module._forward_pre_hooks.values())


@checks_arguments
def removeBlocks(module: torch.nn.Module) -> None:
    """Remove all annotations by `BeginBlock` from a module and the modules inside it."""
    for part in module.modules():
        for key, hook in list(part._forward_pre_hooks.items()):
            if isinstance(hook, _BeginBlockHook):
                del part._forward_pre_hooks[key]


@checks_arguments
def BlockFunction(user_id: object = None, ipu_id: int | None = None) -> Callable[..., Any]:
    """A decorator: the function's operators belong to one block."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: object, **kwargs: object) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return run

    return decorate


class NameScope:
    """A prefix of operators' names, after their module's: ``with poptorch.NameScope("head"): ...``."""

    @checks_arguments_but("name")
    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise ArgumentError("Parameter to NameScope must be a string")
        self.name = name

    def __enter__(self) -> None:
        annotations = capturing()
        if annotations is not None:
            annotations.scopes.append(self.name)

    def __exit__(self, *error: object) -> None:
        annotations = capturing()
        if annotations is not None:
            annotations.scopes.pop()


@checks_methods()
class Attribute:
    """PopART attributes of the operators inside: ``with poptorch.Attribute(__outline={"layer": "a"}): ...``."""

    def __init__(self, **attributes: dict[str, str]) -> None:
        self._attributes = attributes

    def __enter__(self) -> None:
        annotations = capturing()
        if annotations is not None:
            annotations.attributes.append(self._attributes)

    def __exit__(self, *error: object) -> None:
        annotations = capturing()
        if annotations is not None:
            annotations.attributes.pop()


def module_repr(m: torch.nn.Module) -> str:
    """The ``repr`` of a module, where each submodule that begins a block is followed by that block."""
    hooks = [repr(hook) for hook in m._forward_pre_hooks.values() if isinstance(hook, _BeginBlockHook)]
    lines = [f"({name}): " + module_repr(child).replace("\n", "\n  ") for name, child in m.named_children()]
    extra = [line for line in m.extra_repr().split("\n") if line]
    body = [*extra, *lines]
    text = type(m).__name__ + "("
    if body:
        text += body[0] if len(body) == 1 and not lines else "\n  " + "\n  ".join(body) + "\n"
    return text + ")" + "".join(f" {hook}" for hook in hooks)
