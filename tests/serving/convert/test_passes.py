"""Every pass on every model: the numbers stay those that onnxruntime computes of the original."""

from __future__ import annotations

import functools
import logging

import numpy as np
import onnx
import pytest

from podrun import onnx_backend
from podrun.core.errors import PodrunError, UnsupportedError, UsageError
from podrun.onnx_models.ops.registry import GRAPHCORE
from podrun.serving.convert.graph_walk import graphs_within
from podrun.serving.convert.pass_manager import (
    Pass,
    PassManager,
    get_registered_passes,
    register,
    rewrite,
    run_pass,
)
from podrun.serving.convert.reference_runs import run_onnxruntime
from podrun.serving.convert.report_passes import greatest_difference, made_up_inputs, own_operators
from podrun.serving.convert.structure_passes import adapted
from tests.serving.convert.models import MODELS, bert, branching, choosing, convolutional, experts, untidy

BOUNDS = {"float_to_half": 5e-3, "float_to_mixed": 2e-3, "float_to_fp8": 0.3, "replace_erf_with_erfv2": 1e-5}
"""Largest difference of passes that change numbers: halves have 11 bits, 8-bit floats 4."""
APART = ("model_overview", "model_io_info_stat", "layer_precision_compare", "insert_attention_mask")
"""Passes that print, write a file, or (the mask) change what padding gets: `test_packing_passes` has that one."""


@functools.cache
def expected(name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, np.ndarray]]:
    model = MODELS[name]()
    inputs = made_up_inputs(model)
    return model, inputs, run_onnxruntime(model, inputs)


def results(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    feed = adapted(inputs, model)
    if own_operators(model) or has_integer_onehot(model):
        return dict(
            zip([v.name for v in model.graph.output], onnx_backend.prepare(model).run(feed), strict=True)
        )
    return run_onnxruntime(model, feed)


def has_integer_onehot(model: onnx.ModelProto) -> bool:
    """onnxruntime lacks OneHot with 32-bit places."""
    return any(n.op_type == "OneHot" for g in graphs_within(model.graph) for n in g.node)


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for graph in graphs_within(model.graph) for node in graph.node]


def check_pass(name: str, label: str) -> bool:
    """Run a pass on a model and compare; returns whether the pass changed it."""
    model, inputs, right = expected(label)
    try:
        changed = run_pass(Pass.get_pass(name), copied(model))
    except PodrunError:
        assert name in (
            "const_batch_size",
            "eight_bits_io",
            "packed_transformer",
        )  # They refuse these models.
        return False
    if changed.SerializeToString() == model.SerializeToString():
        return False
    onnx.checker.check_model(changed)
    ours = results(changed, inputs)
    worst = max(greatest_difference(ours[key], value) for key, value in right.items())
    assert worst <= BOUNDS.get(name, 1e-5), f"{name} on {label}: {worst}"
    return True


FAST = ("untidy", "branching")


