"""A PopTorch model in a checkpoint (`podrun.checkpoint`): its session, its optimizer's attributes, torch's generator.

What lies on IPUs (parameters, buffers, optimizer state, random state) is the session's. What the host has beside it is
the optimizer's ``param_groups``, which schedulers change, and the state of torch's random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from podrun.poptorch.errors import Error
from podrun.poptorch.wrapped_modules import weights_changed

if TYPE_CHECKING:
    from podrun.poptorch.executor import PoplarExecutor


def checkpoint_state(executor: PoplarExecutor) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a compiled model's session, and its values. poptorch.Error for a model that is not compiled."""
    session = _session(executor, "saved")
    tensors, values = session._checkpoint_state()
    return tensors, {
        "session": values,
        "groups": [_plain_group(group) for group in _groups(executor._optimizer)],
        "torch": torch.get_rng_state().numpy().copy(),
    }


def restore_checkpoint(
    executor: PoplarExecutor, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]
) -> None:
    """Continue from what `checkpoint_state` gave. poptorch.Error for a checkpoint of another kind of program."""
    session = _session(executor, "resumed")
    groups = _groups(executor._optimizer)
    if values.keys() != {"session", "groups", "torch"} or len(values["groups"]) != len(groups):
        raise Error("the checkpoint was not saved by a PopTorch model with this optimizer")
    session._restore_checkpoint(tensors, values["session"])
    for group, saved in zip(groups, values["groups"], strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
    torch.set_rng_state(torch.from_numpy(np.array(values["torch"], np.uint8)))
    executor.copyWeightsToHost()
    weights_changed(executor._user_model)
    executor._state_is_newer = True
    if executor._optimizer is not None:
        if hasattr(executor._optimizer, "_state_dirty"):
            executor._optimizer._state_dirty = False  # The state that the session has now is the newer one.
        executor.setOptimizer(executor._optimizer)


def _session(executor: PoplarExecutor, doing: str) -> Any:
    if executor._compiled is None or not executor.isAttachedToDevice():
        raise Error(
            f"a model is {doing} when it is compiled and attached to its IPUs: call model.compile(*inputs) first"
        )
    return executor._compiled.session


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [] if optimizer is None else list(optimizer.param_groups)


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's attributes without its parameters, tensors of one element as numbers."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
