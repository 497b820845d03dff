"""podrun's own XLA clients of this process: one computes small pieces on one thread, one large pieces on two threads.

XLA divides some sums by the number of its threads, so that number must depend neither on the host nor on what the
process computed before. So podrun computes nothing on JAX's default client, which has as many threads as the host has
cores, or as ``NPROC`` said when it started. Waking a second thread takes longer than most pieces; they run in the
calling thread. From `WORTH_SHARING` or `WORTH_READING_TOGETHER` on two threads share a piece, on every host, also on
one with one core. So the bits of a piece depend on the piece alone.

The second half of the module controls memory that large pieces free. A training step allocates and frees hundreds of
megabytes. glibc returns blocks of that size to the kernel, which then zeroes every page anew for the next step: 44,000
page faults for a step of MobileNet at batch 16, a quarter of its time. Here the process keeps freed memory for the next
step, and returns it when a program is unloaded.

Machine code needs the processor's instruction set (`instruction_set`), and bits depend on it. XLA and oneDNN compile
for the processor that they run on, as far as ``--xla_cpu_max_isa`` in ``XLA_FLAGS`` and ``ONEDNN_MAX_CPU_ISA`` let
them. The keys of XLA's persistent cache do not name the processor: its code, found by another one, may end the
process with an illegal instruction, or round otherwise. So everything that podrun keeps of a compiled program is kept
by this name.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.aligned_memory import ScratchArrays, is_aligned
from podrun.core.environment import XLA_FLAGS, environment
from podrun.core.errors import ApplicationRuntimeError
from podrun.device.xla.operation_bounds import most_operations
from podrun.device.xla.own_functions import operations_of_words
from podrun.private_apis.jax import stablehlo, start_cpu_client

if TYPE_CHECKING:
    from jax.stages import Lowered

WORTH_SHARING = 1 << 30
"""Floating point operations of a piece from which on two threads compute it. A step of a 784-512-512-10 network on
four replicas has half as many and is slower on two threads than on one."""
WORTH_READING_TOGETHER = 1 << 26
"""Bytes of a piece's operands and results from which on two threads compute it, whatever it computes. An update of
large weights is limited by memory bandwidth, which one core cannot use fully."""
SHARED_BY = 2
"""Threads that compute a large piece."""
_starting = threading.Lock()


def needs_two_threads(lowered: Lowered) -> bool:
    """Whether two threads compute a ``jax.stages.Lowered``, as it is before anything is rewritten. Random words do not
    count: native code computes them, on threads of its own."""
    module = stablehlo(lowered)
    if most_operations(module) >= WORTH_SHARING:
        analysis = lowered.cost_analysis() or {}
        if float(analysis.get("flops", 0.0)) - operations_of_words(module) >= WORTH_SHARING:
            return True
    from jax import tree

    arrays = [*tree.leaves(lowered.in_avals), *tree.leaves(lowered.out_info)]
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    return bool(size >= WORTH_READING_TOGETHER)


def two_thread_device() -> Any:
    """The ``jax.Device`` of the two-thread client. From the first call on, the process keeps freed memory."""
    keep_freed_memory()
    return _devices()[SHARED_BY]


def one_thread_device() -> Any:
    """The ``jax.Device`` of the one-thread client, whose pieces run in the calling thread. Operands of all pieces and
    results of its own lie there."""
    return _devices()[1]


def device_for(operations: float) -> Any:
    """The ``jax.Device`` for so many floating point operations."""
    return two_thread_device() if operations >= WORTH_SHARING else one_thread_device()


_SETTINGS: Mapping[str, Any] = {
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_softmax_custom_jvp": False,
    "jax_debug_nans": False,
    "jax_debug_infs": False,
    "jax_disable_jit": False,
    "jax_enable_checks": False,
    "jax_transfer_guard_host_to_device": "allow",
    "jax_transfer_guard_device_to_host": "allow",
}
"""podrun's values of JAX's settings that change what is computed, or have JAX refuse it. ``jax`` has a context manager
for each, named without the prefix."""


@contextmanager
def own_settings() -> Iterator[None]:
    """A context in which this thread computes as in a new process, whatever the program has set for JAX and for
    floating point."""
    import jax

    with _settings(
        [name for name, ours in _SETTINGS.items() if getattr(jax.config, name) not in (ours, None)]
    ):
        yield


@contextmanager
def _settings(names: Iterable[str]) -> Iterator[None]:
    """podrun's values of these settings, and floating point as in a new process."""
    import jax

    library, before = _libm(), ctypes.create_string_buffer(_FLOATING_POINT_BYTES)
    library.fegetenv(before)
    library.fesetenv(_DEFAULT_FLOATING_POINT)
    try:
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(getattr(jax, name.removeprefix("jax_"))(_SETTINGS[name]))
            yield
    finally:
        library.fesetenv(before)


