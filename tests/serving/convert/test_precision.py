"""Halves and 8-bit floats: what is stored, what is chosen, what is warned of."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from podrun import onnx_backend
from podrun.core.errors import UnsupportedError, UsageError
from podrun.serving.compiler import Compiler, CompilerOptions
from podrun.serving.convert.calibration import LOSS_FUNCTIONS, calibrate, formats_by_loss
from podrun.serving.convert.converter import Converter
from podrun.serving.convert.float8 import Float8Format, parse_float8
from podrun.serving.convert.gptq import gptq_weight
from podrun.serving.convert.pass_manager import Pass
from podrun.serving.convert.quantizer import FP8Quantizer, quantize, read_calibration_data
from podrun.serving.convert.report_passes import made_up_inputs
from tests.serving.convert.models import FLOAT, Writer, bert, convolutional
from tests.serving.convert.test_passes import expected, greatest_difference, operators, results


def decoded(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """The value of a pattern by the formats' own definition."""
    sign = -1.0 if code >> 7 else 1.0
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    if code == 0x80:
        return float("nan")
    if exponent == 0:
        return float(sign * mantissa / 2**mantissa_bits * 2.0 ** (1 - bias))
    return float(sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))


@pytest.mark.parametrize(("name", "layout"), [("F143", (4, 3, 8)), ("F152", (5, 2, 16))])
def test_every_pattern_is_what_the_formats_say(name: str, layout: tuple[int, int, int]) -> None:
    codes = np.arange(256, dtype=np.uint8)
    for scale in (-3, 0, 5):
        ours = Float8Format(name, scale).value(codes.view(Float8Format(name, 0).dtype))
        np.testing.assert_array_equal(ours, [decoded(c, *layout) * 2.0**scale for c in range(256)])


def test_numbers_become_the_nearest_and_stay_in_range() -> None:
    x = np.random.default_rng(0).standard_normal(20000).astype(np.float32) * 20
    for name, scale in itertools.product(("F143", "F152"), (-2, 0, 3)):
        one = Float8Format(name, scale)
        values = np.sort(one.value(np.arange(256, dtype=np.uint8).view(one.dtype)))
        values = values[np.isfinite(values)].astype(np.float64)
        nearest = np.abs(x[:, None].astype(np.float64) - values[None, :]).min(1)
        np.testing.assert_array_equal(np.abs(one.simulated(x).astype(np.float64) - x), nearest)
        assert one.simulated(np.float32([1e30, -1e30])).tolist() == [one.largest, -one.largest]
    with pytest.raises(UsageError, match="from -32 to 31"):
        Float8Format("F143", 40)
    with pytest.raises(UsageError, match="is not formats and scales"):
        parse_float8("F143,F143,0")


def product(scale: float = 1.0) -> onnx.ModelProto:
    w = Writer(9)
    w("MatMul", "x", w.weight(16, 8, scale=scale), out="y")
    return w.model({"x": (FLOAT, [4, 16])}, {"y": (FLOAT, [4, 8])})


def test_a_product_multiplies_what_is_stored() -> None:
    """Operands are the stored values times the scale; the product is one of halves."""
    model = product()
    converted = Converter(precision="fp8", fp8_params="F152,F143,1,-2").convert(model)
    x = np.random.default_rng(3).standard_normal((4, 16)).astype(np.float16)
    weight = numpy_helper.to_array(model.graph.initializer[0])
    left = Float8Format("F152", 1).simulated(x).astype(np.float16).astype(np.float64)
    right = (
        Float8Format("F143", -2).simulated(weight.astype(np.float16)).astype(np.float16).astype(np.float64)
    )
    ours = results(converted, {"x": x})["y"]
    np.testing.assert_allclose(ours.astype(np.float64), left @ right, rtol=2e-3, atol=2e-3)
    stored = [t for t in converted.graph.initializer if t.data_type == TensorProto.FLOAT8E4M3FNUZ]
    assert [len(tensor.raw_data) for tensor in stored] == [16 * 8]


