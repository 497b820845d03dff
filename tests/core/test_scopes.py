"""The parser of scopes: places, layers, operators, and what JAX's transformations put around them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from podrun.core.names import (
    LOCAL,
    ScopeOperator,
    is_local,
    operator_scopes,
    parse_scope,
    place_scopes,
    recomputing,
    unwrapped,
    without_cuts,
)


def test_places_are_read_through_transformations() -> None:
    scope = parse_scope("transpose(jvp(ipu:1))/transpose(jvp(stage:3))/cut:2/dense/MatMul:0")
    assert (scope.ipu, scope.stage, scope.cut) == (1, 3, 2)
    assert scope.backward
    assert not scope.recomputed


def test_the_innermost_place_counts() -> None:
    assert parse_scope("ipu:0/outer/ipu:3/inner").ipu == 3


def test_a_name_that_contains_a_place_is_no_place() -> None:
    assert parse_scope("my-ipu:3/x").ipu is None


@pytest.mark.parametrize(
    ("text", "layer"),
    [
        ("jvp(conv1/Conv:0)", "conv1/Conv:0"),
        ("transpose(jvp(ipu:0/stage:0/a (b)))", "a (b)"),
        ("transpose(jvp(f(g(x)h)))", "f(g(x)h)"),
        ("ipu:1//encoder/layer/op:MatMul:0", "encoder/layer"),
        ("a)b", "a)b"),
        ("", "(no name)"),
    ],
)
def test_a_layer_keeps_its_own_name_only(text: str, layer: str) -> None:
    assert parse_scope(text).layer == layer


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        ("transpose(jvp(a/softmax/Softmax:0/2))", ScopeOperator("a/softmax/Softmax:0/2", "Softmax")),
        ("jvp(ipu:1/stage0/Conv:0)", ScopeOperator("ipu:1/stage0/Conv:0", "Conv")),
        ("encoder/op:MatMul:0/while/body", ScopeOperator("encoder/op:MatMul:0", "MatMul")),
        ("outer/op:Loop:0/Relu:0", ScopeOperator("outer/op:Loop:0/Relu:0", "Relu")),
        ("embedding/sum", None),
    ],
)
def test_the_innermost_operator_is_found(text: str, operator: ScopeOperator | None) -> None:
    assert parse_scope(text).operator == operator


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("jvp(ipu:1)/MatMul:0", "MatMul:0"),
        ("transpose(jvp(MatMul:0))", "MatMul:0"),
        ("jvp(MatMul:0/1)", None),
        ("jvp(ipu:1)/outer/op:Loop:0/inner/op:Relu:0", "outer"),
        ("outer/while/body/Relu:0", "outer"),
        ("ipu:0//exported/Conv/op:Conv:0", "/exported/Conv"),
        ("jvp(dense (1)/op:Gemm:0)", "dense (1)"),
        ("", None),
    ],
)
def test_an_operator_encloses_what_its_name_begins(text: str, label: str | None) -> None:
    assert parse_scope(text).within(frozenset({"MatMul:0", "outer", "/exported/Conv", "dense (1)"})) == label


@pytest.mark.parametrize(
    "label", ["MatMul:0", "layer/MatMul:0", "MatMul:0/1", "encoder", "a/5", "op:MatMul:0", "7"]
)
@pytest.mark.parametrize("places", [(), (2, 1), (2, 1, 0)])
def test_what_is_written_is_read(label: str, places: Sequence[int]) -> None:
    """Through a real trace: operators under their scopes, differentiated."""

    def loss(x: jax.Array) -> jax.Array:
        with jax.named_scope("/".join((*place_scopes(*places), *operator_scopes(label, "MatMul")))):
            return jnp.sin(x)

    equations = jax.make_jaxpr(jax.grad(loss))(1.0).jaxpr.eqns
    scopes = [parse_scope(str(equation.source_info.name_stack)) for equation in equations]
    expected = (tuple(places) + (None,) * 3)[:3]
    assert {(s.ipu, s.stage, s.cut) for s in scopes} == {expected}
    assert {s.operator.kind for s in scopes if s.operator is not None} == {"MatMul"}
    assert all(s.operator is not None for s in scopes)
    assert {s.backward for s in scopes} == {False, True}
    assert {s.within(frozenset({label})) for s in scopes if label != "op:MatMul:0"} <= {label}


def test_a_recomputed_equation_is_backward_work_of_its_layer() -> None:
    scope = parse_scope(recomputing("jvp(ipu:1)/dense"))
    assert (scope.backward, scope.recomputed, scope.ipu, scope.layer) == (True, True, 1, "dense")


def test_cuts_are_taken_out_of_texts() -> None:
    assert without_cuts("jvp(ipu:1)/cut:3/dense") == "jvp(ipu:1)/dense"


def test_only_forward_work_is_local() -> None:
    assert is_local(LOCAL)
    assert is_local(f"vmap(jvp({LOCAL}))")
    assert not is_local(f"transpose(jvp({LOCAL}))")
    assert not is_local("other")


def test_parentheses_of_names_stay() -> None:
    assert unwrapped("transpose(jvp(a(b)))/c)") == "a(b)/c)"
