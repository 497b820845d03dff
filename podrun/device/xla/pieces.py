"""Numerical pieces: StableHLO -> compiled code, once per process and once per host.

One thread computes a small piece and two a large one, whatever the host (`podrun.device.xla.clients`), which makes
numbers independent of where a machine runs: XLA divides some sums by the number of threads it has (docs/device.md says
which).

Compiled code is kept in XLA's persistent cache under `cache_directory`. It cannot hold calls into oneDNN: a piece with
many of them is cut there (`podrun.device.xla.cutting`) and what lies between is kept; one with few is compiled in each
process. Machines of one job on one host ask for the same pieces at the same moment: the first compiles, the others wait
for it and load.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from podrun.device.xla import kept_steps
from podrun.device.xla.clients import SHARED_BY, called_from_outside, home, large, two_threads
from podrun.device.xla.convolutions import available
from podrun.device.xla.cutting import Steps, cut
from podrun.device.xla.heap import use_one_heap
from podrun.device.xla.rewrite import rewrite
from podrun.device.xla.steps import compiled, compiler
from podrun.device.xla.sums import simplify_sums
from podrun.errors import ApplicationRuntimeError
from podrun.executable import Computation

_log = logging.getLogger(__name__)
COMPILER_OPTIONS: dict[str, bool | str] = {
    "xla_cpu_multi_thread_eigen": False,
    "xla_allow_excess_precision": False,
}
"""Passed to XLA for every piece; part of the cache key. Without excess precision halves are rounded between operators,
as tiles do.
"""
WORTH_COMPILING = 1 << 27
"""Products of a piece's convolutions from which on they go to oneDNN. It depends on the piece alone, so numbers are the
same on every host."""
WORTH_CUTTING = 128
"""Convolutions, gradients included, from which on a piece is cut at its calls. ResNet-50's training (158) then loads in
half the time; in ResNet-18's (59), which compiles in 4 s, a step would take a third longer, since one step of a cut
piece waits for the other."""
WAIT_FOR_COMPILE = 300.0
"""Seconds to wait for another process's compile before compiling here too."""


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
    device: Any = None


