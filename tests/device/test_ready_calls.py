"""A compiled piece with a note beside it is called without being lowered again, with the same bits."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.compiler.export import PieceFunction, export_piece
from podrun.core.executable import Computation
from podrun.device.xla import clients, kept_pieces, pieces, ready_calls
from podrun.device.xla.clients import one_thread_device, two_thread_device
from podrun.device.xla.pieces import Piece, PieceCache
from podrun.private_apis import find_name, xla_executables
from podrun.private_apis import jax as private_jax

pytestmark = pytest.mark.usefixtures("no_cache_of_jax")
KINDS = {
    "x": ((256, 256), "float32"),
    "half": ((3, 5), "float16"),
    "wide": ((2,), "int64"),
    "one": ((), "bfloat16"),
}


def mixed(buffers: Any) -> dict[str, Any]:
    """A product that is large enough for oneDNN, and results of other types and shapes."""
    x = buffers["x"]
    return {
        "product": jnp.dot(x, x + 1),
        "half": buffers["half"] * jnp.float16(0.3),
        "wide": buffers["wide"] + 2**40,
        "one": buffers["one"].reshape(1),
    }


@functools.cache
def computation(function: Callable[[Any], dict[str, Any]] = mixed, *names: str) -> Computation:
    specs = {n: jax.ShapeDtypeStruct(*KINDS[n]) for n in names or KINDS}
    with jax.enable_x64(True):
        outputs = tuple(jax.eval_shape(function, specs))
        return export_piece(PieceFunction("mixed", function, specs, outputs))


def operands(piece: Piece) -> list[Any]:
    random = np.random.default_rng(7)
    kinds = piece.kinds[: len(piece.shapes)]
    arrays = [
        (random.normal(size=shape) * 4).astype(dtype)
        for shape, (_, dtype) in zip(piece.shapes, kinds, strict=True)
    ]
    with jax.enable_x64(True):
        return [jax.device_put(a, one_thread_device()) for a in arrays]


def results(piece: Piece) -> list[tuple[str, tuple[int, ...], bytes]]:
    with jax.enable_x64(True):
        # The second call is JAX's fast one.
        given = [np.asarray(r) for _ in range(2) for r in piece.call(*operands(piece))]
    return [(r.dtype.name, r.shape, r.tobytes()) for r in given]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of pieces that are lowered from now on."""
    names: list[str] = []
    lower = pieces._lower

    def noted(key: str, what: Computation, *rest: Any) -> Any:
        names.append(what.name)
        return lower(key, what, *rest)

    monkeypatch.setattr(pieces, "_lower", noted)
    return names


@pytest.mark.parametrize("threads", [1, 2])
def test_the_next_process_calls_it_at_once(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    if threads == 2:
        monkeypatch.setattr(clients, "WORTH_READING_TOGETHER", 1)
    what = computation()
    first = PieceCache(tmp_path).piece(what, ())
    assert lowered == ["mixed"]
    again = PieceCache(tmp_path).piece(what, ())
    assert lowered == ["mixed"]
    assert again.device == first.device == (two_thread_device() if threads == 2 else one_thread_device())
    assert (again.kinds, again.placed, again.in_place) == (first.kinds, first.placed, first.in_place)
    assert [*again.shapes] == [*first.shapes]
    assert results(again) == results(first)


def test_operands_are_written_over_as_before(tmp_path: Path, lowered: list[str]) -> None:
    def adds(buffers: Any) -> dict[str, Any]:
        return {"x": buffers["x"] + 1}

    what = computation(adds, "x")
    addresses = []
    for _ in range(2):
        piece = PieceCache(tmp_path).piece(what, (), {0: 0})
        assert piece.in_place == {0: 0}
        # Memory of XLA's own, which it may write: the sum of two arrays.
        with jax.default_device(one_thread_device()):
            (x,) = (jnp.add(o, o).block_until_ready() for o in operands(piece))
        before = x.unsafe_buffer_pointer()
        (result,) = piece.call(x)
        addresses.append(result.unsafe_buffer_pointer() == before)
        assert x.is_deleted()
    assert addresses == [True, True]
    assert lowered == ["mixed"]


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["*.call", "*-cache"])
def test_a_damaged_file_is_not_used(file: str, tmp_path: Path, lowered: list[str]) -> None:
    what = computation()
    right = results(PieceCache(tmp_path).piece(what, ()))
    for path in (tmp_path / "xla").rglob(file):
        spoil(path)
    assert results(PieceCache(tmp_path).piece(what, ())) == right
    assert lowered == ["mixed", "mixed"]
    assert results(PieceCache(tmp_path).piece(what, ())) == right
    assert lowered == ["mixed", "mixed"]  # It was repaired.


