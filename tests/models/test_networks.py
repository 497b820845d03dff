"""Published networks: sizes as published, and numbers as other implementations compute them."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

from podrun import models
from podrun.core.errors import InvalidOptionError
from podrun.models import sequences
from podrun.models.catalogue import finished, lstm_network
from podrun.models.network import Network
from podrun.onnx_models.lowering import lower
from podrun.popart.building.builder import Builder

PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext101": 44_177_704,
    "efficientnet_b0": 5_288_548,
    "efficientnet_b4": 19_341_616,
    "alexnet": 61_100_840,
    "mobilenet_v1": 4_231_976,
    "vit_b16": 86_567_656,
    "vit_l16": 304_326_632,
}
"""Trained parameters as the reference implementations of these networks count them."""


def parameters(built: models.Built) -> int:
    model = onnx.load_from_string(built.model)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    return sum(math.prod(shapes[name]) for name in built.weights)


def run(built: models.Built, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The network's output, by our own front end."""
    import jax

    lowered = lower(onnx.load_from_string(built.model))
    forward = jax.jit(
        lambda given: lowered.forward(dict(lowered.initial), given, jax.random.key(0))[built.output]
    )
    return np.asarray(forward(inputs))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.sample(3)
def test_parameters_are_those_published(name: str) -> None:
    assert parameters(models.build(name, train=True)) == PUBLISHED[name]


LARGER = {"swin_l", "vit_l16", "resnet152", "resnet101"}
"""Networks written by the same functions as smaller ones that are built here."""


@pytest.mark.parametrize("name", [name for name in models.CATALOGUE if name not in LARGER])
@pytest.mark.sample(3)
def test_image_networks_give_a_thousand_classes(name: str) -> None:
    built = models.build(name, batch=3)
    lowered = lower(onnx.load_from_string(built.model))
    assert lowered.outputs[built.output].shape == (3, 1000)


OF_A_KIND = ("bert_3_layer", "albert", "clip_text")
"""Text networks that run by default: a plain one, one with shared layers and a causal one."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in OF_A_KIND else pytest.mark.slow) for name in models.TRANSFORMERS],
)
def test_text_networks_have_the_published_sizes(name: str) -> None:
    # Tables, layers of 12 h^2 + 13 h, and the head's own dense layer and norm.
    size = models.TRANSFORMERS[name]
    h, f = size.hidden, size.feed_forward
    layer = 4 * h * h + 2 * h * f + 9 * h + f
    layers = layer * (1 if size.shared else size.layers)
    tables = (size.vocabulary + 64 + 2) * h + 2 * h
    assert parameters(models.build(name, size=64)) == tables + layers + h * h + 3 * h


@pytest.mark.slow
def test_resnet18_computes_what_onnxruntime_computes() -> None:
    runtime = pytest.importorskip("onnxruntime")
    built = models.build("resnet18", batch=2, size=64, weights=models.Random(seed=1))
    images = np.random.default_rng(0).standard_normal((2, 3, 64, 64)).astype(np.float32)
    session = runtime.InferenceSession(built.model, providers=["CPUExecutionProvider"])
    (expected,) = session.run([built.output], {built.inputs[0]: images})
    np.testing.assert_allclose(run(built, {built.inputs[0]: images}), expected, rtol=2e-4, atol=2e-4)
    assert np.abs(expected).max() > 0.1


def test_a_tiny_encoder_computes_what_numpy_computes() -> None:
    net = Network(Builder(), models.Random(seed=2))
    x, mask = net.input("x", (2, 5, 16)), net.input("mask", (2, 1, 1, 5))
    built = finished(net, (x, mask), sequences.encoder_layer(net, x, "layer", 4, 32, mask))
    model = onnx.load_from_string(built.model)
    w = {i.name.split("/")[-1]: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    rng = np.random.default_rng(3)
    given = rng.standard_normal((2, 5, 16)).astype(np.float32)
    blocked = np.zeros((2, 1, 1, 5), np.float32)
    blocked[1, ..., 3:] = -1e4
    found = run(built, {x: given, mask: blocked})
    np.testing.assert_allclose(found, _encoder(given, blocked, w, heads=4), rtol=2e-4, atol=2e-4)


def _encoder(x: np.ndarray, mask: np.ndarray, w: dict[str, np.ndarray], heads: int) -> np.ndarray:
    """One layer by the book, token by token loops left to NumPy."""
    batch, tokens, hidden = x.shape
    size = hidden // heads

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"layer.{name}"] + w[f"layer.{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * w[f"layer.{name}.scale"] + w[f"layer.{name}.bias"]

    q, k, v = (
        part.reshape(batch, tokens, heads, size).transpose(0, 2, 1, 3)
        for part in np.split(dense(x, "qkv"), 3, -1)
    )
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(size) + mask
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    y = (shares @ v).transpose(0, 2, 1, 3).reshape(batch, tokens, hidden)
    x = norm(x + dense(y, "out"), "norm0")
    y = dense(x, "ff1")
    y = 0.5 * y * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * y**3)))
    return norm(x + dense(y, "ff2"), "norm1")


def test_a_causal_network_sees_nothing_ahead() -> None:
    net = Network(Builder(), models.Random(seed=4))
    x = net.input("x", (1, 6, 16))
    mask = sequences.causal_mask(net, 6)
    built = finished(net, (x,), sequences.encoder_layer(net, x, "layer", 2, 32, mask))
    given = np.random.default_rng(5).standard_normal((1, 6, 16)).astype(np.float32)
    changed = given.copy()
    changed[:, 4:] += 1.0
    first, second = run(built, {x: given}), run(built, {x: changed})
    np.testing.assert_array_equal(first[:, :4], second[:, :4])
    assert np.abs(first[:, 4:] - second[:, 4:]).max() > 1e-3


def test_shifted_windows_keep_strangers_apart() -> None:
    net = Network(Builder(), models.Declared("float32"))
    mask = sequences._shifted_mask(net, 1, 8, 4, 2)
    assert net.shape(mask) == [4, 1, 16, 16]
    (node,) = [
        n for n in onnx.load_from_string(net.builder.getModelProto()).graph.node if n.op_type == "Constant"
    ]
    values = onnx.numpy_helper.to_array(node.attribute[0].t)
    blocked = (values < 0).reshape(4, -1).sum(1).tolist()
    # The first window was whole before the shift; the last holds four corners, four pixels each.
    assert blocked == [0, 128, 128, 192]


def test_an_lstm_stack_runs() -> None:
    built = lstm_network(2, 3, 2, 8, weights=models.Random(seed=6))
    out = run(built, {built.inputs[0]: np.ones((3, 2, 8), np.float32)})
    assert out.shape == (3, 2, 8)
    assert np.abs(out).max() < 1.0


@pytest.mark.parametrize("name", ["mobilenet_v1", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_random_weights_are_the_same_for_the_same_seed(name: str) -> None:
    one, same, other = (models.build(name, size=32, weights=models.Random(seed=s)).model for s in (1, 1, 2))
    assert one == same != other


def test_unknown_names_are_refused_by_name() -> None:
    with pytest.raises(InvalidOptionError, match="no network is called 'resnet51'"):
        models.build("resnet51")
    with pytest.raises(InvalidOptionError, match="unknown normalisation 'layer'"):
        models.build("resnet18", images=models.Images(norm="layer"))
    with pytest.raises(InvalidOptionError, match="unknown type 'float64'"):
        models.build("resnet18", weights=models.Declared("float64"))
