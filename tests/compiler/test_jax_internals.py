"""What podrun needs of JAX's internals does what it is used for (see
``podrun/compiler/jax_internals.py``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrun.compiler import jax_internals
from podrun.compiler.export.pieces import Piece, export_piece


def scoped(x: Any) -> Any:
    with jax.named_scope("ipu:1"):
        y = jnp.sin(x) * 2
    return y + jax.nn.relu(y)


def test_evaluate_keeps_scopes_and_applies_taps() -> None:
    closed = jax.make_jaxpr(scoped)(jnp.ones(3))
    first = closed.jaxpr.eqns[0].outvars[0]
    again = jax.make_jaxpr(
        lambda x: jax_internals.evaluate(closed.jaxpr, closed.consts, [x], {first: lambda v: v + 1})
    )
    scopes = {e.primitive.name: jax_internals.name_scopes(e) for e in again(jnp.ones(3)).jaxpr.eqns}
    assert scopes["sin"] == scopes["mul"] == ("ipu:1",)
    (found,) = jax_internals.evaluate(closed.jaxpr, closed.consts, [jnp.zeros(3)], {first: lambda v: v + 1})
    np.testing.assert_array_equal(found, np.full(3, 4.0))
    (plain,) = jax_internals.evaluate(closed.jaxpr, closed.consts, [jnp.zeros(3)])
    np.testing.assert_array_equal(plain, np.zeros(3))


def test_differentiation_keeps_scopes() -> None:
    closed = jax.make_jaxpr(jax.grad(lambda x: scoped(x).sum()))(jnp.ones(3))
    scopes = {part for e in closed.jaxpr.eqns for part in jax_internals.name_scopes(e)}
    assert {"jvp(ipu:1)", "transpose(jvp(ipu:1))"} <= scopes


def test_pruned_and_sub_jaxprs() -> None:
    table = np.arange(3, dtype=np.float32)

    def both(x: Any, y: Any) -> Any:
        return x + jnp.asarray(table), jnp.cos(y)

    closed = jax.make_jaxpr(both)(jnp.ones(3), jnp.ones(3))
    x, y = closed.jaxpr.invars
    part = jax_internals.sub_jaxpr(closed, [y], closed.jaxpr.eqns, closed.jaxpr.outvars[1:])
    assert [e.primitive.name for e in part.jaxpr.eqns] == ["cos"]
    assert jax_internals.read_arguments(part.jaxpr) >= {y}
    assert x not in jax_internals.read_arguments(part.jaxpr)
    np.testing.assert_allclose(jax_internals.evaluate(part.jaxpr, part.consts, [jnp.zeros(3)])[0], 1)


def test_locations_go_and_the_function_stays() -> None:
    exported = jax.export.export(jax.jit(scoped))(jnp.ones(3))
    stripped = jax_internals.without_locations(exported)
    assert b"test_jax_internals" in exported.mlir_module_serialized
    assert b"test_jax_internals" not in stripped.serialize()
    np.testing.assert_array_equal(stripped.call(jnp.ones(3)), exported.call(jnp.ones(3)))


def test_errors_inside_a_trace_come_out_plain() -> None:
    def fail(x: Any) -> Any:
        raise ValueError("mine")

    with jax_internals.plain_errors(), pytest.raises(ValueError, match="mine") as caught:
        jax.make_jaxpr(fail)(1.0)
    assert not hasattr(caught.value, "__notes__")


def test_pieces_that_share_a_context_are_the_same_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = jax_internals._make_context

    def counted() -> Any:
        made.append(1)
        return make()

    monkeypatch.setattr(jax_internals, "_make_context", counted)
    monkeypatch.setattr(jax_internals.mlir, "make_ir_context", jax_internals._context_of_thread)
    row = {"x": jax.ShapeDtypeStruct((8,), np.dtype("float32"))}
    pieces = [
        Piece("scoped", lambda read: {"y": scoped(read["x"])}, row, ("y",)),
        Piece("sum", lambda read: {"y": jnp.sum(read["x"] * 3)}, row, ("y",)),
    ]
    apart = [export_piece(piece) for piece in pieces]
    before = len(made)
    with jax_internals.one_context():
        with jax_internals.one_context():
            together = [export_piece(piece) for piece in pieces]
        assert export_piece(pieces[0]) == apart[0]
    assert together == apart
    assert len(made) == before + 1
    assert before > 2
    assert export_piece(pieces[1]) == apart[1]
    assert len(made) > before + 1
