"""Collectives between the instances' host processes, and the life of their backend.

``podrun`` gives every instance one address (`PODRUN_HOST_COLLECTIVES`, ``ADDRESS:PORT:KEY``): instance 0 listens there
and the others connect. From then on data go through `podrun.collectives`: shared memory on a host, TCP between hosts,
sums in the order of instances.
All instances (inside `popdist.execute_on_instances`: all of those) must make the same calls in the same order with
arrays of one shape and type. A popdist_error names an instance that does not come within the deadline; nothing hangs.

Source of names and meaning: the PopDist C++ API (``popdist/collectives.hpp``); the SDK gives Python no arrays, so
here they are NumPy's, changed in place as the C++ buffers are.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from podrun.core.environment import IPUOF_VIPU_API_PARTITION_ID, PODRUN_HOST_COLLECTIVES, environment
from podrun.core.error_codec import error_to_dict
from podrun.core.errors import (
    ConflictError,
    ErrorCause,
    ErrorCode,
    PodrunError,
    UnknownRuntimeError,
    UnsupportedError,
)
from podrun.core.event_record import AttachedIpus, record_error
from podrun.core.fault_kinds import COLLECTIVE
from podrun.faults import cause_of, program_faults
from podrun.popdist import core
from podrun.popdist.core import popdist_error
from podrun.record.recorder import array_digest, process_recorder

if TYPE_CHECKING:
    import numpy as np

    from podrun.collectives import Communicator

TIMEOUT = "PODRUN_HOST_COLLECTIVES_TIMEOUT"
"""Seconds that an instance waits for others."""
DEFAULT_TIMEOUT = 300.0
_TOKEN_BYTES = 1024
_TOKEN_TAG = 1 << 20


class Instances:
    """This process's place among the instances. Joins them at the first call; `close` leaves."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = environment(environ)
        self._groups: dict[tuple[int, ...], Communicator] = {}
        self._members: tuple[int, ...] | None = None

    @property
    def timeout(self) -> float:
        """Seconds to wait for others. popdist_error if the environment's value is not a positive number."""
        text = self._environ.get(TIMEOUT, str(DEFAULT_TIMEOUT))
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not seconds > 0:
            raise popdist_error(f"{TIMEOUT} must be a positive number of seconds, not {text!r}.")
        return seconds

    @contextmanager
    def only(self, members: Set[int]) -> Iterator[None]:
        """Restrict collectives inside the context to these instances."""
        before, self._members = self._members, tuple(sorted(members))
        try:
            yield
        finally:
            self._members = before

    @property
    def members(self) -> tuple[int, ...]:
        """The instances that take part in collectives now."""
        return tuple(range(core.getNumInstances())) if self._members is None else self._members

    def communicator(self) -> Communicator:
        """The group that carries out collectives now."""
        whole, members = tuple(range(core.getNumInstances())), self.members
        if members not in self._groups:
            self._groups[members] = (
                self._join(len(whole)) if members == whole else self._among(members, whole)
            )
        return self._groups[members]

    def _join(self, size: int) -> Communicator:
        from podrun.collectives import Communicator, create, join_group
        from podrun.collectives.rendezvous import hosts_token

        rank = core.getInstanceIndex()
        if size == 1:
            return Communicator(create(1)[0])
        address, port, key = self._exchange_point(size)
        if rank > 0:
            return Communicator(join_group(hosts_token(size, address, port, key, self.timeout), rank))
        try:
            group, _ = create(size, address=address, port=port, key=key, timeout=self.timeout)
        except ConflictError as error:
            raise ConflictError(f"instance 0 {error.message}", hint="Launch again.") from error
        return Communicator(group)

    def _exchange_point(self, size: int) -> tuple[str, int, str]:
        """Address, port and key at which instances connect, from the environment: ``ADDRESS:PORT:KEY``."""
        text = self._environ.get(PODRUN_HOST_COLLECTIVES, "")
        parts = text.rsplit(":", 2)
        if len(parts) == 3 and parts[0] and parts[1].isdecimal() and parts[2]:
            return parts[0], int(parts[1]), parts[2]
        raise popdist_error(
            f"This is one of {size} instances, but PODRUN_HOST_COLLECTIVES names no address at which they connect.",
            hint=f"Launch with podrun --num-instances {size}.",
        )

    def _among(self, members: tuple[int, ...], whole: tuple[int, ...]) -> Communicator:
        """A group of some instances: the first of them makes it and tells the others."""
        import json

        import numpy as np

        from podrun.collectives import Communicator, create_within, join_group

        everyone = self._groups.get(whole) or self._groups.setdefault(whole, self._join(len(whole)))
        rank = everyone.rank
        if members[0] == rank:
            group, token = create_within(everyone.group, members)
            note = np.frombuffer(json.dumps(token).encode().ljust(_TOKEN_BYTES), np.uint8)
            for other in members[1:]:
                everyone.send(note, other, _TOKEN_TAG)
            return Communicator(group)
        note = everyone.receive(np.empty(_TOKEN_BYTES, np.uint8), members[0], _TOKEN_TAG)
        return Communicator(join_group(json.loads(note.tobytes()), members.index(rank)))

    def close(self) -> None:
        """Leave all groups. Idempotent."""
        groups, self._groups = list(self._groups.values()), {}
        for group in reversed(groups):
            group.close()


