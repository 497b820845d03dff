"""What a machine runs: the Executable, podrun's PopEF.

An Executable is data, not code to be trusted: typed instructions for each IPU of a replica, a table of streams (what
crosses between host and IPUs), a table of variables (what lasts on the IPUs between runs), numerical pieces as
StableHLO bytes made by ``jax.export``, and a report of what the tiles hold and how long they take. Machines interpret
the instructions (``podrun.device.program``); compilers write them (``podrun.compiler``).

Vocabulary
    *batch*: what one weight update sees, ``accumulation_factor`` micro-batches on every replica. One weight update.
    *machine*: one IPU-M2000. Its replicas are folded: a Computation sees all ``replicas_per_machine`` of them
    at once on a leading axis, and returns gradients already summed over them.
    *arena*: variables of one dtype laid end to end in one flat buffer, so that collectives and optimizer
    updates work on slices of it. Padded to a multiple of the number of machines.

The instruction list describes one pass: one batch, or ``batches_per_pass`` batches of a pipeline that overlaps them.
A run of ``n`` passes interprets it ``n`` times.
`podrun.core.executable_file` writes and reads an Executable as one file (`dumps`, `loads`).

Buffers
    A buffer name in a Computation is looked up in this order:

    * ``"arena:NAME"`` is the whole arena, ``"arena_slice:NAME"`` this machine's slice of it, in whatever
      shape of as many elements the Computation takes it;
    * `REPLICA_OFFSET` is the machine's own: see there;
    * the name of an arena's member (a weight, a state, a gradient accumulator) is a view of it with the
      member's shape: writing it changes the arena. Offsets of members and slices are multiples of 64
      elements, so that views of an aligned arena are aligned too, unless the arena is of scalars;
    * the name of a variable without an arena is its own buffer;
    * everything else is a temporary: a stream buffer that a LoadStream filled, or the output of an earlier
      Computation of the same batch. It need not outlive the batch.

    Outputs of a Computation that name arenas, members or variables take effect when it ends: it never sees
    its own. Arenas start a program as zeros where no member's variable says otherwise; gradient arenas (no
    variable is a member) may be overwritten by a Computation that does not read them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import field
from typing import Any, get_args

import numpy as np

from podrun.core.layout import Layout
from podrun.core.quick_dataclass import dataclass

Array = np.ndarray[Any, np.dtype[Any]]
"""Any NumPy array."""

EXECUTABLE_VERSION = 1
"""Version of the file format; a reader refuses a newer one."""

FLOATING_POINT_EXCEPTIONS = "floating_point_exceptions"
"""Key of `Executable.metadata`: whether tiles stop when a piece computes an infinity or a NaN."""
BATCHES_PER_PASS = "batches_per_pass"
"""Key of `Executable.metadata`: see `Executable.batches_per_pass`."""

REPLICA_OFFSET = "machine:replica_offset"
"""Reserved buffer that each machine fills: an int32 scalar, the global index of its first replica
(``machine // machines_per_replica * replicas_per_machine``). All machines run the same Executable; where
replicas differ (random numbers), they differ by this."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype for a dtype name. bfloat16 and smaller types come from ml_dtypes, which is imported only for
    them.
    """
    if name.startswith(("bfloat", "float8_", "float6_", "float4_", "int4", "uint4", "int2", "uint2")):
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype
    return np.dtype(name)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (NumPy's name, or ml_dtypes' for the small floats) and static shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self.size * numpy_dtype(self.dtype).itemsize


class StreamDirection(enum.Enum):
    """Which way a stream runs, seen from the IPU."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"


class Retrieval(enum.Enum):
    """Which values of an anchor, over the micro-batches of a run, the host gets (AnchorReturnType)."""

    ALL = "all"
    FINAL = "final"
    SUM = "sum"
    EVERY_N = "every_n"


@dataclass(frozen=True, slots=True)
class Stream:
    """One tensor crossing between host and IPUs; ``spec`` is what one replica sees in one micro-batch.

    ``broadcast`` (to device only): every replica gets the same data, so the host buffer has no replica axis.
    ``retrieval`` and ``period`` (to host only): which micro-batches come back.
    """

    spec: TensorSpec
    direction: StreamDirection
    broadcast: bool = False
    retrieval: Retrieval = Retrieval.ALL
    period: int = 1


class VariableRole(enum.Enum):
    """What a variable is for. Decides who may write it and what `modelToHost` does with it."""

    WEIGHT = "weight"
    """An initializer of the model, trained or not."""
    OPTIMIZER_STATE = "optimizer_state"
    """Momenta and step counters. Starts from `initial`; the host may read and write it."""
    SCALAR = "scalar"
    """A streamed hyper-parameter (a non-const learning rate and the like). The host writes it between runs."""
    RANDOM_SEED = "random_seed"
    """The base random seed, uint32 ``[2]`` (high word, low word); the program advances it with every micro-batch."""
    COMPUTED = "computed"
    """A number that one piece computes in every batch for another one. The host has no use for it."""


@dataclass(frozen=True, slots=True)
class Variable:
    """State that lasts on the IPUs between runs: equal on all replicas.

    ``initial`` fills it at load if the host does not write it (None: the host must write it before the first
    run). ``arena`` names the arena it lives in, or None if it has a buffer of its own.
    ``per_replica``: the exception to "equal on all replicas" (running statistics). Every replica keeps its
    own value: the buffer is ``[replicas_per_machine, *shape]``. Such a variable is in no arena. ``rows``: what the
    host sees of it, a row of ``[rows, *shape]`` for each replica by its global index: a write gives every replica its
    row, a read has of each row the value of its first replica. Empty: the host sees one value; a write goes to all
    replicas, a read gives that of the job's replica 0. ``position``: as of an `Arena`, for variables that have none
    (those with an arena lie where it lies).
    """

    spec: TensorSpec
    role: VariableRole
    initial: float | None = None
    arena: str | None = None
    per_replica: bool = False
    position: int | None = None
    rows: tuple[int, ...] = ()

    @property
    def host_spec(self) -> TensorSpec:
        """The tensor that the host reads and writes."""
        if not self.rows:
            return self.spec
        return TensorSpec(self.spec.name, self.spec.dtype, (max(self.rows) + 1, *self.spec.shape))


@dataclass(frozen=True, slots=True)
class ArenaMember:
    """A variable's (or gradient's) place in an arena: ``offset`` in elements."""

    name: str
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arena:
    """Tensors of one dtype end to end in one flat buffer of ``size`` elements (padding included).

    ``size`` is a multiple of the number of machines, so that machine *m* of *M* owns the slice ``[m*size//M,
    (m+1)*size//M)``. Weight, gradient and state arenas that are updated together share one layout. ``shared``: after
    each update all machines hold the same bits, so machines on one host may keep a single copy. ``sliced`` (optimizer
    state): machine *m* reads and writes only its slice *m*, and no AllGather follows. Whoever wants such an arena whole
    takes each slice from its owner; in a shared copy it simply is there. ``position``: where a replica spans several
    machines, the one of its machines that holds the arena; then the arena's collectives and slices are among the
    machines at that position, one for each replica, in order of replicas, and ``size`` is a multiple of their number.
    None: every machine holds it.
    """

    name: str
    dtype: str
    size: int
    members: tuple[ArenaMember, ...]
    shared: bool = True
    sliced: bool = False
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Computation:
    """A numerical piece: StableHLO made by ``jax.export``, with the names of the buffers it reads and writes.

    ``stablehlo`` is what ``jax.export.Exported.serialize`` gives: a flatbuffer, never a pickle. Positional
    arguments are ``inputs`` in order; results are ``outputs`` in order. Buffer names refer to variables,
    stream buffers, temporaries, or ``"arena:NAME"`` (a whole arena) and ``"arena_slice:NAME"`` (this
    machine's slice of it). ``donated`` names inputs whose storage the piece may reuse.
    """

    name: str
    stablehlo: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    donated: tuple[str, ...] = ()


class Reduction(enum.Enum):
    """How a collective combines the values of its ranks."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    LOCAL = "local"


# --- Instructions -------------------------------------------------------------------------------------------
# What a machine does, one at a time; faults enter between two of them. Each is a value: no instruction holds
# a callable.


@dataclass(frozen=True, slots=True)
class LoadStream:
    """Bring micro-batches ``[first, first+count)`` of this batch into ``buffer``: ``[count, replicas,
    *shape]``.

    Broadcast streams give ``[count, *shape]``.
    """

    stream: str
    buffer: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a Computation on its named buffers."""

    computation: str


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Reduce the arena over all machines, in machine order; machine *m* keeps the reduced slice *m*."""

    arena: str
    reduction: Reduction = Reduction.SUM


@dataclass(frozen=True, slots=True)
class AllGather:
    """Let every machine see all slices of the arena, each written by its owner.

    Where machines share one copy of the arena, this is the barrier between the last write and the next read.
    """

    arena: str


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Reduce the arena over all machines, in machine order; all get the whole result."""

    arena: str
    reduction: Reduction = Reduction.SUM


@dataclass(frozen=True, slots=True)
class StoreStream:
    """Hand ``buffer`` (``[count, replicas, *shape]``) to the host as micro-batches ``[first, first+count)``.

    The machine applies the stream's `Retrieval` as the micro-batches of a run pass by: ALL keeps each, EVERY_N each
    ``period``-th of the run (counted from 1 over ``batches * accumulation_factor``), SUM adds them in order in the
    tensor's own dtype, FINAL keeps the last one. For FINAL, compilers store only the micro-batches that can be last.
    """

    stream: str
    buffer: str
    first: int
    count: int


class SyncScope(enum.Enum):
    """Who waits for whom."""

    MACHINE = "machine"
    """The IPUs of one machine."""
    ALL = "all"
    """All machines of the program."""
    HOST = "host"
    """All machines and the host processes attached to them. An instruction list begins with it: the host has given this
    batch's data. A machine need not wait again between the batches of one run.
    """


@dataclass(frozen=True, slots=True)
class Sync:
    """A barrier: the IPUs of a scope wait for each other."""

    scope: SyncScope


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``buffer`` to IPU ``peer`` of the same replica; ``tag`` pairs it with the Receive.

    Does not wait for the Receive; tags are unique within a batch.
    """

    buffer: str
    peer: int
    tag: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive ``buffer`` from IPU ``peer`` of the same replica."""

    buffer: str
    peer: int
    tag: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Let temporary ``destination`` hold what temporary ``source`` holds now: a pipeline's stash and its restoring.

    Later writes to ``source`` do not reach ``destination``. Costs an emulator nothing: it may copy the reference.
    """

    source: str
    destination: str


Instruction = (
    LoadStream | Compute | ReduceScatter | AllGather | AllReduce | StoreStream | Sync | Send | Receive | Copy
)

INSTRUCTION_TYPES: dict[str, type[Instruction]] = {kind.__name__: kind for kind in get_args(Instruction)}
"""Every instruction by its name in the file."""


@dataclass(frozen=True, slots=True)
class Executable:
    """A compiled program. See the module docstring.

    ``instructions[k]`` is what IPU *k* of every replica does in one batch. ``tile_report`` is plain JSON-able
    data whose keys are fixed by ``podrun.costmodel``; its ``"step"`` entry holds at least ``cycles``
    (modelled cycles of one batch, without host I/O) and ``seconds``.
    """

    name: str
    layout: Layout
    accumulation_factor: int
    training: bool
    streams: Mapping[str, Stream]
    variables: Mapping[str, Variable]
    arenas: Mapping[str, Arena]
    computations: Mapping[str, Computation]
    instructions: tuple[tuple[Instruction, ...], ...]
    target: str
    tile_report: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The front end's own metadata (plain JSON): anchors, model digest, names of weights in the ONNX file. Machines
    read the keys `BATCHES_PER_PASS` and `FLOATING_POINT_EXCEPTIONS`.
    """

    @property
    def batches_per_pass(self) -> int:
        """Batches that one pass of the instruction lists runs. More than one iff a pipeline overlaps whole batches."""
        count = self.metadata.get(BATCHES_PER_PASS, 1)
        return count if isinstance(count, int) and count >= 1 else 1