def test_weights_of_eight_bits_take_less_memory() -> None:
    sizes = {}
    for precision in ("fp16", "fp8_weight"):
        compiled = Compiler.compile(
            Converter(precision=precision).convert(product()), None, CompilerOptions()
        )
        sizes[precision] = sum(t.data().nbytes for t in compiled.reader.tensors())
    assert sizes["fp8_weight"] <= 0.55 * sizes["fp16"]


@pytest.mark.parametrize(("version", "precision"), [("ipu21", "fp8"), ("ipu2", "fp8_weight")])
def test_eight_bits_lower_cycles_or_memory(version: str, precision: str) -> None:
    """The C600 (ipu21) multiplies 8 bits faster than halves; elsewhere they save memory."""
    w = Writer()
    w("MatMul", "x", w.weight(512, 1024), out="h")
    w("MatMul", "h", w.weight(1024, 1024), out="y")
    model = w.model({"x": (FLOAT, [256, 512])}, {"y": (FLOAT, [256, 1024])})
    reports = {}
    for one in ("fp16", precision):
        compiled = Compiler.compile(
            Converter(precision=one).convert(model), None, CompilerOptions(ipu_version=version)
        )
        assert compiled.metadata.ipuVersion == version
        reports[one] = compiled.program().tile_report
    halves, small = reports["fp16"], reports[precision]
    lasting = {n: r["ipus"][0]["memory"]["always_live_bytes"] for n, r in reports.items()}
    assert lasting[precision] < 0.75 * lasting["fp16"]
    if version == "ipu21":
        assert small["step"]["cycles"] < 0.9 * halves["step"]["cycles"]


def test_skipped_operators_and_nodes_keep_their_precision() -> None:
    model = bert(layers=1, hidden=16, heads=2, length=5)
    half = Converter(precision="fp16", fp16_skip_op_types="Softmax").convert(model)
    softmax = next(node for node in half.graph.node if node.op_type == "Softmax")
    kinds = {v.name: v.type.tensor_type.elem_type for v in half.graph.value_info}
    assert kinds[softmax.input[0]] == kinds[softmax.output[0]] == TensorProto.FLOAT
    name = next(node.name for node in half.graph.node if node.op_type == "MatMul")
    eight = Converter(precision="fp8", fp8_skip_op_names=name).convert(model)
    count = operators(half).count("MatMul")
    assert operators(eight).count("Pow2ScaleThenCast") == 2 * 2 + (count - 3)  # Scores and contexts have two.


def test_halves_are_clipped_and_epsilons_lifted(caplog: pytest.LogCaptureFixture) -> None:
    w = Writer()
    w("Mul", w("Add", "x", w.constant([[1e6, -np.inf]])), w.constant(1e-12), out="y")
    model = w.model({"x": (FLOAT, [1, 2])}, {"y": (FLOAT, [1, 2])})
    with caplog.at_level(logging.WARNING, "poprt"):
        half = Pass.get_pass("float_to_half").run(model)
    held = [numpy_helper.to_array(t) for t in half.graph.initializer]
    assert held[0].tolist() == [[65500.0, -65500.0]] or held[0].astype(np.float32).tolist() == [
        [65504.0, -65504.0]
    ]
    assert held[1] == np.float16(1e-7)
    assert "clipped" in caplog.text
    assert "it becomes 1e-07" in caplog.text


def test_sums_of_squares_stay_in_float32() -> None:
    w = Writer()
    w("Sqrt", w("ReduceMean", w("Pow", "x", w.constant(2.0)), axes=[-1]), out="y")
    model = w.model({"x": (FLOAT, [2, 4])}, {"y": (FLOAT, [2, 1])})
    x = np.full((2, 4), 300.0, np.float16)
    for enable, right in ((False, np.inf), (True, 300.0)):
        half = Pass.get_pass("float_to_half", enable_avoid_overflow_patterns=enable).run(
            onnx.ModelProto.FromString(model.SerializeToString())
        )
        assert onnx_backend.prepare(half).run({"x": x})[0][0, 0] == right


@pytest.mark.parametrize("loss", LOSS_FUNCTIONS)
def test_the_least_loss_is_chosen(loss: str) -> None:
    """Values of one scale: the chosen format is at most a little worse than any by the mean square error."""
    for spread in (0.01, 1.0, 30.0):
        x = np.random.default_rng(5).standard_normal(4000) * spread
        ranked = formats_by_loss(x, loss)
        assert ranked[0].loss == min(one.loss for one in ranked)
        error = np.square(ranked[0].chosen.simulated(x) - x).mean() / np.square(x).mean()
        assert error < 2e-3, (loss, spread, ranked[0])