_thread = threading.local()
_NOTHING_TO_SET = nullcontext()


def machine_settings() -> AbstractContextManager[None]:
    """`own_settings` with 64-bit types, in which machines run. Looking at JAX's settings takes tens of microseconds
    once other work has displaced them from the processor's cache; a thread that holds them (`held_machine_settings`)
    looks at none."""
    return _NOTHING_TO_SET if getattr(_thread, "holds_settings", False) else _machine_settings()


@contextmanager
def _machine_settings() -> Iterator[None]:
    import jax

    with own_settings(), jax.enable_x64(True):
        yield


@contextmanager
def held_machine_settings() -> Iterator[None]:
    """A context for a thread of podrun's own that does nothing but runs: it looks at no settings for each of them,
    whatever other threads of the process set."""
    import jax

    with _settings(_SETTINGS), jax.enable_x64(True):
        _thread.holds_settings = True
        try:
            yield
        finally:
            _thread.holds_settings = False


_FLOATING_POINT_BYTES = 64
"""At least those of ``fenv_t`` (32 on x86-64), which says how the processor rounds and what it traps on. XLA computes
with the calling thread's."""
_DEFAULT_FLOATING_POINT = ctypes.c_void_p(-1)
"""``FE_DFL_ENV`` of fenv.h: that of a new program."""


@functools.cache
def _libm() -> Any:
    """The C library's functions for floating point, called without giving up the interpreter's lock."""
    return ctypes.PyDLL("libm.so.6")


@contextmanager
def on_one_thread_device() -> Iterator[None]:
    """A context with `own_settings` in which JAX computes on `one_thread_device` by default: constants evaluated while
    a model is lowered, keys of random numbers."""
    import jax

    with own_settings(), jax.default_device(one_thread_device()):
        yield


def _devices() -> Mapping[int, Any]:
    """The devices by number of threads. All clients start together, before the first thing is computed.

    Raises ApplicationRuntimeError in a process forked from one that has them: their threads are not in it, and what
    waits for such a thread waits for ever.
    """
    if _start.cache_info().currsize:
        process, devices = _start()  # Without the lock, which a fork may leave taken in the child.
    else:
        with _starting:
            process, devices = _start()
    if process != os.getpid():
        raise ApplicationRuntimeError(
            f"this process was forked from process {process}, which had compiled programs: JAX does not work in it",
            hint="Start the process before the first session, or with multiprocessing's method 'spawn'.",
        )
    return devices


@functools.cache
def _start() -> tuple[int, Mapping[int, Any]]:
    """The id of this process, and podrun's XLA devices in it by their number of threads."""
    device_of = {}
    with _all_cores():
        for threads in (1, SHARED_BY):
            with _threads(threads):
                device_of[threads] = start_cpu_client().local_devices()[0]
    return os.getpid(), device_of


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """``NPROC``, which XLA reads when a client starts: jaxlib 0.10.2 has no option for the number of threads.

    Without ``NPROC`` XLA takes the number of cores that the starting thread may use, and no fewer than devices; its
    threads then could not leave these cores, and an ``NPROC`` of the user's would still come first. So this is the one
    place where podrun changes the environment: once a process, before anything is built.
    """
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = before


