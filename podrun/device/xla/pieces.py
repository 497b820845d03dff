"""Numerical pieces: StableHLO -> compiled code, once per process and once per host.

One thread computes a small piece and two a large one, whatever the host (`podrun.device.xla.clients`), which makes
numbers independent of where a machine runs: XLA divides some sums by the number of threads it has (docs/device.md says
which).

XLA's persistent cache keeps compiled code (`podrun.device.xla.kept_pieces`). Machines of one job on one host ask for
the same pieces at the same moment: the first compiles, the others wait for it and load.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from podrun.core import executable_file
from podrun.core.environment import XLA_FLAGS, environment
from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import Computation, numpy_dtype
from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.clients import (
    SHARED_BY,
    callable_across_clients,
    instruction_set,
    needs_two_threads,
    one_thread_device,
    own_settings,
    two_thread_device,
    use_one_heap,
)
from podrun.device.xla.compiler_options import COMPILER_OPTIONS, WITHOUT_MLIR, options_for
from podrun.device.xla.convolutions import available, failed_to_load, formulation
from podrun.device.xla.custom_calls import check_calls, check_operations
from podrun.device.xla.dense_programs import DenseCall, DenseProgram, dense_program, may_be_dense
from podrun.device.xla.kept_pieces import KeptPieces, piece_name
from podrun.device.xla.matrix_products import rewrite_products
from podrun.device.xla.own_functions import rewrite_random_words
from podrun.device.xla.ready_calls import CallNote, array_kinds
from podrun.device.xla.rewrite import rewrite_convolutions
from podrun.device.xla.roundings import rewrite_roundings
from podrun.device.xla.sums import simplify_sums
from podrun.device.xla.vetting import vetter
from podrun.private_apis.jax import (
    aliased_outputs,
    load_compiled,
    register_lapack,
    register_lapack_only_when_asked,
    stablehlo,
    written_to_cache,
)

if TYPE_CHECKING:
    from jax import Device
    from jax.export import Exported
    from jax.stages import Lowered

    from podrun.device.xla.update_steps import UpdateSteps

WORTH_COMPILING = 1 << 27
"""Products of a piece's convolutions from which on they go to oneDNN. It depends on the piece alone, so numbers are the
same on every host."""
_CALL = b"custom_call"
"""In the bytes of every piece with a custom call: they hold the names of operations in full."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A compiled Computation. ``call(*operands)`` gives its outputs as a list of ``jax.Array``, finished.

    ``shapes``: of the operands, None for one that is not read. ``in_place``: positions of operands, in memory of
    ``device``, that results are written over, and of these results.
    """

    computation: Computation
    call: Callable[..., Any]
    shapes: Sequence[tuple[int, ...] | None]
    in_place: Mapping[int, int] = field(default_factory=dict)
    device: Device | None = None
    kinds: Sequence[tuple[int, np.dtype[Any]]] = ()
    """Elements and dtype of each operand and then of each result."""
    placed: frozenset[int] = frozenset()
    """Positions of results that may be written to memory of the caller's (`matrix_products.ResultPlaces`)."""
    dense: DenseCall | None = None
    """The call, where the C module computes it without XLA; its results are arrays of NumPy's."""
    fitting_steps: dict[Any, UpdateSteps | None] = field(default_factory=dict)
    """What `fused_updates.fitting_steps` found for the piece's code, by gradient and results."""

    @property
    def is_shared(self) -> bool:
        """Whether two threads compute it, on a client of their own."""
        return self.device is not None and self.device != one_thread_device()


