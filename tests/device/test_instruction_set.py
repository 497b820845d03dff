"""Files of compiled programs are kept by the instruction set that they need."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from podrun.compiler import cache as digests
from podrun.device.xla import kept_pieces, pieces
from podrun.device.xla.clients import instruction_set, processor_name
from podrun.device.xla.pieces import PieceCache
from tests.copies import run_copied

from .test_clients import SMALL, operands, piece

AVX2 = """processor : 0
vendor_id : AuthenticAMD
cpu family : 25
model : 1
flags : fpu sse sse4_2 avx avx2 fma f16c bmi1 bmi2 ibrs

processor : 1
flags : fpu
"""
AVX512 = AVX2.replace("bmi2", "bmi2 avx512f avx512bw avx512dq avx512vl")


@pytest.mark.parametrize(
    ("cpuinfo", "environ", "level"),
    [
        (AVX2, {}, "avx2"),
        (AVX512, {}, "avx512"),
        (AVX512, {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}, "avx2"),
        (AVX512, {"XLA_FLAGS": "--a=b --xla_cpu_max_isa=AVX2 --xla_cpu_max_isa=sse4_2"}, "sse4_2"),
        (AVX2, {"XLA_FLAGS": "--xla_cpu_max_isa=AVX512"}, "avx2"),
        (AVX2, {"XLA_FLAGS": "--xla_cpu_max_isa=AVX"}, "avx"),
        ("", {}, "plain"),
        ("processor : 0\nFeatures : fp asimd\nCPU part : 0xd40\n", {}, "plain"),
    ],
)
def test_a_name_says_the_widest_instructions(cpuinfo, environ, level):
    assert processor_name(cpuinfo, environ).split("-")[0] == level


def test_processors_and_limits_that_give_other_code_have_other_names():
    vnni = AVX512.replace("avx512f", "avx512f avx512_vnni")
    other_model = AVX2.replace("model : 1", "model : 17")
    names = [processor_name(text, {}) for text in (AVX2, AVX512, vnni, other_model)]
    names += [processor_name(AVX512, {name: "AVX2"}) for name in ("ONEDNN_MAX_CPU_ISA",)]
    names += [processor_name(AVX512, {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"})]
    assert len(set(names)) == len(names)
    assert processor_name(AVX2.replace(" ibrs", ""), {"XLA_FLAGS": "--xla_other=1"}) == processor_name(
        AVX2, {}
    )
    older, newer = {"DNNL_MAX_CPU_ISA": "avx2"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert processor_name(AVX512, older) == processor_name(AVX512, newer)


def test_the_digest_of_a_program_and_a_pieces_key_name_it(monkeypatch):
    from tests.compiler.test_cache import mlp

    def both() -> tuple[str, str]:
        computation = pieces.Computation("piece", b"text", (), ())
        digest = digests.executable_digest(mlp(), "gc200", digests.CompileOptions(), [])
        return digest, pieces._key(computation, (), {})

    here = both()
    for module in (digests, pieces):
        monkeypatch.setattr(module, "instruction_set", lambda: "avx512-of another")
    there = both()
    assert all(a != b for a, b in zip(here, there, strict=True))


def test_xlas_cache_has_other_names_for_another_processor(tmp_path, monkeypatch):
    """Its keys tell flags apart, but no processors: here two processors have the same flags."""
    asked = []
    compile_or_get_cached = jax._src.compiler.compile_or_get_cached

    def recorded(backend, module, *arguments, **options):
        asked.append(str(module.operation.attributes["sym_name"]))
        return compile_or_get_cached(backend, module, *arguments, **options)

    monkeypatch.setattr(jax._src.compiler, "compile_or_get_cached", recorded)
    a, b = operands(SMALL)
    for name in (instruction_set(), "avx512-another"):
        for module in (pieces, kept_pieces):
            monkeypatch.setattr(module, "instruction_set", lambda name=name: name)
        np.testing.assert_array_equal(piece(SMALL, PieceCache(tmp_path)).call(a, b)[1], b * 2)
    assert len(asked) == len(set(asked)) == 2
    assert all(name in text for name, text in zip((instruction_set(), "avx512-another"), asked, strict=True))
    assert {place.name for place in (tmp_path / "xla").iterdir()} == {instruction_set(), "avx512-another"}


def compute(directory: str) -> None:
    """The work of a child process: compute a piece, keep it, check it, and say how many pieces were in the cache."""
    kept: list[bool] = []
    ready = PieceCache._ready

    def noted(self, *arguments):
        made = ready(self, *arguments)
        kept.append(made is not None)
        return made

    PieceCache._ready = noted
    a, b = operands(SMALL)
    sums, twice = piece(SMALL, PieceCache(Path(directory))).call(a, b)
    np.testing.assert_allclose(sums, (a.astype(np.float64).T @ b).sum(0), rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(twice, b * 2)
    print(kept.count(True), instruction_set().split("-")[0])


@pytest.mark.system
def test_code_for_one_instruction_set_is_not_used_under_another(tmp_path):
    """XLA reads its flags once a process. Both ways round, and again: what was compiled for it is found."""
    wide = processor_name(Path("/proc/cpuinfo").read_text(encoding="utf-8"), {}).split("-")[0]
    code = "import sys\nfrom tests.device import test_instruction_set as t\nt.compute(sys.argv[1])"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

    def child(flags: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return run_copied(code, [str(tmp_path)], env=environment | flags, timeout=120)

    assert "Unknown flag" in child({"XLA_FLAGS": "--xla_no_flag=1"}).stderr, (
        "children do not read their flags"
    )
    said = []
    for limit in (None, "SSE4_2", None, "SSE4_2"):
        done = child({} if limit is None else {"XLA_FLAGS": f"--xla_cpu_max_isa={limit}"})
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert said == [["0", wide], ["0", "sse4_2"], ["1", wide], ["1", "sse4_2"]]
