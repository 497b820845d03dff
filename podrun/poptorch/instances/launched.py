"""Programs of several instances that ``podrun`` has launched: ``popdist.poptorch.Options`` and ``horovod.torch``.

`InstanceOptions` are the options of one instance. The calls of Horovod share values of the host, such as metrics.
Instances communicate through `podrun.popdist`; no MPI is needed. Gradients are reduced on the IPUs, so
``DistributedOptimizer`` is refused. Calls give the same bits in every instance. Objects travel as JSON and raw arrays,
never pickled.

Source of names and meaning: Horovod's documentation of its PyTorch API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec

import numpy as np
import torch

from podrun.core.errors import UnsupportedError
from podrun.core.quick_dataclass import dataclass
from podrun.popdist import core, mpi
from podrun.popdist.core import popdist_error
from podrun.popdist.horovod_instances import check_started
from podrun.popdist.horovod_instances import init as init
from podrun.popdist.horovod_instances import is_initialized as is_initialized
from podrun.popdist.horovod_instances import local_rank as local_rank
from podrun.popdist.horovod_instances import local_size as local_size
from podrun.popdist.horovod_instances import rank as rank
from podrun.popdist.horovod_instances import shutdown as shutdown
from podrun.popdist.horovod_instances import size as size
from podrun.poptorch.api.option_parts import DistributedOptions
from podrun.poptorch.api.options import Options

_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class ReduceOp:
    """How a reduction combines the instances' values."""

    name: str
    combine: mpi.Op
    averaged: bool = False


Sum = ReduceOp("Sum", mpi.SUM)
Average = ReduceOp("Average", mpi.SUM, averaged=True)
Min = ReduceOp("Min", mpi.MIN)
Max = ReduceOp("Max", mpi.MAX)
Product = ReduceOp("Product", mpi.PROD)

_SPECIAL = {torch.bool: torch.uint8, torch.bfloat16: torch.float32}
"""Types that NumPy or the collectives lack, and the types that travel instead."""


def _array(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.detach().to(_SPECIAL.get(tensor.dtype, tensor.dtype)).cpu()
    return np.array(plain.numpy(), order="C")


def _tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array)).to(
        like.dtype
    )  # Arithmetic makes numbers of arrays without axes.


def _chosen(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op is not None:
        return op
    return Sum if average is False else Average


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: object = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine all instances' tensors; by default their average. The tensor itself is unchanged."""
    chosen = _chosen(average, op)
    if chosen.averaged and not tensor.is_floating_point():
        raise ValueError("Averaging is not supported for integer tensors: use op=hvd.Sum")
    array = _array(tensor * prescale_factor if prescale_factor != 1.0 else tensor)
    combined = np.empty_like(array)
    check_started()
    mpi.COMM_WORLD.Allreduce(array, combined, chosen.combine)
    if chosen.averaged:
        combined = (combined / size()).astype(array.dtype)
    reduced = _tensor(combined, tensor)
    return reduced * postscale_factor if postscale_factor != 1.0 else reduced


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`allreduce` in place."""
    with torch.no_grad():
        return tensor.copy_(allreduce(tensor, *args, **kwargs))


def grouped_allreduce(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """`allreduce` of several tensors."""
    return [allreduce(tensor, *args, **kwargs) for tensor in tensors]


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """`allreduce_` of several tensors."""
    return [allreduce_(tensor, *args, **kwargs) for tensor in tensors]


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """All instances' tensors one after the other along dimension 0, where their lengths may differ. ValueError for
    other differences.
    """
    check_started()
    rows_here = tensor.reshape(1) if not tensor.dim() else tensor
    array = _array(rows_here)
    shapes = mpi.COMM_WORLD.allgather([list(rows_here.shape), str(rows_here.dtype)])
    if any(shape[1:] != shapes[0][0][1:] or kind != shapes[0][1] for shape, kind in shapes):
        raise ValueError(f"allgather: tensors may differ in dimension 0 alone; they are {shapes}")
    longest = max(shape[0] for shape, _ in shapes)
    padded = np.zeros((longest, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    gathered = np.empty((len(shapes), *padded.shape), array.dtype)
    mpi.COMM_WORLD.Allgather(padded, gathered)
    rows = [gathered[place, : shape[0]] for place, (shape, _) in enumerate(shapes)]
    return _tensor(np.concatenate(rows), tensor)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The root's tensor, in every instance. The tensor itself is unchanged."""
    _check_root(root_rank)
    array = _array(tensor)
    mpi.COMM_WORLD.Bcast(array, root_rank)
    return _tensor(array, tensor)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """`broadcast` in place."""
    with torch.no_grad():
        return tensor.copy_(broadcast(tensor, root_rank))


def _check_root(root_rank: int) -> None:
    if not 0 <= root_rank < size():
        raise popdist_error(f"horovod.torch: there is no instance {root_rank} among {size()}.")


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int) -> None:
    """Give all instances the root's values of a ``state_dict()`` or of ``named_parameters()``. ValueError for other
    arguments.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable):
        pairs = list(params)
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    for _, tensor in pairs:
        if isinstance(tensor, torch.Tensor):
            broadcast_(tensor, root_rank)


def broadcast_object(obj: object, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object, in every instance: numbers, text, lists, dictionaries, arrays. UnsupportedError for others."""
    _check_root(root_rank)
    return mpi.COMM_WORLD.bcast(obj, root_rank)