class PieceCache:
    """Compiled pieces of this process, by content. Safe to use from several threads.

    ``own_process``: the process holds nothing but a machine, so JAX and the C library may be set up for it. ``vets``:
    pieces that are not this user's own are read in another process first.
    """

    def __init__(self, directory: Path | None, *, own_process: bool = False, vets: bool = True) -> None:
        self._kept = KeptPieces(directory)
        self._vets = vets
        if own_process:
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
            use_one_heap()
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._pieces: dict[str, Piece] = {}

    def piece(
        self, computation: Computation, donated: tuple[int, ...], in_place: Mapping[int, int] | None = None
    ) -> Piece:
        """The compiled Computation; ``donated``: positions of operands whose memory it may use for its
        outputs; ``in_place``: of those that it should write over, and of the results that are to lie there.

        Raises ApplicationRuntimeError for bytes that are no StableHLO for one CPU device.
        """
        in_place = in_place or {}
        key = _key(computation, donated, in_place)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            piece = self._pieces.get(key)
            if piece is None:
                with own_settings():
                    piece = self._pieces[key] = self._compiled(key, computation, donated, in_place)
        _check_names(computation, len(piece.shapes), len(piece.kinds) - len(piece.shapes))
        return replace(piece, computation=computation)

    def _compiled(
        self, key: str, computation: Computation, donated: tuple[int, ...], in_place: Mapping[int, int]
    ) -> Piece:
        own = executable_file.is_own(computation.stablehlo)
        if self._vets and not own:
            vetter(self._kept.directory).check(computation, donated, in_place)
        plain = own and _CALL not in computation.stablehlo
        ready = self._ready(key, computation) if plain else None
        if ready is not None:
            return ready
        lowered, shared, in_place = _lower(key, computation, donated, in_place, self._kept.threads(key))
        if not own:
            check_operations(computation.name, stablehlo(lowered))
        elif _CALL in computation.stablehlo:
            check_calls(computation.name, stablehlo(lowered))
        if plain and not shared and not in_place and may_be_dense(lowered, available):
            dense = dense_program(lowered)
            if dense is not None:
                return self._dense_piece(key, computation, dense, lowered)
            lowered = _lower(key, computation, donated, in_place, 1)[0]
        own_calls = rewrite_roundings(lowered, available) + rewrite_random_words(lowered, available)
        calls = rewrite_convolutions(lowered, WORTH_COMPILING, SHARED_BY if shared else 1)
        if calls:
            simplify_sums(stablehlo(lowered))
        products = rewrite_products(lowered, available)
        placed = frozenset(p.place - 1 for p in products if p.place and not shared)
        with self._kept.first_on_host(key) as entries:
            call = _compile(lowered, computation.name)
        if plain and len(entries) == 1 and not failed_to_load():
            note = _note(lowered, shared, in_place, placed, library=bool(calls or products or own_calls))
            if note is not None:
                self._kept.note(key, note, entries[0])
        if shared:
            call = callable_across_clients(call, in_place)
        device = two_thread_device() if shared else one_thread_device()
        return Piece(computation, call, _shapes(lowered), in_place, device, _kinds(lowered), placed)

    def _dense_piece(
        self, key: str, computation: Computation, dense: DenseProgram, lowered: Lowered
    ) -> Piece:
        call = dense.bound()
        note = _note(lowered, False, {}, call.placed, library=True)
        if note is not None:
            self._kept.note(key, replace(note, dense=dense.numbers))
        shapes, kinds = _shapes(lowered), _kinds(lowered)
        return Piece(computation, call, shapes, kinds=kinds, placed=call.placed, dense=call)

    def _ready(self, key: str, computation: Computation) -> Piece | None:
        """The compiled piece as its note describes it; None without one."""
        kept = self._kept.ready(key)
        if kept is None:
            return None
        note, entry = kept
        if note.library and not available():
            return None
        shared = note.threads == SHARED_BY
        device = two_thread_device() if shared else one_thread_device()
        operands, results = (
            [np.broadcast_to(np.zeros((), numpy_dtype(dtype)), shape) for shape, dtype in kinds]
            for kinds in (note.operands, note.results)
        )
        kinds = tuple((array.size, array.dtype) for array in (*operands, *results))
        shapes = [array.shape for array in operands]
        if note.dense:
            dense = DenseProgram(tuple(note.dense), tuple(note.results)).bound()
            return Piece(computation, dense, shapes, kinds=kinds, placed=note.placed, dense=dense)
        call = load_compiled(entry, piece_name(note.threads, key), operands, results, device)
        if call is None:
            self._kept.refuse(key)
            return None
        if shared:
            call = callable_across_clients(call, note.in_place)
        return Piece(computation, call, shapes, note.in_place, device, kinds, note.placed)

    def forget(self) -> None:
        """Keep no piece in memory any more."""
        with self._lock:
            self._pieces.clear()
            self._locks.clear()


_LAPACK = b"lapack"
"""The names of jaxlib's LAPACK calls begin with it, such as ``lapack_sgetrf_ffi``."""


class MachinePieces(PieceCache):
    """The pieces of a process that holds nothing but machines.

    JAX registers LAPACK whenever it lowers an exported program, and imports SciPy for it: 0.15 s of a core in every
    machine's process, for calls that few programs have. Here only a piece that calls LAPACK causes that.
    """

    def __init__(self, directory: Path | None) -> None:
        super().__init__(directory, own_process=True)

    def piece(
        self, computation: Computation, donated: tuple[int, ...], in_place: Mapping[int, int] | None = None
    ) -> Piece:
        """See `PieceCache.piece`."""
        register_lapack_only_when_asked()
        if _LAPACK in computation.stablehlo:
            register_lapack()
        return super().piece(computation, donated, in_place)


