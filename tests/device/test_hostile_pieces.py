"""Executables are data: what a piece may call is a list, and bytes that end a reader end only a child's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from podrun.core import executable_file
from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import Computation, Copy, Executable, Instruction, Receive, Send
from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest
from podrun.device.host.client import InProcessMachines
from podrun.device.program.check import check_executable
from podrun.device.xla import vetting
from podrun.device.xla.custom_calls import SIGNATURES, RefusedPiece, mismatch
from podrun.device.xla.pieces import PieceCache
from podrun.device.xla.vetting import Vetter
from tests.copies import CopiedProcess
from tests.device.programs import linear


def piece(
    function: Callable[..., Any], *shapes: tuple[int, ...], unsafe: tuple[str, ...] = ()
) -> Computation:
    """A piece of float32 that is not this user's own."""
    kinds = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in unsafe]
    flat = jax.jit(lambda *x: jax.tree.leaves(function(*x)))
    made = export.export(flat, platforms=("cpu",), disabled_checks=checks)(*kinds)
    inputs = tuple(f"i{n}" for n in range(len(shapes)))
    outputs = tuple(f"o{n}" for n in range(len(made.out_avals)))
    return Computation("odd", bytes(made.serialize()), inputs, outputs)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every piece counts as this user's own: no child reads it first."""
    monkeypatch.setattr(executable_file, "is_own", lambda stablehlo: True)
    return iter(())


def refusal(computation: Computation) -> str:
    with pytest.raises(RefusedPiece) as caught:
        PieceCache(None).piece(computation, ())
    return caught.value.message


def lapack(results: tuple[tuple[int, ...], ...], types: tuple[Any, ...], **attributes: Any) -> Any:
    kinds = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in zip(results, types, strict=True)]
    return lambda x: jax.ffi.ffi_call("lapack_spotrf_ffi", kinds)(x, **attributes)