def allgather_object(obj: object, name: str | None = None) -> list[Any]:
    """All instances' objects in their order. UnsupportedError for objects that would have to be pickled."""
    check_started()
    return mpi.COMM_WORLD.allgather(obj)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Give all instances the root's attributes and host state of an optimizer. State on IPUs is equal already."""
    for group in optimizer.param_groups:
        plain = {key: value for key, value in group.items() if key != "params" and not torch.is_tensor(value)}
        group.update(broadcast_object(plain, root_rank))
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                broadcast_(value, root_rank)


def barrier() -> None:
    """Wait until all instances have arrived."""
    check_started()
    mpi.COMM_WORLD.Barrier()


def join(device: int = -1) -> int:
    """Wait until all instances have arrived; returns the number of the last one."""
    barrier()
    return size() - 1


# --- Calls that Horovod lets overlap: here they are done when they return ---------------------------------------------


@dataclass(slots=True)
class _Done:
    result: object


def _at_once(call: Callable[_P, object]) -> Callable[_P, _Done]:
    def start(*args: _P.args, **kwargs: _P.kwargs) -> _Done:
        return _Done(call(*args, **kwargs))

    start.__doc__ = f"`{call.__name__}`; `synchronize` of what it returns gives the result."
    return start


allreduce_async = _at_once(allreduce)
allreduce_async_ = _at_once(allreduce_)
allgather_async = _at_once(allgather)
broadcast_async = _at_once(broadcast)
broadcast_async_ = _at_once(broadcast_)
grouped_allreduce_async = _at_once(grouped_allreduce)


def synchronize(handle: _Done) -> object:
    """The result of an asynchronous call."""
    return handle.result


def poll(handle: _Done) -> bool:
    """Always True: calls are complete when they return."""
    return True


def mpi_threads_supported() -> bool:
    """Always False: there is no MPI."""
    return False


def _false() -> bool:
    """Always False: no such library is used."""
    return False


mpi_built = mpi_enabled = gloo_built = nccl_built = cuda_built = rocm_built = ccl_built = ddl_built = _false


def DistributedOptimizer(*args: object, **kwargs: object) -> NoReturn:
    """Refused: gradients are reduced on the IPUs."""
    raise UnsupportedError(
        "horovod.torch.DistributedOptimizer reduces gradients on the host; poptorch.trainingModel does it on the IPUs",
        hint="Give poptorch.trainingModel popdist.poptorch.Options() and a plain optimizer.",
    )


def _refused(name: str) -> RuntimeError:
    return RuntimeError(
        f"Cannot call `{name}` with popdist.poptorch.Options: podrun sets it for each instance. Use "
        "poptorch.Options to set it yourself."
    )


class _InstanceDistributed(DistributedOptions):
    """The place of this instance; it cannot be changed."""

    def disable(self) -> NoReturn:
        """Refused with a RuntimeError: podrun places instances."""
        raise _refused("Distributed.disable")

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> NoReturn:
        """Refused with a RuntimeError: podrun places instances."""
        raise _refused("Distributed.setEnvVarNames")

    def configureProcessId(self, process_id: int, num_processes: int) -> NoReturn:
        """Refused with a RuntimeError: podrun places instances."""
        raise _refused("Distributed.configureProcessId")


class InstanceOptions(Options):
    """poptorch.Options with the replication factor, process and device of this instance.

    ``ipus_per_replica``: IPUs of the model; popdist_error if ``podrun`` got another number. Without ``podrun`` there is
    one process with one replica. RuntimeError for setters of options that ``podrun`` decides.
    """

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        self.__dict__["_ipus_per_replica"] = ipus_per_replica
        distributed = _InstanceDistributed()
        distributed.set(
            num_distributed_processes=core.getNumInstances(), distributed_process_id=core.getInstanceIndex()
        )
        self.add_part("_distributed", distributed)
        self.set(replication_factor=core.getNumLocalReplicas())
        self._check_ipus()

    def _check_ipus(self) -> None:
        if self._ipus_per_replica is not None and core.isPopdistEnvSet():
            core.getDeviceId(self._ipus_per_replica)

    def replicationFactor(self, replication_factor: int) -> NoReturn:
        """Refused with a RuntimeError: the launch says how many replicas there are."""
        raise _refused("replicationFactor")

    def useIpuId(self, ipu_id: int) -> NoReturn:
        """Refused with a RuntimeError: the launch says which IPUs an instance has."""
        raise _refused("useIpuId")

    def toDict(self) -> dict[str, Any]:
        """All values in one dictionary, with the device of this instance where the number of its IPUs is known."""
        values = super().toDict()
        if core.isPopdistEnvSet():
            values["ipu_id"] = core.getDeviceId(self._ipus_per_replica or 0)
        return values
