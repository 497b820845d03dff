"""Networks by name: the networks that `build` can make, and the sizes that the names fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from podrun.core.errors import InvalidOptionError
from podrun.core.quick_dataclass import dataclass
from podrun.models import sequences, vision
from podrun.models.network import Declared, Network, Weights
from podrun.popart.building.builder import Builder


@dataclass(frozen=True, slots=True)
class Transformer:
    """Sizes of a text transformer. ``causal``: a token sees none after it, and every token is predicted.

    ``shared``: all layers have one set of weights.
    """

    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocabulary: int
    causal: bool = False
    shared: bool = False


TRANSFORMERS: Mapping[str, Transformer] = MappingProxyType(
    {
        "bert_base": Transformer(12, 768, 12, 3072, 30528),
        "bert_large": Transformer(24, 1024, 16, 4096, 30528),
        "bert_3_layer": Transformer(3, 768, 12, 3072, 30528),
        "bert_tiny": Transformer(2, 128, 2, 512, 30528),
        "roberta": Transformer(12, 768, 12, 3072, 50265),
        "albert": Transformer(12, 768, 12, 3072, 30000, shared=True),
        "roformer": Transformer(12, 768, 12, 3072, 50000),
        "gpt_117m": Transformer(12, 768, 12, 3072, 50257, causal=True),
        "clip_text": Transformer(12, 512, 8, 2048, 49408, causal=True),
        "clip_text_large": Transformer(12, 768, 12, 3072, 49408, causal=True),
    }
)
"""Published sizes; a name without a size means the base model."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A network of the catalogue: ``side`` of its square images (0: not images), and the function that writes it."""

    side: int
    write: Callable[[Network, str], str]


def _vision(side: int, write: Callable[..., str], *extra: object) -> Entry:
    return Entry(side, lambda net, x: write(net, x, *extra))


CATALOGUE: Mapping[str, Entry] = MappingProxyType(
    {
        **{name: _vision(224, vision.resnet, name) for name in vision.RESNET_BLOCKS},
        "efficientnet_b0": _vision(224, vision.efficientnet, "efficientnet_b0"),
        "efficientnet_b4": _vision(380, vision.efficientnet, "efficientnet_b4"),
        "alexnet": _vision(224, vision.alexnet),
        "googlenet": _vision(224, vision.googlenet),
        "mobilenet_v1": _vision(224, vision.mobilenet),
        **{name: _vision(224, sequences.vit, name) for name in sequences.VIT},
        "swin_t": _vision(224, sequences.swin, "swin_t"),
        "swin_l": _vision(384, sequences.swin, "swin_l"),
    }
)
"""Networks of images by name. Text networks stand in `TRANSFORMERS`, ``lstm_network`` takes its sizes as arguments."""


@dataclass(frozen=True, slots=True)
class Built:
    """A network as a model: ``weights`` are trained, ``state`` is kept by the forward pass (running statistics)."""

    model: bytes
    inputs: tuple[str, ...]
    output: str
    weights: tuple[str, ...]
    state: tuple[str, ...]


TOKENS = 128
"""Number of tokens of text networks unless ``size`` is given."""


@dataclass(frozen=True, slots=True)
class Images:
    """Variants of a network of images. ``norm``: one of `podrun.models.network.NORMS`. ``depthwise_group``: channels of
    a group of EfficientNet's depthwise convolutions (1 or 16). ``channels``: of an image, 4 as the IPU library pads
    them.
    """

    norm: str = "batch"
    depthwise_group: int = 1
    channels: int = 3


def build(
    name: str,
    *,
    batch: int = 1,
    size: int = 0,
    weights: Weights | None = None,
    train: bool = False,
    images: Images = Images(),
) -> Built:
    """Build the network called ``name`` for one micro-batch.

    ``size``: side of square images or tokens of text, the network's own or `TOKENS` if 0. ``weights``: `Declared`
    (shapes only, the default, halves) or `Random`; their type is that of the network.

    Raises:
        InvalidOptionError: no network of that name, or a normalisation or type that is not known; names the
        known.
    """
    net = Network(Builder(), weights or Declared(), images.norm, train)
    if name in CATALOGUE:
        entry = CATALOGUE[name]
        x = net.input("images", (batch, images.channels, size or entry.side, size or entry.side))
        if name in vision.SCALES:
            return finished(net, (x,), vision.efficientnet(net, x, name, images.depthwise_group))
        return finished(net, (x,), entry.write(net, x))
    if name in TRANSFORMERS:
        return _text(net, TRANSFORMERS[name], batch, size or TOKENS)
    known = ", ".join((*CATALOGUE, *TRANSFORMERS))
    raise InvalidOptionError(f"no network is called {name!r}", hint=f"Known: {known}.")


def _text(net: Network, size: Transformer, batch: int, tokens: int) -> Built:
    words = net.input("tokens", (batch, tokens), "INT32")
    x = sequences.embedding(net, words, size.vocabulary, size.hidden)
    mask = sequences.causal_mask(net, tokens) if size.causal else net.input("mask", (batch, 1, 1, tokens))
    for layer in range(size.layers):
        with net.scope(f"layer{layer}"):
            name = "layer" if size.shared else f"layer{layer}"
            x = sequences.encoder_layer(net, x, name, size.heads, size.feed_forward, mask)
    predictions = tokens if size.causal else max(1, round(tokens * 0.15))
    y = sequences.prediction_head(net, x, size.vocabulary, predictions, net.named["word"])
    return finished(net, (words,) if size.causal else (words, mask), y)


def lstm_network(
    batch: int, steps: int, layers: int, hidden: int, *, weights: Weights | None = None
) -> Built:
    """A stack of LSTM layers whose input is as wide as its state."""
    net = Network(Builder(), weights or Declared())
    x = net.input("x", (steps, batch, hidden))
    return finished(net, (x,), sequences.lstm_layers(net, x, layers, hidden))


def finished(net: Network, inputs: tuple[str, ...], output: str) -> Built:
    """The network that ``net`` has written, with ``output`` as its only output."""
    net.builder.addOutputTensor(output)
    return Built(net.builder.getModelProto(), inputs, output, tuple(net.named.values()), tuple(net.state))
