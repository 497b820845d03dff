"""The architectures that ship in the onnx wheel, and a BERT of four layers: converted, against onnxruntime.

All are slow but SqueezeNet in float32.
"""

from __future__ import annotations

import logging
import sys

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from podrun.serving.convert.converter import Converter
from podrun.serving.convert.float8 import Float8Format
from podrun.serving.convert.float8_passes import PRODUCTS
from podrun.serving.convert.reference_runs import run_onnxruntime
from podrun.serving.convert.report_passes import made_up_inputs
from tests.conftest import ROOT
from tests.serving.convert.models import bert
from tests.serving.convert.test_passes import greatest_difference, operators, results

sys.path.insert(0, str(ROOT / "tests" / "conformance"))
import onnx_suite

NAMES = (
    *("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet"),
    *("vgg19", "zfnet512"),
)
BOUNDS = {"fp32": 1e-4, "fp16": 2e-2, "fp8_weight": 2e-2}
"""Largest difference of the outputs, over 1 or the largest output. fp32: sums in another order, over 50 layers.
"""
WEIGHTS = Float8Format("F143", -6)
"""Weights of these models are below 4: 240 times 2**-6."""


def real_model(name: str) -> onnx.ModelProto:
    case = next(c for c in onnx_suite.cases(("real",)) if c.name == f"test_{name}")
    return onnx_suite.light_model(case)


def of_eight_bits(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs in float32 with products' weights rounded to 8 bits. The weights of these networks are random, and
    rounding alone changes probabilities by up to 0.7 (ShuffleNet): onnxruntime's outputs of the model say nothing.
    """
    plain = Converter(precision="fp32", enable_erf_gelu=True).convert(model)
    names = {name for n in plain.graph.node if n.op_type in PRODUCTS and not n.domain for name in n.input[:2]}
    for tensor in plain.graph.initializer:
        if tensor.name in names:
            halves = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(WEIGHTS.simulated(halves), tensor.name))
    return results(plain, inputs)


def check(model: onnx.ModelProto, precision: str) -> onnx.ModelProto:
    logging.getLogger("poprt").setLevel(logging.ERROR)
    inputs = made_up_inputs(model)
    right = of_eight_bits(model, inputs) if precision == "fp8_weight" else run_onnxruntime(model, inputs)
    params = f"F143,{WEIGHTS.name},0,{WEIGHTS.scale}"
    converted = Converter(precision=precision, enable_erf_gelu=True, fp8_params=params).convert(model)
    ours = results(converted, inputs)
    for name, value in right.items():
        scale = max(1.0, float(np.abs(value).max()))
        assert greatest_difference(ours[name] / scale, value / scale) <= BOUNDS[precision]
    return converted


FAST = (("squeezenet", "fp32"),)


@pytest.mark.parametrize(
    ("name", "precision"),
    [(n, p) if (n, p) in FAST else pytest.param(n, p, marks=pytest.mark.slow) for n in NAMES for p in BOUNDS],
)
def test_a_real_model_keeps_its_numbers(name: str, precision: str) -> None:
    model = real_model(name)
    converted = check(model, precision)
    assert len(converted.graph.node) <= len(model.graph.node) + 2 * operators(converted).count(
        "CastThenPow2Scale"
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", BOUNDS)
def test_bert_keeps_its_numbers(precision: str) -> None:
    model = bert(layers=4, hidden=256, heads=4, length=64, batch=2, vocabulary=1000)
    assert "GeluErf" in operators(check(model, precision))
