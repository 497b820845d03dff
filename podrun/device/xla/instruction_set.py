"""The instruction set that XLA and oneDNN compile for in this process.

Machine code needs it, and bits depend on it. XLA and oneDNN compile for the processor that they run on, as far as
``--xla_cpu_max_isa`` in ``XLA_FLAGS`` and ``ONEDNN_MAX_CPU_ISA`` let them. The keys of XLA's persistent cache do not
name the processor: its code, found by another one, may end the process with an illegal instruction, or round otherwise.
So everything that podrun keeps of a compiled program is kept by this name.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path

from podrun.core.environment import environment

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
    """This process's, as it is when first asked for: XLA and oneDNN read their limits once, too."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = f"flags : {platform.machine()} {platform.processor()}"
    return name_of(cpuinfo, environment())


def name_of(cpuinfo: str, environ: Mapping[str, str]) -> str:
    """A name such as ``avx2-3f0c9a1be24d``, of ``/proc/cpuinfo`` and the limits in ``environ``.

    Equal names, equal machine code. The first processor speaks for all.
    """
    first = cpuinfo.strip().split("\n\n")[0]
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.split("\n"))
    }
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    xla = _xla_limit(environ.get("XLA_FLAGS", ""))
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
    found = ""
    for flag in flags.split():
        key, _, value = flag.partition("=")
        if key == "--xla_cpu_max_isa":
            found = value.upper()
    return found