@contextmanager
def _all_cores() -> Iterator[None]:
    """Threads started inside may use the process's cores, not only the one that this thread keeps to."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def callable_across_clients(
    call: Callable[..., Sequence[Any]], in_place: Mapping[int, int] | None = None
) -> Callable[..., list[Any]]:
    """A call of another client's piece with operands of any client, which it reads in place. Results stay on the
    piece's own: a step of MobileNet has 131 of them, of which XLA reads few again (`on_one_thread`).

    ``in_place``: positions of operands that are on the piece's own client.
    """
    taken = set(in_place or {})

    def run(*operands: object) -> list[Any]:
        return list(call(*[o if at in taken else np.asarray(o) for at, o in enumerate(operands)]))

    return run


def on_one_thread(value: Any) -> Any:
    """A finished result of a piece as an array of the one-thread client, in the same memory."""
    import jax

    here = one_thread_device()
    if isinstance(value, np.ndarray) or value.device == here:
        return value
    return jax.device_put(np.asarray(value), here)


class AlignedInputs(threading.local):
    """Inputs where XLA reads them in place: in memory of the calling thread that it is given again and again.

    XLA copies an array that does not begin at a multiple of 64 bytes, a large one in a thread of its own; the program
    then runs in such a thread too, since its inputs are not there when it is called.
    """

    def __init__(self) -> None:
        self._rooms = ScratchArrays()

    def take(self, name: str, value: object) -> object:
        """The value, an array perhaps in the memory that is kept for this name. Valid until the next of that name."""
        if not isinstance(value, np.ndarray) or value.nbytes < _COPIED_AT_ONCE or value.dtype.hasobject:
            return value
        if is_aligned(value):
            return value
        room = self._rooms.array(name, value.shape, value.dtype)
        np.copyto(room, value)
        return room


_COPIED_AT_ONCE = 1 << 14
"""Bytes of an array from which on it is worth while."""


# --- Freed memory ---------------------------------------------------------------------------------------------

KEPT = 1 << 30
"""Bytes. Larger blocks, and more free memory than this at the heap's end, return to the kernel at once."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h


@functools.cache
def keep_freed_memory() -> bool:
    """Keep freed memory from now on, for the whole process. False if the C library has no such setting (it is not
    glibc)."""
    return all(_mallopt(name, KEPT) for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))


def use_one_heap() -> bool:
    """Let threads that start later use the first thread's heap: a heap of their own holds no block above 64 MB. For
    processes that only compute. Threads that have a heap keep it, so podrun starts its own Ray, whose processes have
    threads before they have machines, with ``MALLOC_ARENA_MAX=1``."""
    return _mallopt(_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return free memory to the kernel, if it is being kept."""
    if keep_freed_memory.cache_info().currsize and keep_freed_memory():
        _libc().malloc_trim(0)


def _mallopt(name: int, value: int) -> bool:
    set_option = getattr(_libc(), "mallopt", None)
    return set_option is not None and bool(set_option(name, value))


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)


_LEVELS = (
    ("avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    ("avx2", {"avx2", "fma"}),
    ("avx", {"avx"}),
    ("sse4_2", {"sse4_2"}),
)
"""Names for people, from the widest; the digest tells what they leave out."""
_CODE = (
    *("sse", "ssse", "avx", "amx", "fma", "f16c", "bmi", "popcnt", "lzcnt", "abm", "movbe", "adx", "vaes"),
    *("vpclmul", "gfni", "tbm", "xop", "asimd", "sve", "fp16", "bf16", "i8mm", "neon"),
)
"""Starts of processor flags that decide which instructions compilers emit. Others come and go with the kernel."""
_MODEL = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""What compilers choose a processor's name by, and with it the width of vectors and the order of sums."""


@functools.cache
def instruction_set() -> str:
    """The instruction set that XLA and oneDNN use in this process. It is read once, as they read their limits."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = f"flags : {platform.machine()} {platform.processor()}"
    return processor_name(cpuinfo, environment())


def processor_name(cpuinfo: str, environ: Mapping[str, str]) -> str:
    """A name such as ``avx2-3f0c9a1be24d``, of ``/proc/cpuinfo`` and the limits in ``environ``.

    Equal names, equal machine code. The first processor speaks for all.
    """
    first = cpuinfo.strip().split("\n\n")[0]
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.split("\n"))
    }
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    xla = _xla_limit(environ.get(XLA_FLAGS, ""))
    library = (environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or "").upper()
    level = next((name for name, needed in _LEVELS if needed <= flags), "plain")
    names = [name for name, _ in _LEVELS]
    limit = next((name for name in names if xla.startswith(name.upper())), level)
    if level in names and names.index(limit) > names.index(level):
        level = limit
    model = [fields.get(name, "") for name in _MODEL]
    said = repr((model, sorted(flag for flag in flags if flag.startswith(_CODE)), xla, library))
    return f"{level}-{hashlib.sha256(said.encode()).hexdigest()[:12]}"


def _xla_limit(flags: str) -> str:
    """The value of the last ``--xla_cpu_max_isa`` among XLA's flags, in capitals; empty if there is none."""
    limit = ""
    for flag in flags.split():
        key, _, value = flag.partition("=")
        if key == "--xla_cpu_max_isa":
            limit = value.upper()
    return limit
