"""Grids, losses, sparse products, factorisations: properties for any size, and the parts of a figure."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import onnx
import pytest
from fidelity_kinds import kernels, stencil
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.executable import numpy_dtype
from podrun.costmodel import lookups
from podrun.costmodel.cost import cost_jaxpr
from podrun.costmodel.matmul import plan_product
from podrun.costmodel.products import Product
from podrun.costmodel.target import CHIPS
from podrun.onnx_models.lowering import lower
from podrun.popart import TensorInfo
from podrun.popart.building.builder import Builder

GC2, GC200 = CHIPS["gc2"], CHIPS["gc200"]


def blur(**changes: Any) -> stencil.StencilGrid:
    sizes: dict[str, Any] = {"width": 2200, "height": 1122, "depth": 1, "values": 4, "item": 4, "taps": 9}
    return stencil.StencilGrid(**{**sizes, "radius": 1, "code": "scalar", **changes})


@given(st.integers(6, 3000), st.integers(6, 3000), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_cut_covers_its_grid_and_no_worker_beats_the_mean(width: int, height: int, ipus: int) -> None:
    found = stencil.cut_grid(GC2, blur(width=width, height=height, ipus=ipus))
    assert found.rows * found.columns * ipus >= width * height
    assert 0.0 < found.used <= 1.0
    assert math.isclose(found.held * found.used * GC2.tiles, found.rows * found.columns, rel_tol=1e-9)
    assert found.slowest >= found.held * (1.0 - 1e-9)
    assert (found.face > 0) == (ipus > 1)


def test_vector_lanes_share_a_tap() -> None:
    single = stencil.sweep(GC2, blur(code="vector", lanes=2))["compute"] - stencil.SWEEP_CYCLES
    half = stencil.sweep(GC2, blur(code="vector", lanes=4, item=2))["compute"] - stencil.SWEEP_CYCLES
    assert single == pytest.approx(2.0 * half)


def test_larger_smallest_blocks_use_fewer_tiles_and_take_longer() -> None:
    few = stencil.sweep(GC2, blur(smallest=(72, 64)))
    assert stencil.cut_grid(GC2, blur(smallest=(72, 64))).used < 0.5
    assert few["compute"] > 2.0 * stencil.sweep(GC2, blur())["compute"]


def test_a_grid_that_grows_with_its_chips_keeps_its_compute() -> None:
    one = stencil.sweep(GC2, blur(per_ipu=True))
    many = stencil.sweep(GC2, blur(per_ipu=True, ipus=16))
    assert many["compute"] == one["compute"]
    assert many["global_exchange"] > 0.0
    assert "global_exchange" not in one


def test_a_convolution_without_room_falls_to_the_vector_unit() -> None:
    sizes: dict[str, Any] = {"groups": 1, "m": 768 * 1024, "k": 4, "n": 4, "kernel": 9, "row_length": 768}
    roomy = plan_product(GC2, Product(**sizes, partials_type="float32", proportion=0.2))
    tight = plan_product(GC2, Product(**sizes, partials_type="float32", proportion=0.1))
    assert roomy.detail.startswith("amp")
    assert tight.detail.startswith("mac")
    assert tight.temporary_bytes <= 0.1 * GC2.tile_bytes
    assert tight.cycles(GC2) > 10.0 * roomy.cycles(GC2)


FIRST_LAYER: dict[str, Any] = {"groups": 1, "m": 100_352, "k": 4, "n": 64, "kernel": 49, "row_length": 112}


def test_a_serial_split_gathers_its_inputs_in_every_turn() -> None:
    layer = Product(**FIRST_LAYER, partials_type="float32", stride=2)
    whole, serial = plan_product(GC2, layer), plan_product(GC2, replace(layer, proportion=0.15))
    assert "serial/" in serial.detail
    assert serial.exchange > 2.0 * whole.exchange
    assert serial.temporary_bytes <= 0.15 * GC2.tile_bytes < whole.temporary_bytes


def test_temporary_data_are_beside_operands_and_outputs() -> None:
    """Sums that are the outputs are made in their place and need no temporary data."""
    shape = {"groups": 1, "m": 50_000, "k": 64, "n": 64, "partials_type": "float16"}
    same, cast = (plan_product(GC200, Product(**shape, output_type=kind)) for kind in ("float16", "float32"))
    assert same.detail.endswith("rows/274 in/1 out/4")
    assert same.temporary_bytes == 183 * 64 * 2 + 64 * 16 * 2
    assert cast.detail.endswith("rows/1471 in/1 out/1")
    assert cast.temporary_bytes == 34 * 64 * 2 + 64 * 64 * 2 + 34 * 64 * 2


def test_turns_do_not_help_where_the_inputs_alone_have_no_room() -> None:
    """A serial split divides weights and partial sums; an expanded field has to be there in every turn."""
    tight = plan_product(GC2, Product(**FIRST_LAYER, partials_type="float32", stride=2, proportion=0.1))
    assert tight.detail.startswith("mac")
    assert tight.temporary_bytes <= 0.1 * GC2.tile_bytes


def test_a_loss_walks_its_lattice_as_a_wave() -> None:
    one = kernels.loss_cycles(GC200, 400, 100, "float32", step_part=400, label_part=100)
    cut = kernels.loss_cycles(GC200, 400, 100, "float32", step_part=100, label_part=25)
    assert cut == pytest.approx(one * 7.0 / 16.0, rel=0.02)
    assert kernels.loss_cycles(GC200, 400, 100, "float16") < kernels.loss_cycles(GC200, 400, 100, "float32")
    assert lookups.loss_reduction_cycles(100, 10, "float32") == 100 * 21 * 11.5


@functools.cache
def ctc_report(
    *, search: bool, train: bool, steps: int = 60, batch: int = 4, labels: int = 12
) -> dict[str, Any]:
    """The cost of CTC's loss, or of its beam search, behind a LogSoftmax, as the front end builds them."""
    builder = Builder()
    x = builder.addInputTensor(TensorInfo("FLOAT", [steps, batch, 20]))
    lengths = builder.addInputTensor(TensorInfo("UINT32", [batch]))
    log_p = builder.aiOnnx.logsoftmax([x], 2)
    if search:
        y = builder.aiGraphcore.ctcbeamsearchdecoder([log_p, lengths], beam_width=5, top_paths=2)[2]
    else:
        targets = builder.addInputTensor(TensorInfo("UINT32", [batch, labels]))
        counts = builder.addInputTensor(TensorInfo("UINT32", [batch]))
        y = builder.aiGraphcore.ctcloss([log_p, targets, lengths, counts])
    builder.addOutputTensor(y)
    lowered = lower(onnx.load_from_string(builder.getModelProto()), training=train)
    given = {n: jax.ShapeDtypeStruct(s.shape, numpy_dtype(s.dtype)) for n, s in lowered.inputs.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))

    def forward(x: Any, rest: Any, key: Any) -> Any:
        return lowered.forward({}, {**rest, **x}, key)[y]

    made = jax.make_jaxpr(jax.grad(forward) if train else forward)({x: given.pop(x)}, given, key)
    return cost_jaxpr(made, "gc200")