@pytest.mark.slow
def test_data_choose_the_formats(tmp_path: Path) -> None:
    model = product(scale=0.001)
    data = {"x": np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32) * 100}
    choice = calibrate(model, data, loss_type="mse")[0]
    assert choice.inputs is not None
    assert choice.weights is not None
    assert choice.inputs.chosen.scale > choice.weights.chosen.scale
    base = Converter(precision="fp8", quantize=True).convert(model)
    ours = quantize(base, model, tmp_path, data, "fp8", "mse", options={"precision_compare": True})
    right = results(model, data)["y"]
    error = {}
    for label, converted in (("data", ours), ("fixed", Converter(precision="fp8").convert(model))):
        error[label] = np.abs(results(converted, data)["y"] - right).mean()
    assert error["data"] < 0.8 * error["fixed"]
    assert "chosen: input F143" in (tmp_path / "quantize.log").read_text()
    compared = (tmp_path / "precision_compare.log").read_text()
    assert "MSE" in compared
    assert "32 bins" in compared


@pytest.mark.slow
def test_layers_with_the_largest_loss_stay_in_half(tmp_path: Path) -> None:
    model = bert(layers=1, hidden=16, heads=2, length=5)
    origin = Converter().convert(model)
    quantizer = FP8Quantizer("fp8_weight", "mae", num_of_layers_keep_fp16=2)
    base = Converter(precision="fp8_weight", quantize=True).convert(model)
    ours = quantizer.quantize(base, origin, made_up_inputs(origin), tmp_path)
    assert operators(ours).count("CastThenPow2Scale") == len(quantizer.choices) - 2
    least = min(choice.loss for choice in quantizer.choices if choice.name in quantizer.kept)
    assert all(c.loss <= least for c in quantizer.choices if c.name not in quantizer.kept)


def test_gptq_loses_less_than_rounding() -> None:
    random = np.random.default_rng(1)
    mixed = random.standard_normal((400, 32)) @ random.standard_normal((32, 32))
    weight = random.standard_normal((32, 16)).astype(np.float32)
    chosen = Float8Format("F143", -5)
    ours = gptq_weight(weight, mixed, chosen)
    np.testing.assert_array_equal(chosen.simulated(ours), ours)
    errors = [np.square(mixed @ (w - weight)).mean() for w in (ours, chosen.simulated(weight))]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.slow
def test_gptq_over_a_model(tmp_path: Path) -> None:
    for model in (bert(layers=1, hidden=16, heads=2, length=5), convolutional()):
        inputs = made_up_inputs(model)
        base = Converter(precision="fp8_weight", quantize=True).convert(model)
        ours = quantize(base, model, tmp_path, inputs, "fp8_weight", "gptq")
        right = results(model, inputs)
        assert max(greatest_difference(results(ours, inputs)[k], v) for k, v in right.items()) < 0.15
    assert expected("bert")[2]


def test_data_are_arrays_and_no_pickles(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.ones((4, 16), np.float32))
    assert list(read_calibration_data(tmp_path / "data.npz")) == ["x"]
    np.save(tmp_path / "one.npy", np.ones(3))
    for name, error, message in (
        ("data.pickle", UnsupportedError, "does not open pickles"),
        ("one.npy", UsageError, "holds one array"),
        ("none.npz", UsageError, "there is no file"),
    ):
        with pytest.raises(error, match=message):
            read_calibration_data(tmp_path / name)
    np.savez(tmp_path / "objects.npz", x=np.array([{}], object))
    with pytest.raises(UsageError, match=r"no \.npz of plain arrays"):
        read_calibration_data(tmp_path / "objects.npz")
    with pytest.raises(UsageError, match=r"input 'x' is \[4, 16\], the data are \[2, 16\]"):
        calibrate(product(), {"x": np.ones((2, 16), np.float32)})
    assert ml_dtypes.finfo(ml_dtypes.float8_e4m3fnuz).max == 240