@pytest.mark.parametrize(
    "label", [n if n == "branching" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_passes_keep_the_numbers_of_a_model(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("poprt").setLevel(logging.ERROR)
    names = [name for name in get_registered_passes() if name not in APART]
    if label in FAST:  # Passes that put podrun's own operators in are compiled to be run: slow.
        names = [
            n for n in names if not n.endswith(("v2", "_pattern", "softmax", "remap", "workaround", "half"))
        ]
    changed = [name for name in names if check_pass(name, label)]
    assert len(changed) >= 5


@pytest.mark.parametrize(
    ("model", "name", "gone", "new"),
    [
        (bert, "erf_gelu_pattern", "Erf", "GeluErf"),
        (bert, "layer_norm_pattern", "Sqrt", "GroupNormalization"),
        (bert, "replace_erf_with_erfv2", "Erf", "ErfV2"),
        (experts, "gelu_pattern", "Tanh", "Gelu"),
        (experts, "replace_einsum_with_matmul", "Einsum", "MatMul"),
        (experts, "merge_multi_slice", "Slice", "Split"),
        (experts, "matmul_rotary_embedding", "Concat", "MatMul"),
        (convolutional, "fuse_bn_into_gemm", "", "Gemm"),
        (convolutional, "replace_gemm_with_matmul", "Gemm", "MatMul"),
        (convolutional, "replace_bn_with_mul_add", "", "Mul"),
        (choosing, "replace_hardswish", "HardSwish", "HardSigmoid"),
        (choosing, "replace_isinf", "IsInf", "Equal"),
        (choosing, "replace_round", "Round", "Floor"),
        (choosing, "replace_pow", "Pow", "Sqrt"),
        (choosing, "replace_softmax", "Softmax", "SoftmaxV2"),
        (choosing, "replace_where_with_wherev2", "Where", "WhereV2"),
        (choosing, "replace_greater_or_equal", "GreaterOrEqual", "Or"),
        (choosing, "replace_less_or_equal", "LessOrEqual", "Or"),
        (choosing, "compress_pattern", "Compress", "Gather"),
        (choosing, "replace_consecutive_cast_with_notzero", "", "Not"),
        (untidy, "eliminate_identity", "Dropout", "Exp"),
        (untidy, "eliminate_nop_pad", "Pad", "Exp"),
        (untidy, "constant_folding", "Concat", "Exp"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_pass_does_what_it_says(model, name, gone, new) -> None:  # type: ignore[no-untyped-def]
    before = model() if model is not bert else bert(layers=1)
    after = operators(run_pass(Pass.get_pass(name), copied(before)))
    if gone:
        assert gone in operators(before)
        assert gone not in after
    assert new in after


def test_branches_of_one_condition_and_its_opposite_become_one() -> None:
    once = run_pass(Pass.get_pass("merge_if_with_same_cond"), branching())
    assert operators(once).count("If") == 2
    assert operators(run_pass(Pass.get_pass("merge_variant_if"), once)).count("If") == 1
    assert "If" not in operators(run_pass(Pass.get_pass("expand_if"), branching()))


def test_clean_up_leaves_what_computes() -> None:
    clean = run_pass(Pass.get_pass("apply_ir_pass"), untidy())
    assert len(clean.graph.node) < 0.4 * len(untidy().graph.node)
    assert not {"Tanh", "Expand", "Pad", "Shape", "Dropout"} & set(operators(clean))


def test_named_products_are_merged_and_divided() -> None:
    model = bert(layers=1, hidden=16, heads=2, length=5)
    names = [n.name for n in model.graph.node if n.op_type == "MatMul"][:3]
    add = next(n.name for n in model.graph.node if n.op_type == "Add")
    pairs = [n for name in names for n in (name, add)]
    right = expected("bert")
    for merged in (
        Pass.get_pass("merge_matmul", merge_matmul=",".join(names)),
        Pass.get_pass("fused_attention"),
        Pass.get_pass("serialize_matmul", serialize_matmul={names[0]: "2/output_channels/True"}),
    ):
        changed = merged.run(copied(model))
        onnx.checker.check_model(changed)
        ours = results(changed, right[1])
        assert max(greatest_difference(ours[k], v) for k, v in right[2].items()) < 1e-5
    assert operators(Pass.get_pass("fused_attention").run(copied(model))).count("MatMul") == 7
    with pytest.raises(UsageError, match="does not add to"):
        Pass.get_pass("merge_matmul_add", merge_matmul_add=",".join(pairs[:4])).run(copied(model))
    with pytest.raises(UsageError, match="no node 'MatMul_x'"):
        Pass.get_pass("merge_matmul", merge_matmul="MatMul_x,MatMul_y").run(copied(model))


def test_experts_become_one_batch() -> None:
    model, inputs, right = expected("experts")
    ends = [n.name for n in model.graph.node if n.op_type in ("MatMul", "Relu")][:4]
    changed = Pass.get_pass("merge_moe", merge_moe=",".join(ends)).run(copied(model))
    assert operators(changed).count("Relu") == 1
    ours = results(changed, inputs)
    assert max(greatest_difference(ours[k], v) for k, v in right.items()) < 1e-5


def test_a_sum_is_divided() -> None:
    model, inputs, right = expected("bert")
    product = next(n for n in model.graph.node if n.op_type == "MatMul")
    add = next(n for n in model.graph.node if product.output[0] in n.input)
    made = Pass.get_pass("serialize_matmul_add", serialize_matmul_add={f"{product.name}/{add.name}": "4"})
    changed = made.run(copied(model))
    assert operators(changed).count("MatMul") == operators(model).count("MatMul") + 3
    ours = results(changed, inputs)
    assert max(greatest_difference(ours[k], v) for k, v in right.items()) < 1e-5
    with pytest.raises(UsageError, match="does not divide by 3"):
        Pass.get_pass("serialize_matmul_add", serialize_matmul_add={f"{product.name}/{add.name}": "3"}).run(
            model
        )


def test_passes_of_ones_own_are_ordered_by_their_constraints() -> None:
    ran: list[str] = []

    def one(name: str, **constraints: tuple[str, ...]) -> None:
        def run(self: Pass, model: onnx.ModelProto) -> onnx.ModelProto:
            ran.append(name)
            return model

        register(name)(type(name, (Pass,), {"run": run, **constraints}))

    one("test_last", depend=("test_first",))
    one("test_first")
    one("test_before", before=("test_first",))
    one("test_enemy", against=("test_last",))
    manager = PassManager(["test_last", "test_first", "test_before"])
    assert [p.pass_name for p in manager.sort_passes()] == ["test_before", "test_first", "test_last"]
    manager.run(untidy())
    assert ran == ["test_before", "test_first", "test_last"]
    manager.add_passes("test_enemy")
    with pytest.raises(UsageError, match="exclude each other"):
        manager.sort_passes()
    assert [p.pass_name for p in PassManager(["test_last"]).sort_passes()] == ["test_first", "test_last"]


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(UsageError, match="there is no pass 'eliminate_identiti'") as told:
        Pass.get_pass("eliminate_identiti")
    assert "eliminate_identity" in (told.value.hint or "")
    with pytest.raises(UsageError, match="'sort_graph'"):
        Pass.get_pass("sort_graph", depth=3)

    @rewrite("test_broken")
    def broken(graph: object) -> None:
        raise ZeroDivisionError("by nothing")

    with pytest.raises(
        UnsupportedError, match="pass 'test_broken' cannot change this model: ZeroDivisionError"
    ):
        run_pass(Pass.get_pass("test_broken"), untidy())
    with pytest.raises(PodrunError, match="no output 'z'; it has y"):
        Pass.get_pass("remove_outputs", remove_outputs=["z"]).run(untidy())


def test_attributes_that_popart_lacks_are_refused() -> None:
    model = convolutional()
    pool = next(node for node in model.graph.node if node.op_type == "MaxPool")
    pool.attribute.append(onnx.helper.make_attribute("storage_order", 1))
    with pytest.raises(UnsupportedError, match="storage_order"):
        Pass.get_pass("check_unsupported_attribute").run(model)
    assert GRAPHCORE not in {i.domain for i in model.opset_import}