def _key(computation: Computation, donated: tuple[int, ...], in_place: Mapping[int, int]) -> str:
    import jax

    digest = hashlib.sha256(computation.stablehlo)
    digest.update(
        repr(
            (
                donated,
                sorted(in_place.items()),
                sorted(COMPILER_OPTIONS.items()),
                sorted(WITHOUT_MLIR.items()),
                jax.__version__,
                instruction_set(),
                environment().get(XLA_FLAGS),
                formulation(),
            )
        ).encode()
    )
    return digest.hexdigest()


def _lower(
    key: str,
    computation: Computation,
    donated: tuple[int, ...],
    in_place: Mapping[int, int],
    threads: int | None = None,
) -> tuple[Lowered, bool, Mapping[int, int]]:
    """A piece ready to compile, whether two threads share it, and which operands it writes over: those that were asked
    for and that JAX pairs with the same results. ``threads``: that compute it, if that is known."""
    jax: Any = importlib.import_module("jax")  # untyped here: jax's own annotations do not cover these calls
    export: Any = importlib.import_module("jax.export")

    try:
        exported = export.deserialize(bytearray(computation.stablehlo))
    except Exception as error:  # the flatbuffer reader raises whatever it trips over
        raise ApplicationRuntimeError(
            f"Computation {computation.name!r} holds no StableHLO that can be read: "
            f"{type(error).__name__}: {error}"
        ) from error
    _check(computation, exported)

    def flat(*operands: object) -> list[Any]:
        return list(jax.tree.leaves(exported.call(*operands)))

    with jax.enable_x64(True):
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]

        def on(device: object, donations: set[int]) -> Lowered:
            one = jax.sharding.SingleDeviceSharding(device)
            flat.__name__ = piece_name(SHARED_BY if device is not one_thread_device() else 1, key)
            whole = jax.jit(flat, in_shardings=one, out_shardings=one, donate_argnums=sorted(donations))
            lowered: Lowered = whole.lower(*shapes)
            return lowered

        shared = threads == SHARED_BY
        if not shared:
            lowered = on(one_thread_device(), {*donated, *in_place})
            shared = threads is None and needs_two_threads(lowered)
        if shared:
            lowered = on(two_thread_device(), set(in_place))
    aliased = aliased_outputs(lowered).items()
    if not in_place.items() <= aliased:
        return _lower(key, computation, donated, dict(in_place.items() & aliased), threads)
    return lowered, shared, in_place


def _note(
    lowered: Lowered, shared: bool, in_place: Mapping[int, int], placed: frozenset[int], *, library: bool
) -> CallNote | None:
    """What the next process needs to call a piece at once, but its entry; None if a dtype has no name of its own."""
    from jax import tree

    operands, results = (array_kinds(tree.leaves(of)) for of in (lowered.in_avals, lowered.out_info))
    if operands is None or results is None:
        return None
    threads = SHARED_BY if shared else 1
    return CallNote(threads, in_place, operands, results, placed, library, "", "")


def _shapes(lowered: Lowered) -> list[tuple[int, ...]]:
    from jax import tree

    return [tuple(aval.shape) for aval in tree.leaves(lowered.in_avals)]


def _kinds(lowered: Lowered) -> tuple[tuple[int, np.dtype[Any]], ...]:
    from jax import tree

    both = (*tree.leaves(lowered.in_avals), *tree.leaves(lowered.out_info))
    return tuple((math.prod(aval.shape), np.dtype(aval.dtype)) for aval in both)


def _compile(lowered: Lowered, name: str) -> Callable[..., Any]:
    import jax

    try:
        with jax.enable_x64(True), written_to_cache():
            options = cast("dict[str, str | bool]", options_for(stablehlo(lowered)))
            call: Callable[..., Any] = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        said = str(error).strip().partition("\n")[0]
        raise ApplicationRuntimeError(
            f"XLA cannot compile piece {name!r} of the program: {said}",
            hint="Where memory ran out, take a smaller micro-batch; otherwise report it: PODRUN_TRACEBACK=full shows "
            "the frames.",
        ) from error
    return call


def _check(computation: Computation, exported: Exported) -> None:
    name = computation.name
    if "cpu" not in exported.platforms or exported.nr_devices != 1:
        raise ApplicationRuntimeError(
            f"Computation {name!r} is for {exported.nr_devices} device(s) of "
            f"{', '.join(exported.platforms)}, not one CPU"
        )
    _check_names(computation, len(exported.in_avals), len(exported.out_avals))


def _check_names(computation: Computation, inputs: int, outputs: int) -> None:
    """Raise ApplicationRuntimeError unless a Computation has a name for each operand and result of its StableHLO."""
    if (len(computation.inputs), len(computation.outputs)) != (inputs, outputs):
        raise ApplicationRuntimeError(
            f"Computation {computation.name!r} names {len(computation.inputs)} inputs and "
            f"{len(computation.outputs)} outputs, but its StableHLO has {inputs} and {outputs}"
        )