@pytest.mark.parametrize(("search", "train"), [(False, True), (False, False), (True, False)])
def test_connectionist_operators_of_a_program_get_their_planners(search: bool, train: bool) -> None:
    report = ctc_report(search=search, train=train)
    assert report["by_operator"]["ctc"]["count"] == 1
    assert not {"gather", "scatter"} & set(report["by_operator"])  # Nothing of the trace is left.
    assert not report["bounds"]


def test_a_loss_with_its_gradient_takes_more_than_twice_the_loss() -> None:
    alone, whole = (ctc_report(search=False, train=train)["by_operator"]["ctc"] for train in (False, True))
    assert whole["cycles"] > 2 * alone["cycles"]


def test_entries_of_a_batch_run_side_by_side_until_the_tiles_are_full() -> None:
    few, more, full = (
        ctc_report(search=True, train=False, batch=batch)["by_operator"]["ctc"]["cycles"]
        for batch in (1, GC200.tiles // lookups.DEFAULT_TILES, GC200.tiles // lookups.DEFAULT_TILES + 1)
    )
    assert few == more
    assert full == 2 * more


@given(st.sampled_from([1, 4, 8, 16]), st.sampled_from([1 / 64, 1 / 16, 1 / 4]))
def test_sparse_products_cost_more_when_denser(fidelity: Any, block: int, density: float) -> None:
    sparse = sys.modules["fidelity_kinds.sparse"]
    thin = sparse.plan_sparse(GC200, 4096, 4096, 1024, density / 2, block, "float16")
    dense = sparse.plan_sparse(GC200, 4096, 4096, 1024, density, block, "float16")
    assert dense.cycles(GC200) >= thin.cycles(GC200)
    assert dense.flops == 2.0 * thin.flops
    assert dense.tiles <= GC200.tiles


@pytest.mark.parametrize(
    ("name", "function", "shape"),
    [
        ("factorisation", jnp.linalg.cholesky, (64, 64)),
        ("factorisation", lambda x: jnp.linalg.qr(x)[0], (96, 32)),
        ("factorisation", lambda x: jax.scipy.linalg.solve_triangular(x, x), (32, 32)),
        ("fft", jnp.fft.fft, (8, 512)),
        ("sort", jnp.sort, (8, 512)),
        ("sort", lambda x: jax.lax.top_k(x, 4)[0], (8, 512)),
    ],
)
def test_families_have_planners_and_grow_with_their_size(
    name: str, function: Any, shape: tuple[int, ...]
) -> None:
    def cost(scale: int) -> dict[str, Any]:
        x = jax.ShapeDtypeStruct(tuple(s * scale for s in shape), jnp.float32)
        return cost_jaxpr(jax.make_jaxpr(function)(x), "gc200")

    small, large = cost(1), cost(2)
    assert name in small["by_operator"]
    assert small["bounds"] == {}
    assert large["step"]["cycles"] > small["step"]["cycles"]


def test_top_k_takes_fewer_steps_than_a_sort() -> None:
    x = jax.ShapeDtypeStruct((16, 4096), jnp.float32)
    whole = cost_jaxpr(jax.make_jaxpr(jnp.sort)(x), "gc200")["step"]["cycles"]
    some = cost_jaxpr(jax.make_jaxpr(lambda x: jax.lax.top_k(x, 8)[0])(x), "gc200")["step"]["cycles"]
    assert some < whole


# The tutorial's matrix times vector, 10000 x 1000 in FP32 with one hand-written vertex per output, measured
# on hardware: tile cycles of each term.
MATRIX_VECTOR = {"compute": 28_300.3, "exchange": 8_743.1, "sync": 135_850.0, "host": 2_641_490.0}


@pytest.mark.parametrize(
    ("phase", "share"), [("compute", 0.02), ("exchange", 0.02), ("sync", 0.25), ("host", 0.02)]
)
def test_matrix_vector_tutorial_is_right_in_each_term(fidelity: Any, phase: str, share: float) -> None:
    params = {"m": 10_000, "k": 1000, "n": 1, "input_type": "fp32", "partials_type": "fp32"}
    record = {
        "id": "tutorial",
        "kind": "gemm",
        "target": "mk2",
        "metric": "tile_mean_cycles",
        "params": {**params, "implementation": "custom_codelet", "phase": phase},
        "value": 1.0,
    }
    assert fidelity.predict(record, {}) == pytest.approx(MATRIX_VECTOR[phase], rel=share)


def test_a_memory_record_of_fewer_layers_is_of_these_layers(
    fidelity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A one-layer BERT was predicted as one of 24 layers."""
    footprints, record = sys.modules["fidelity_kinds.footprints"], sys.modules["fidelity_kinds.record"]
    code = {"vertex_code": 1.0, "vertex_state": 10.0, "exchange_code": 10.0, "control_code": 10.0}
    sizes = {"always_live_bytes": 1000.0, "not_always_live_peak_bytes": 5.0, "activations_peak_bytes": 5.0}
    part = [{"memory": {**sizes, "code": code}}]
    parts = {"layer": part, "embedding": part}
    monkeypatch.setattr(footprints.trace, "transformer_parts", lambda *_, **__: parts)

    def always(**given: Any) -> float:
        params = {**record.DEFAULTS["memory"], "sequence_length": 128, "category": "variables", **given}
        made = record.Record("memory", "gc200", "bytes", params)
        found: float = footprints._transformer(made, "bert_large")["always"]
        return found

    assert always(layers=1) == 2 * 1000.0  # With the embedding.
    assert always(layers=3) == 4 * 1000.0
    assert always() == 25 * 1000.0