@pytest.mark.parametrize("damage", ["", "*.code", "*-cache"])
def test_a_large_one_is_read_from_a_file_with_less(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    monkeypatch.setattr(xla_executables, "WORTH_REDUCING", 0)
    what = computation()
    right = results(PieceCache(tmp_path).piece(what, ()))
    ((code,), (entry,)) = ([*tmp_path.rglob(pattern)] for pattern in ("*.code", "*-cache"))
    assert code.stat().st_size < entry.stat().st_size
    if damage:
        spoil(code if damage == "*.code" else entry)
    assert results(PieceCache(tmp_path).piece(what, ())) == right
    assert lowered == ["mixed"] * (2 if damage == "*.code" else 1)
    assert results(PieceCache(tmp_path).piece(what, ())) == right
    assert lowered == ["mixed"] * (2 if damage == "*.code" else 1)  # It was repaired.


@pytest.mark.parametrize("size", [0, 40, 1000])
def test_what_a_full_disk_cut_off_is_written_again(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    compile_whole = pieces._compile

    def cut_off(*what: Any) -> Any:
        call = compile_whole(*what)
        for path in tmp_path.rglob("*-cache"):
            path.write_bytes(path.read_bytes()[:size])
        return call

    what = computation()
    with monkeypatch.context() as full:
        full.setattr(pieces, "_compile", cut_off)
        right = results(PieceCache(tmp_path).piece(what, ()))
    assert not [*tmp_path.rglob("*-cache"), *tmp_path.rglob("*.call")]
    for _ in range(2):
        assert results(PieceCache(tmp_path).piece(what, ())) == right
    assert lowered == ["mixed", "mixed"]


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_a_part_that_a_marker_calls_whole_is_written_again(tmp_path: Path, lowered: list[str]) -> None:
    """As the versions did that wrote such markers."""
    what = computation()
    right = results(PieceCache(tmp_path).piece(what, ()))
    ((note,), (entry,), (marker,)) = ([*tmp_path.rglob(p)] for p in ("*.call", "*-cache", "*.done"))
    note.unlink()
    entry.write_bytes(entry.read_bytes()[:1000])
    marker.write_text(json.dumps({entry.name: hashlib.sha256(entry.read_bytes()).hexdigest()}))
    for _ in range(3):
        assert results(PieceCache(tmp_path).piece(what, ())) == right
    assert lowered == ["mixed"] * 3


def test_machines_that_compiled_together_reduce_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    reduced = []
    monkeypatch.setattr(kept_pieces, "reduced_entry", lambda code: reduced.append(code))
    what, ready = computation(), kept_pieces.KeptPieces.ready
    PieceCache(tmp_path).piece(what, ())
    second = PieceCache(tmp_path)
    monkeypatch.setattr(second, "_ready", lambda *_: None)  # The first was not done yet.
    second.piece(what, ())
    assert lowered == ["mixed", "mixed"]
    assert len(reduced) == 1
    assert ready(second._kept, next(iter(second._pieces))) is not None


def test_code_that_jaxlib_refuses_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    what = computation()
    with monkeypatch.context() as patched:
        patched.setattr(
            kept_pieces,
            "reduced_entry",
            lambda _: find_name("jax._src.compilation_cache.compress_executable")(b"no executable"),
        )
        PieceCache(tmp_path).piece(what, ())
        assert [*tmp_path.rglob("*.code")]
        for _ in range(2):
            PieceCache(tmp_path).piece(what, ())
    assert lowered == ["mixed", "mixed"]
    assert not [*tmp_path.rglob("*.code")]


def test_code_of_another_podrun_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_executables, "WORTH_REDUCING", 0)
    what = computation()
    PieceCache(tmp_path).piece(what, ())
    monkeypatch.setattr(ready_calls, "CODE", "f" * 64)
    PieceCache(tmp_path).piece(what, ())
    assert [len([*tmp_path.rglob(pattern)]) for pattern in ("*.call", "*.code")] == [1, 1]


def test_another_podrun_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    what = computation()
    PieceCache(tmp_path).piece(what, ())
    other = "f" * 64
    monkeypatch.setattr(ready_calls, "CODE", other)
    PieceCache(tmp_path).piece(what, ())
    assert lowered == ["mixed", "mixed"]


def test_entries_of_another_podrun_beside_it_do_not_matter(tmp_path: Path, lowered: list[str]) -> None:
    what = computation()
    right = results(PieceCache(tmp_path).piece(what, ()))
    ((note,), (entry,)) = ([*tmp_path.rglob(pattern)] for pattern in ("*.call", "*-cache"))
    entry.with_name(entry.name.replace("-cache", "0-cache")).write_bytes(b"another text's code")
    note.unlink()
    assert results(PieceCache(tmp_path).piece(what, ())) == right  # XLA's cache has it.
    assert [*tmp_path.rglob("*.call")] == [note]
    assert results(PieceCache(tmp_path).piece(what, ())) == right
    assert lowered == ["mixed", "mixed"]


def test_the_digest_is_of_the_code_that_makes_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ready_calls.code_digest()
    assert usual == ready_calls.CODE
    read = Path.read_bytes
    here = Path(ready_calls.__file__).parent
    private = {
        f"podrun.private_apis.{path.stem}": path for path in (here.parents[1] / "private_apis").glob("*.py")
    }
    text = "".join(path.read_text() for path in here.glob("*.py"))
    imported = {path for name, path in private.items() if f"\nfrom {name} import" in text}
    assert {"jax.py", "jax_exports.py", "xla_executables.py"} <= {path.name for path in imported}
    for changed in (here / "rewrite.py", here / "matrix_products.py", *imported):
        monkeypatch.setattr(
            Path, "read_bytes", lambda path, changed=changed: read(path) + (b"#" if path == changed else b"")
        )
        assert ready_calls.code_digest() != usual, changed
    monkeypatch.setattr(Path, "read_bytes", read)
    monkeypatch.setattr(ready_calls, "installed_version", lambda _: "0.10.99")
    assert ready_calls.code_digest() != usual


def test_without_the_library_its_calls_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    if not pieces.available():
        pytest.skip("oneDNN is not there")
    what = computation()
    PieceCache(tmp_path).piece(what, ())
    monkeypatch.setattr(pieces, "available", lambda: False)
    PieceCache(tmp_path).piece(what, ())
    assert lowered == ["mixed", "mixed"]


def test_what_xla_computes_in_its_place_is_not_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    monkeypatch.setattr(pieces, "available", lambda: False)
    monkeypatch.setattr(pieces, "failed_to_load", lambda: True)
    what = computation()
    for _ in range(2):
        PieceCache(tmp_path).piece(what, ())
    assert lowered == ["mixed", "mixed"]
    assert not [*tmp_path.rglob("*.call")]


def test_custom_calls_are_looked_at_by_every_process(tmp_path: Path, lowered: list[str]) -> None:
    def factors(buffers: Any) -> dict[str, Any]:
        return {"factors": jnp.linalg.cholesky(jnp.eye(4) + buffers["x"][:4, :4] * 0)}

    what = computation(factors, "x")
    for _ in range(2):
        PieceCache(tmp_path).piece(what, ())
    assert lowered == ["mixed", "mixed"]
    assert not [*tmp_path.rglob("*.call")]


def test_a_piece_of_others_is_lowered_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    what = computation()
    PieceCache(tmp_path, vets=False).piece(what, ())
    monkeypatch.setattr(pieces.executable_file, "is_own", lambda _: False)
    PieceCache(tmp_path, vets=False).piece(what, ())
    assert lowered == ["mixed", "mixed"]


@pytest.mark.parametrize(
    "gone",
    [u.name for u in private_jax.USES if u.without == private_jax._LOAD and "_cache_read" not in u.name],
)
def test_a_jaxlib_without_a_private_name_lowers_it(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    what = computation()
    PieceCache(tmp_path).piece(what, ())
    monkeypatch.setattr(private_jax, "find_name", lambda name: None if name == gone else find_name(name))
    PieceCache(tmp_path).piece(what, ())
    assert lowered == ["mixed", "mixed"]


def test_a_jaxlib_that_takes_other_fields_lowers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lowered: list[str]
) -> None:
    what = computation()
    PieceCache(tmp_path).piece(what, ())
    monkeypatch.setattr(jax.stages, "Compiled", None)
    assert (
        private_jax.load_compiled(
            next(tmp_path.rglob("*-cache")).read_bytes(), "mixed", [], [], one_thread_device()
        )
        is None
    )
    assert lowered == ["mixed"]