instance_groups = Instances()
"""The instances' groups of this process."""


@contextmanager
def _named(call: str, nbytes: int = 0) -> Iterator[Communicator]:
    """The group. Its errors are raised as a popdist_error that names the call and the instances, also in the records of
    launches and programs. ``nbytes``: size of the exchanged array.
    """
    try:
        with _in_words(call):
            group = instance_groups.communicator()
            if group.size > 1:
                _strike(group, nbytes)
            yield group
    except popdist_error as error:
        notes = process_recorder()
        if notes is not None:
            notes.note_error(error, "collective")
        record_error(error, AttachedIpus(environment().get(IPUOF_VIPU_API_PARTITION_ID, ""), (), {}))
        raise


def _strike(group: Communicator, nbytes: int) -> None:
    """Let a fault of the network between this instance and another one strike. Raises its error, in all instances."""
    from podrun.collectives import RankMissingError

    here = core.getInstanceIndex()
    spec = program_faults().take(COLLECTIVE, instance_groups.members)
    if spec is None:
        return
    if spec.raises:
        a, b = spec.indices
        error = UnknownRuntimeError(
            f"instance {a} and instance {b} did not reach each other over the network",
            code=ErrorCode.HOST_SYNC_TIMEOUT,
            where=spec.place.replace(":", " "),
            cause=cause_of(spec),
            hint="Nothing stays broken: the next collective connects the instances again.",
        )
        group.group.abort(error_to_dict(error))
        raise error
    seconds, limit = spec.delay(nbytes), instance_groups.timeout
    time.sleep(min(seconds, limit))
    if seconds > limit:
        others = tuple(instance for instance in spec.indices if instance != here)
        raise RankMissingError(f"{others} did not come", ranks=others)


@contextmanager
def _in_words(call: str) -> Iterator[None]:
    """An error between instances as a popdist_error."""
    from podrun.collectives import RankLostError, RankMissingError

    try:
        yield
    except popdist_error:
        raise
    except UnknownRuntimeError as error:
        instance_groups.close()
        raise popdist_error(
            f"popdist.{call}: {error.message}.", cause=error.cause, hint=error.hint
        ) from error
    except RankMissingError as error:
        missing = ", ".join(map(str, error.ranks)) or "unknown"
        raise popdist_error(
            f"popdist.{call}: instance {missing} did not come within {instance_groups.timeout:g} s.",
            cause=ErrorCause(instances=error.ranks),
            hint=f"All instances must make the same calls; {TIMEOUT} sets how long one waits.",
        ) from error
    except RankLostError as error:
        raise popdist_error(
            f"popdist.{call}: instance {error.rank} ended or cannot be reached.",
            cause=ErrorCause(instances=(error.rank,)),
            hint="Its own output says why.",
        ) from error
    except PodrunError as error:
        raise popdist_error(f"popdist.{call}: {error.message}", hint=error.hint) from error


