"""The private names of JAX and jaxlib that podrun uses are there, do what they are used for, and have a fallback."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.compiler.export import PieceFunction, export_piece
from podrun.core.executable import Computation
from podrun.device.xla import convolutions
from podrun.device.xla import pieces as device_pieces
from podrun.private_apis import jax as private
from podrun.private_apis import jax_exports

PACKAGE = Path(private.__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def _one_context_of_programs() -> Iterator[None]:
    """JAX as it comes, other than in other files: contexts of its own, and source lines."""
    with private._setting("traceback_in_locations_limit", 100):
        yield


def scoped(x: Any) -> Any:
    with jax.named_scope("ipu:1"):
        y = jnp.sin(x) * 2
    return y + jax.nn.relu(y)


def test_jax_has_every_private_name_that_podrun_uses() -> None:
    assert [use.name for use in private.missing_jax_names()] == []


@pytest.mark.parametrize("use", private.USES, ids=lambda use: use.name)
def test_a_missing_name_is_reported(use: private.PrivateUse, monkeypatch: pytest.MonkeyPatch) -> None:
    find = private.find_name
    monkeypatch.setattr(private, "find_name", lambda name: None if name == use.name else find(name))
    assert private.missing_jax_names() == [use]
    with pytest.raises(ImportError, match=f"no {re.escape(use.name)}, which podrun needs for"):
        private._need(use.name)


def test_jax_looks_for_plugins_of_gpus_among_packages_unless_told_not_to() -> None:
    source = inspect.getsource(importlib.import_module("jax._src.numpy.array_constructors"))
    assert re.search(
        r"^  from importlib\.metadata import distributions\n  for dist in distributions\(\):$",
        source,
        re.MULTILINE,
    ), "JAX looks in another way: see without_gpu_plugins"
    with private.without_gpu_plugins():
        from importlib.metadata import distributions

        assert list(distributions()) == []
    from importlib.metadata import distributions

    assert any(package.name == "jax" for package in distributions())


def test_no_other_module_touches_private_names() -> None:
    private_names = re.compile(
        r"jax\._src|jaxlib\.(mlir|xla_client)|ray\._(private|raylet)|torch\._[A-Za-z]|torch\.utils\._|_private\.worker"
    )
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent.name != "private_apis"
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if private_names.search(line)
    ]
    assert found == []


def convolution() -> Computation:
    """A piece with a convolution that is large enough for oneDNN."""

    def forward(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))

    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((4, 64, 32, 32), (64, 64, 3, 3))]
    data = jax.export.export(jax.jit(forward), platforms=("cpu",))(*shapes).serialize()
    return Computation("forward", bytes(data), ("x", "w"), ("y",))


@pytest.mark.parametrize("gone", ["", "jaxlib.mlir.ir.InsertionPoint"])
@pytest.mark.sample(2)
def test_an_unknown_jaxlib_says_once_that_convolutions_are_slower(
    gone: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if gone:
        find = private.find_name
        monkeypatch.setattr(private, "find_name", lambda name: None if name == gone else find(name))
    else:
        monkeypatch.setattr(private, "installed_version", lambda package: "0.99.1")
    convolutions._started.cache_clear()
    dice = np.random.default_rng(1)
    x, w = (dice.standard_normal(s, np.float32) for s in ((4, 64, 32, 32), (64, 64, 3, 3)))
    try:
        with caplog.at_level(logging.WARNING, "podrun"):
            slow = [device_pieces.PieceCache(None).piece(convolution(), ()).call(x, w)[0] for _ in range(2)]
        assert [record.getMessage() for record in caplog.records if "slower" in record.getMessage()] == [
            record.getMessage() for record in caplog.records
        ]
        assert len(caplog.records) == 1
        assert (gone or "0.99.1") in caplog.records[0].getMessage()
    finally:
        convolutions._started.cache_clear()
    monkeypatch.undo()
    fast = device_pieces.PieceCache(None).piece(convolution(), ()).call(x, w)[0]
    np.testing.assert_allclose(np.asarray(slow[0]), np.asarray(fast), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "jax._src.config.persistent_cache_min_compile_time_secs",
        "jax._src.lax.linalg.initialize_lapack",
        "jax._src.config.traceback_filtering",
        "jax._src.config.traceback_in_locations_limit",
    ],
)
def test_what_is_only_faster_or_plainer_has_a_fallback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = private.find_name
    monkeypatch.setattr(private, "find_name", lambda wanted: None if wanted == name else find(wanted))
    private.register_lapack()
    private.register_lapack_only_when_asked()
    with private.written_to_cache(), private.plain_errors(), private.one_context():
        assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0


def test_operands_that_a_result_replaces_are_found() -> None:
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    lowered = jax.jit(lambda g, w: [w - g], donate_argnums=(1,)).lower(shape, shape)
    assert private.aliased_outputs(lowered) == {1: 0}


def test_locations_go_and_the_function_stays() -> None:
    exported = jax.export.export(jax.jit(scoped))(jnp.ones(3))
    with jax_exports.without_locations():
        stripped = jax.export.export(jax.jit(scoped))(jnp.ones(3))
    assert b"test_jax.py" in exported.mlir_module_serialized
    assert b"test_jax.py" not in stripped.serialize()
    np.testing.assert_array_equal(stripped.call(jnp.ones(3)), exported.call(jnp.ones(3)))


def test_primitives_are_exported_by_other_formulas() -> None:
    assert jax_exports.takes_formulas()

    def run(x: jax.Array) -> jax.Array:
        return jax.jit(jnp.sin)(x) + 1

    shape = jax.ShapeDtypeStruct((3,), np.float32)
    exported = jax_exports.export_for_cpu(run, [shape], {jax.lax.sin_p: lambda x, **_: [x * 2]})
    np.testing.assert_array_equal(exported.call(jnp.arange(3.0)), [1.0, 3.0, 5.0])
    assert jax_exports.export_for_cpu(run, [shape], {}).call(jnp.zeros(3))[0] == 1.0


def test_programs_are_lowered_without_source_lines() -> None:
    with private.one_context():
        exported = jax.export.export(jax.jit(scoped))(jnp.ones(7))
    assert b"test_jax.py" not in exported.mlir_module_serialized
    assert b"ipu:1" in exported.mlir_module_serialized


def test_errors_inside_a_trace_come_out_plain() -> None:
    def fail(x: Any) -> Any:
        raise ValueError("mine")

    with private.plain_errors(), pytest.raises(ValueError, match="mine") as caught:
        jax.make_jaxpr(fail)(1.0)
    assert not hasattr(caught.value, "__notes__")


def test_pieces_that_share_a_context_are_the_same_to_the_byte() -> None:
    row = {"x": jax.ShapeDtypeStruct((8,), np.dtype("float32"))}
    pieces = [
        PieceFunction("scoped", lambda read: {"y": scoped(read["x"])}, row, ("y",)),
        PieceFunction("sum", lambda read: {"y": jnp.sum(read["x"] * 3)}, row, ("y",)),
    ]
    apart = [export_piece(piece) for piece in pieces]
    with private.one_context():
        from jax._src.interpreters import mlir

        shared = mlir.make_ir_context()
        with private.one_context():
            assert mlir.make_ir_context() is shared
            together = [export_piece(piece) for piece in pieces]
        assert mlir.make_ir_context() is shared
    assert together == apart
    assert mlir.make_ir_context() is not shared
    assert export_piece(pieces[1]) == apart[1]