def test_what_jax_exports_is_taken(known: None) -> None:
    x = np.float32([[4, 2], [2, 3]])
    made = PieceCache(None).piece(piece(jnp.linalg.cholesky, (2, 2)), ())
    np.testing.assert_allclose(made.call(x)[0], np.linalg.cholesky(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("results", "types", "uplo"),
    [
        (((1,), ()), (np.float32, np.int32), 76),  # 4 MB go into 4 bytes
        (((1000, 1000), (7,)), (np.float32, np.int32), 76),
        (((1000, 1000), ()), (np.float32, np.float32), 76),
        (((1000, 1000), ()), (np.float32, np.int32), 77),
        (((1000, 1000),), (np.float32,), 76),
    ],
)
def test_a_call_with_other_shapes_is_refused_before_it_is_compiled(
    known: None, results: Any, types: Any, uplo: int
) -> None:
    odd = piece(lapack(results, types, uplo=np.uint8(uplo)), (1000, 1000))
    assert "calls 'lapack_spotrf_ffi' with" in refusal(odd)


def test_a_function_that_is_not_listed_is_refused_by_name(known: None) -> None:
    kind = jax.ShapeDtypeStruct((4,), jnp.float32)
    odd = piece(
        lambda x: jax.ffi.ffi_call("xla_ffi_python_cpu_callback", kind)(x, index=np.uint64(1)),
        (4,),
        unsafe=("xla_ffi_python_cpu_callback",),
    )
    assert "the native function 'xla_ffi_python_cpu_callback'" in refusal(odd)


GOOD: dict[
    str, tuple[list[tuple[str, tuple[int, ...]]], list[tuple[str, tuple[int, ...]]], dict[str, int]]
] = {
    "gesdd": (
        [("f32", (5, 4))],
        [("f32", (5, 4)), ("f32", (4,)), ("f32", (5, 4)), ("f32", (4, 4)), ("i32", ())],
        {"mode": 83},
    ),
    "trsm": (
        [("f32", (2, 4, 4)), ("f32", (2, 3, 4))],
        [("f32", (2, 3, 4))],
        {"diag": 78, "side": 82, "trans_x": 78, "uplo": 85},
    ),
    "orgqr": ([("f32", (5, 4)), ("f32", (3,))], [("f32", (5, 4))], {}),
    "gehrd": ([("f32", (4, 4))], [("f32", (4, 4)), ("f32", (3,)), ("i32", ())], {"low": 1, "high": 4}),
}


@pytest.mark.parametrize("function", GOOD)
def test_every_size_type_and_attribute_of_a_call_counts(function: str) -> None:
    signature = next(s for (_, name), s in SIGNATURES.items() if name == function)
    operands, results, attributes = GOOD[function]
    assert mismatch(signature, "s", operands, results, attributes) == ""
    assert mismatch(signature, "d", operands, results, attributes)
    for tensors in (operands, results):
        for at, (kind, shape) in enumerate(tensors):
            for change in [("f16", shape), (kind, (*shape, 1)), *((kind, c) for c in _other(shape))]:
                before, tensors[at] = tensors[at], change
                assert mismatch(signature, "s", operands, results, attributes), (at, change)
                tensors[at] = before
    for name in attributes:
        assert mismatch(signature, "s", operands, results, {**attributes, name: 500})
        assert mismatch(signature, "s", operands, results, {**attributes, name: -1})
    assert mismatch(signature, "s", operands, results, {**attributes, "more": 1})


def _other(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for at, size in enumerate(shape):
        for other in (size + 3, -1):
            yield (*shape[:at], other, *shape[at + 1 :])


def test_a_piece_of_somebody_else_is_read_by_a_child_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Spy:
        def check(self, computation: Computation, donated: Any, in_place: Any) -> None:
            asked.append(computation.name)
            executable_file.remember(computation.stablehlo)

    monkeypatch.setattr("podrun.device.xla.pieces.vetter", lambda directory: Spy())
    odd = piece(lambda x: x * 1.2345, (3,))
    for _ in range(2):
        PieceCache(None).piece(odd, ())
    assert asked == ["odd"]


def deep(levels: int) -> Callable[..., Any]:
    def inside(x: Any, left: int) -> Any:
        return jax.lax.cond(x[0] > left, lambda y: inside(y, left - 1), lambda y: y, x) if left else x + 1

    return lambda x: inside(x, levels)


@pytest.mark.system
def test_the_child_refuses_and_dies_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vetter = Vetter(tmp_path)
    try:
        good = piece(lambda x: x * 7.5, (3,))
        vetter.check(good, (), {})
        assert executable_file.is_own(good.stablehlo)
        with pytest.raises(RefusedPiece, match=r"no StableHLO that can be read|cannot be compiled"):
            vetter.check(Computation("odd", b"x" * 100, (), ()), (), {})
        with pytest.raises(RefusedPiece, match="nested"):
            vetter.check(piece(deep(66), (3,)), (), {})
        child = vetter._child
        assert child is not None
        child.kill()
        child.wait(60)
        monkeypatch.setattr(
            vetter, "_start", lambda: _started("import os; os.read(0, 9); os.kill(os.getpid(), 11)")
        )
        with pytest.raises(RefusedPiece, match=r"ends the process that reads it \(SIGSEGV\)"):
            vetter.check(piece(lambda x: x * 8.5, (3,)), (), {})
        monkeypatch.setattr(vetter, "_start", lambda: _started("import time; time.sleep(60)"))
        vetter._patience = 0.2
        with pytest.raises(RefusedPiece, match="takes too long"):
            vetter.check(piece(lambda x: x * 9.5, (3,)), (), {})
    finally:
        vetter.close()


def _started(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.system
def test_the_child_ends_with_its_parent_while_it_compiles() -> None:
    child = _started(
        "import sys, threading; from podrun.device.xla import vetting_child; sys.argv = ['child', '']; "
        "vetting_child._verdict = lambda pieces, header, piece: threading.Event().wait(); "
        "vetting_child.answer_requests()"
    )
    assert child.stdin is not None
    child.stdin.write(vetting.LENGTHS.pack(2, 1) + b"{}x")
    try:
        child.stdin.close()
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait(60)


def test_a_piece_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vetting, "LONGEST", 10)
    with pytest.raises(RefusedPiece, match="has 11 bytes; machines take 10"):
        Vetter(None).check(Computation("odd", b"x" * 11, (), ()), (), {})


@pytest.mark.system
@pytest.mark.parametrize(
    ("first", "stop"),
    [(0, 6), *(pytest.param(n, n + 500, marks=pytest.mark.slow) for n in range(0, 10_000, 500))],
)
def test_damaged_executables_with_right_checksums_end_no_process(
    tmp_path: Path, first: int, stop: int
) -> None:
    with (tmp_path / "err").open("w") as err:
        child = CopiedProcess(
            "from tests.device.hostile_executables import main; main()", [str(first), str(stop)], err=err
        )
    try:
        assert child.wait(1800) == 0, (tmp_path / "err").read_text()[-3000:]
        counts = json.loads(child.stdout.read().splitlines()[-1])
    finally:
        child.kill()
        child.communicate(60)
    assert sum(counts.values()) == stop - first
    assert counts.keys() <= {
        "ran",
        "ConfigError",
        "RefusedPiece",
        "ApplicationRuntimeError",
        "another layout",
    }


def _with_instructions(change: Callable[[list[Instruction]], None]) -> Executable:
    base = linear(2)
    work = list(base.instructions[0])
    change(work)
    return replace(base, instructions=(tuple(work), *base.instructions[1:]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda work: work.insert(0, Copy("nothing", "x")), "instruction 0 of IPU 0 copies 'nothing'"),
        (lambda work: work.insert(0, Send("nothing", 0, 7)), "instruction 0 of IPU 0 reads 'nothing'"),
        (lambda work: work.insert(0, Send("arena:none", 0, 7)), "instruction 0 of IPU 0 names no arena"),
        (lambda work: work.insert(0, Receive("x", 0, 7)), "IPUs 0 of a replica wait for each other"),
    ],
)
def test_programs_that_would_fail_in_the_middle_are_refused_when_they_are_loaded(
    change: Callable[[list[Instruction]], None], said: str
) -> None:
    check_executable(linear(2))
    with pytest.raises(ApplicationRuntimeError, match=said):
        check_executable(_with_instructions(change))


def test_pieces_that_do_not_fit_their_buffers_are_refused_when_a_program_is_loaded() -> None:
    base = linear(2)
    small = replace(base.arenas["gradients"], size=base.arenas["gradients"].size * 2)
    machines = InProcessMachines(2, PieceCache(None), grace=0.1)
    connection = machines.connect(threaded=False)
    try:
        everything = IpuRange(0, 2)
        assert connection.try_attach(AttachRequest(everything, everything, 1, "u", "c")) is None
        wrong = replace(base, arenas={**base.arenas, "gradients": small})
        with pytest.raises(
            ApplicationRuntimeError, match="of float32 for 'arena_slice:gradients', which has"
        ):
            connection.load(wrong)
        connection.load(base)
    finally:
        connection.close()


def test_names_are_counted_for_a_piece_that_is_known_already_too(known: None) -> None:
    made, pieces = piece(lambda x, y: x + y, (3,), (3,)), PieceCache(None)
    pieces.piece(made, ())
    with pytest.raises(
        ApplicationRuntimeError, match="names 1 inputs and 1 outputs, but its StableHLO has 2 and 1"
    ):
        pieces.piece(replace(made, inputs=made.inputs[:1]), ())