def _array(call: str, array: Any, *, written: bool) -> np.ndarray:
    import numpy as np

    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{call}(): incompatible function arguments: {type(array).__name__} is no numpy.ndarray."
        )
    if written and not (array.flags.c_contiguous and array.flags.writeable):
        raise popdist_error(f"popdist.{call} changes its array, which must be contiguous and writable.")
    return array


def allReduceSum(array: np.ndarray, tensor_name: str = "") -> np.ndarray:
    """The sum of all instances' arrays, in place; gives the array back. Halves are added in float32."""
    checked = _array("allReduceSum", array, written=True)
    with _named("allReduceSum", checked.nbytes) as group:
        return _noted("allReduceSum", group.all_reduce(checked, out=checked))


def allGather(array: np.ndarray, tensor_name: str = "") -> np.ndarray:
    """All instances' arrays, ``[instances, *shape]`` in the order of instances."""
    checked = _array("allGather", array, written=False)
    with _named("allGather", checked.nbytes) as group:
        return _noted("allGather", group.all_gather(checked))


def broadcast(array: np.ndarray, root_rank: int = 0, tensor_name: str = "") -> np.ndarray:
    """Copy the array of instance ``root_rank`` into every instance's array, in place; returns the array."""
    checked = _array("broadcast", array, written=True)
    with _named("broadcast", checked.nbytes) as group:
        members = instance_groups._members
        root = root_rank if members is None else members.index(root_rank) if root_rank in members else -1
        if not 0 <= root < group.size:
            raise popdist_error(f"popdist.broadcast: there is no instance {root_rank} among them.")
        return _noted("broadcast", group.broadcast(checked, root))


def barrier() -> None:
    """Wait until all instances have arrived."""
    with _named("barrier") as group:
        group.barrier()
    notes = process_recorder()
    if notes is not None:
        notes.note("collective", call="barrier")


def _noted(call: str, result: np.ndarray) -> np.ndarray:
    """Record the result of a collective, if the launch is recorded, and return it."""
    notes = process_recorder()
    if notes is not None:
        notes.note("collective", call=call, digest=array_digest(result))
    return result


synchronize = barrier
"""`barrier` under its other name."""


def encode_object(value: object) -> bytes:
    """The object as bytes. UnsupportedError for a type other than None, number, string, bytes, list, tuple, set,
    dictionary or array of numbers.
    """
    return json.dumps(_plain(value)).encode()


def decode_object(note: bytes) -> Any:
    """The object that was given to `encode_object`."""
    return _rich(json.loads(note))


def _plain(value: Any) -> Any:
    import numpy as np

    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list or value.__class__.__name__ == "deque":
        return [_plain(item) for item in value]
    if type(value) in (tuple, set):
        return {"kind": type(value).__name__, "value": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"kind": "dict", "value": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if type(value) is bytes:
        return {"kind": "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return {"kind": kind, "value": [value.dtype.str, list(value.shape), data]}
    raise UnsupportedError(
        f"an object of type {type(value).__name__} cannot go between instances: it would have to be pickled",
        hint="Send its numbers: lists, dictionaries, strings and NumPy arrays travel.",
    )


def _rich(value: Any) -> Any:
    import numpy as np

    if isinstance(value, list):
        return [_rich(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value["kind"], value["value"]
    if kind == "tuple":
        return tuple(_rich(item) for item in content)
    if kind == "set":
        return {_rich(item) for item in content}
    if kind == "dict":
        return {_rich(key): _rich(item) for key, item in content}
    if kind == "bytes":
        return base64.b64decode(content)
    dtype, shape, data = content
    array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
    return array[()] if kind == "scalar" else array.copy()


T = TypeVar("T")


def execute_on_instances(instances: Set[int], func: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
    """Run ``func`` on these instances, with collectives among them alone. Returns its result there and None elsewhere.

    popdist_error for an instance that does not exist.
    """
    count = core.getNumInstances()
    wrong = sorted(index for index in instances if not 0 <= index < count)
    if wrong:
        raise popdist_error(f"There is no instance {wrong[0]}: instances are 0 to {count - 1}.")
    if core.getInstanceIndex() not in instances:
        return None
    with instance_groups.only(instances):
        return func(*args, **kwargs)
