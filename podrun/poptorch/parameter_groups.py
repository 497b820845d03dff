"""Parameters of which groups of replicas have values of their own.

The host's parameter then has a leading dimension with a row for each group; forward sees one row. The executor hands
out parameters as `ParameterHandle`, so that programs can say ``model.weight.replicaGrouping(...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from podrun.poptorch.enums import CommGroupType, VariableRetrievalMode
from podrun.poptorch.errors import Error

if TYPE_CHECKING:
    from podrun.poptorch.model_compiler import ReplicaGroups


class ParameterHandle:
    """A parameter that is asked for through an executor. Everything is the parameter's own but `replicaGrouping`."""

    def __init__(self, parameter: torch.nn.Parameter, group: Callable[..., Any]) -> None:
        self._parameter, self._group = parameter, group

    def replicaGrouping(
        self, comm_group_type: CommGroupType, shards: int, variable_retrieval_mode: VariableRetrievalMode
    ) -> None:
        """Give groups of ``shards`` replicas values of their own, before the model is compiled. Error afterwards, and
        for a parameter without dimensions."""
        assert isinstance(comm_group_type, CommGroupType), "comm_group_type is a poptorch.CommGroupType"
        assert isinstance(variable_retrieval_mode, VariableRetrievalMode), (
            "variable_retrieval_mode is a poptorch.VariableRetrievalMode"
        )
        self._group(self._parameter, comm_group_type, shards, variable_retrieval_mode)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Functions of torch's take the parameter itself."""
        return function(*_plain(args), **_plain(kwargs or {}))

    def __repr__(self) -> str:
        return repr(self._parameter)


def _plain(value: Any) -> Any:
    if isinstance(value, ParameterHandle):
        return value._parameter
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(each) for each in value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value


@contextmanager
def one_row_each(
    module: torch.nn.Module, groups: Mapping[str, ReplicaGroups], replicas: int
) -> Iterator[None]:
    """Let forward see one row of each grouped parameter. Error for one whose rows are not the groups."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, grouping in groups.items():
            count = grouping.groups(replicas)
            if count == 1:
                continue
            owner, _, key = name.rpartition(".")
            owned = module.get_submodule(owner)._parameters
            whole = owned[key]
            assert whole is not None
            if whole.shape[0] != count:
                raise Error(
                    f"replicaGrouping: {name!r} has {whole.shape[0]} rows for {count} groups of replicas",
                    hint="The first dimension of a grouped parameter has a row for each group.",
                )
            replaced.append((owned, key, whole))
            owned[key] = torch.nn.Parameter(whole.detach()[0], whole.requires_grad)
        yield
    finally:
        for owned, key, whole in replaced:
            owned[key] = whole