def cache_directory(environ: Mapping[str, str]) -> Path:
    """``$PODRUN_CACHE_DIR``, else ``podrun`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if explicit := environ.get("PODRUN_CACHE_DIR"):
        return Path(explicit)
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "/tmp"), ".cache")
    return Path(base) / "podrun"


class PieceCache:
    """Compiled pieces of this process, by content. Safe to use from several threads.

    ``own_process``: the process holds nothing but a machine, so JAX may be set up for it. XLA then runs small
    pieces in the thread that asks for them instead of handing them to a pool: machines share a host's cores,
    and a pool each makes them wait for one another's threads. XLA then counts one thread, on which some sums
    depend; a script with machines inside of it asks for the same (`podrun.popart.program.build`).
    """

    def __init__(self, directory: Path | None, *, own_process: bool = False) -> None:
        self._directory = directory
        if own_process:
            os.environ["NPROC"] = "1"  # read by XLA when its client starts
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
            use_one_heap()
        self._inline = own_process
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
                if self._inline:
                    config: Any = importlib.import_module("jax").config
                    config.update("jax_cpu_enable_async_dispatch", False)
                piece = self._pieces[key] = self._compiled(key, computation, donated, in_place)
        return replace(piece, computation=computation)

    def _compiled(
        self, key: str, computation: Computation, donated: tuple[int, ...], in_place: Mapping[int, int]
    ) -> Piece:
        kept = (
            None
            if self._directory is None
            else self._directory / "xla" / f"{key}.{kept_steps.version()}.steps"
        )
        found = kept_steps.read(kept) if kept is not None and available() else None
        if found is not None:
            with self._first_on_host(key):
                return Piece(computation, _of_steps(*found), found[0].shapes)
        lowered, shared, in_place = _lower(computation, donated, in_place)
        calls = rewrite(lowered, WORTH_COMPILING)
        steps = cut(lowered) if calls >= WORTH_CUTTING else None
        if steps is not None:
            threads = SHARED_BY if shared else 1
            with self._first_on_host(key):
                if kept is not None:
                    with _if_possible(kept.parent):
                        kept_steps.write(steps, threads, kept)
                return Piece(computation, _of_steps(steps, threads), steps.shapes)
        if calls:  # a cut piece's steps read what lies between calls anyway, and more of them differ
            simplify_sums(lowered.compiler_ir("stablehlo"))
        with contextlib.nullcontext() if calls else self._first_on_host(key):
            call = _compile(lowered)
        if shared:
            call = called_from_outside(call, in_place)
        device = two_threads() if shared else home()
        return Piece(computation, call, _shapes(lowered), in_place, device)

    @contextlib.contextmanager
    def _first_on_host(self, key: str) -> Iterator[None]:
        """Hold back while another process compiles the same piece; a marker says that it is in the cache."""
        if self._directory is None:
            yield
            return
        directory = self._directory / "xla"
        marker, lock = directory / f"{key}.done", None
        with _if_possible(directory):
            directory.mkdir(parents=True, exist_ok=True)
            _use_xla_cache(directory)
            if not marker.exists():
                lock = (directory / f"{key}.lock").open("w")
        if lock is None:
            yield
            return
        with lock:
            _wait_for_lock(lock.fileno(), marker)
            yield
            with _if_possible(directory):
                marker.touch()


@contextlib.contextmanager
def _if_possible(directory: Path) -> Iterator[None]:
    """Keep something in the cache; a disk that has filled up, or a home that went away, ends no program."""
    try:
        yield
    except OSError as error:
        _log.warning("compiled programs cannot be kept in %s: %s", directory, error.strerror)


def _key(computation: Computation, donated: tuple[int, ...], in_place: Mapping[int, int]) -> str:
    import jax

    digest = hashlib.sha256(computation.stablehlo)
    digest.update(
        repr((donated, sorted(in_place.items()), sorted(COMPILER_OPTIONS.items()), jax.__version__)).encode()
    )
    return digest.hexdigest()


def _wait_for_lock(fd: int, marker: Path) -> None:
    end = time.monotonic() + WAIT_FOR_COMPILE
    while not marker.exists() and time.monotonic() < end:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.02)


def _use_xla_cache(directory: Path) -> None:
    """Point JAX at the cache, unless this process (a script with machines inside it) has set one of
    its own.
    """
    import jax

    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        config.update("jax_compilation_cache_dir", str(directory))
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _lower(
    computation: Computation, donated: tuple[int, ...], in_place: Mapping[int, int]
) -> tuple[Any, bool, Mapping[int, int]]:
    """A piece ready to compile, whether two threads share it, and which operands it writes over: all that were asked
    for, or none."""
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

    def flat(*operands: Any) -> list[Any]:
        return list(jax.tree.leaves(exported.call(*operands)))

    with jax.enable_x64(True):
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]
        lowered = jax.jit(flat, donate_argnums=sorted({*donated, *in_place})).lower(*shapes)
        if shared := large(lowered):
            one = jax.sharding.SingleDeviceSharding(two_threads())
            whole = jax.jit(flat, in_shardings=one, out_shardings=one, donate_argnums=sorted(in_place))
            lowered = whole.lower(*shapes)
    if not in_place.items() <= _written_over(lowered).items():
        return _lower(computation, donated, {})
    return lowered, shared, in_place


def _shapes(lowered: Any) -> list[tuple[int, ...]]:
    tree: Any = importlib.import_module("jax.tree")
    return [tuple(aval.shape) for aval in tree.leaves(lowered.in_avals)]


def _written_over(lowered: Any) -> dict[int, int]:
    """Positions of operands whose memory results take, and of these results: JAX goes by shape and order alone."""
    ir: Any = importlib.import_module("jaxlib.mlir.ir")
    main = next(
        op for op in lowered.compiler_ir().body if ir.StringAttr(op.attributes["sym_name"]).value == "main"
    )
    attributes = main.attributes.get("arg_attrs", ())
    return {
        position: int(ir.IntegerAttr(each["tf.aliasing_output"]).value)
        for position, each in enumerate(attributes)
        if "tf.aliasing_output" in each
    }


def _compile(lowered: Any) -> Callable[..., Any]:
    jax: Any = importlib.import_module("jax")
    # XLA cannot write calls into oneDNN in loops to its cache; JAX tries, and warns that it failed
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry .*std::bad_alloc")
    with jax.enable_x64(True):
        call: Callable[..., Any] = lowered.compile(compiler_options=dict(COMPILER_OPTIONS))
    return call


def _of_steps(steps: Steps, threads: int) -> Callable[..., Any]:
    device = two_threads() if threads > 1 else None
    call = compiled(steps, device, compiler(threads, device, COMPILER_OPTIONS))
    return call if device is None else called_from_outside(call)


def _check(computation: Computation, exported: Any) -> None:
    name = computation.name
    if "cpu" not in exported.platforms or exported.nr_devices != 1:
        raise ApplicationRuntimeError(
            f"Computation {name!r} is for {exported.nr_devices} device(s) of "
            f"{', '.join(exported.platforms)}, not one CPU"
        )
    if len(exported.in_avals) != len(computation.inputs) or len(exported.out_avals) != len(
        computation.outputs
    ):
        raise ApplicationRuntimeError(
            f"Computation {name!r} names {len(computation.inputs)} inputs and "
            f"{len(computation.outputs)} outputs, "
            f"but its StableHLO has {len(exported.in_avals)} and {len(exported.out_avals)}"
        )
