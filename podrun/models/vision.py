"""Convolutional networks: ResNet, ResNeXt, EfficientNet, AlexNet, GoogLeNet, MobileNet; ``[batch, 3, side, side]``."""

from __future__ import annotations

import math
from dataclasses import replace

from podrun.core.quick_dataclass import dataclass
from podrun.models.network import Network

RESNET_BLOCKS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
    "resnext101": (3, 4, 23, 3),
}
"""Blocks of the four stages (He et al. 2015, table 1; ResNeXt-101 32x4d: Xie et al. 2016)."""
PLAIN = frozenset({"resnet18", "resnet34"})
"""Networks of two-convolution blocks; the others have bottlenecks, with the stride in the 3x3 (v1.5)."""
CLASSES = 1000


def resnet(net: Network, images: str, variant: str) -> str:
    """Logits of a ResNet or ResNeXt."""
    with net.scope("stem"):
        x = net.relu(net.normalise(net.conv(images, "stem", 64, 7, 2), "stem.norm"))
        x = net.max_pool(x, 3, 2)
    for stage, count in enumerate(RESNET_BLOCKS[variant]):
        for index in range(count):
            name = f"stage{stage}.block{index}"
            with net.scope(name):
                x = _residual(net, x, name, 64 * 2**stage, 2 if stage and not index else 1, variant)
    with net.scope("head"):
        return net.dense(net.average_field(x), "head", CLASSES)


def _residual(net: Network, x: str, name: str, channels: int, stride: int, variant: str) -> str:
    plain = variant in PLAIN
    groups, width = (32, 2) if variant == "resnext101" else (1, 1)
    out = channels * (1 if plain else 4)
    plan = (
        ((3, channels, stride, 1), (3, channels, 1, 1))
        if plain
        else ((1, channels * width, 1, 1), (3, channels * width, stride, groups), (1, out, 1, 1))
    )
    y = x
    for index, (kernel, features, step, grouped) in enumerate(plan):
        y = net.normalise(
            net.conv(y, f"{name}.conv{index}", features, kernel, step, grouped), f"{name}.norm{index}"
        )
        y = net.relu(y) if index < len(plan) - 1 else y
    if net.shape(x) != net.shape(y):
        x = net.normalise(net.conv(x, f"{name}.down", out, 1, stride), f"{name}.down.norm")
    return net.relu(net.add(x, y))


SCALES = {"efficientnet_b0": (1.0, 1.0), "efficientnet_b4": (1.4, 1.8)}
"""Width and depth over B0's (Tan and Le 2019)."""


@dataclass(frozen=True, slots=True)
class InvertedStage:
    """Blocks of an EfficientNet; only the first has the ``stride``."""

    expand: int
    channels: int
    blocks: int
    kernel: int
    stride: int


STAGES = (
    InvertedStage(1, 16, 1, 3, 1),
    InvertedStage(6, 24, 2, 3, 2),
    InvertedStage(6, 40, 2, 5, 2),
    InvertedStage(6, 80, 3, 3, 2),
    InvertedStage(6, 112, 3, 5, 1),
    InvertedStage(6, 192, 4, 5, 2),
    InvertedStage(6, 320, 1, 3, 1),
)
"""The stages of EfficientNet-B0."""
GROUPED_EXPANSION = 4
"""Expansion where depthwise convolutions are grouped, which keeps the arithmetic (published for the IPU)."""


def round_channels(channels: float) -> int:
    """Channels rounded to a multiple of eight, at most a tenth below the request."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def efficientnet(net: Network, images: str, variant: str, group: int = 1) -> str:
    """Logits of an EfficientNet; ``group``: channels of a group of its depthwise convolutions (1 or 16)."""
    wide, deep = SCALES[variant]
    with net.scope("stem"):
        x = net.silu(net.normalise(net.conv(images, "stem", round_channels(32 * wide), 3, 2), "stem.norm"))
    for number, base in enumerate(STAGES):
        expand = GROUPED_EXPANSION if group > 1 and base.expand > 1 else base.expand
        stage = replace(base, expand=expand, channels=round_channels(base.channels * wide))
        for index in range(math.ceil(base.blocks * deep)):
            name = f"stage{number}.block{index}"
            with net.scope(name):
                x = _inverted(net, x, name, stage, 1 if index else stage.stride, group)
    with net.scope("head"):
        x = net.silu(net.normalise(net.conv(x, "top", round_channels(1280 * wide), 1), "top.norm"))
        return net.dense(net.average_field(x), "head", CLASSES)


def _inverted(net: Network, x: str, name: str, stage: InvertedStage, stride: int, group: int) -> str:
    """Expand, depthwise, squeeze and excite, project."""
    channels = net.shape(x)[1]
    inside, y = channels * stage.expand, x
    if stage.expand > 1:
        y = net.silu(net.normalise(net.conv(y, f"{name}.expand", inside, 1), f"{name}.norm0"))
    size = math.gcd(inside, group)
    y = net.conv(y, f"{name}.depthwise", inside, stage.kernel, stride, inside // size)
    y = net.silu(net.normalise(y, f"{name}.norm1"))
    gate = net.silu(net.dense(net.average_field(y), f"{name}.squeeze", max(1, channels // 4)))
    gate = net.sigmoid(net.dense(gate, f"{name}.excite", inside))
    y = net.mul(y, net.reshape(gate, (-1, *net.shape(gate)[1:], 1, 1)))
    y = net.normalise(net.conv(y, f"{name}.project", stage.channels, 1), f"{name}.norm2")
    return net.add(x, y) if net.shape(x) == net.shape(y) else y


def alexnet(net: Network, images: str) -> str:
    """Logits of AlexNet in its one-tower form."""
    x = images
    plan = ((64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False))
    for index, (out, kernel, stride, pad, pool) in enumerate((*plan, (256, 3, 1, 1, True))):
        with net.scope(f"conv{index}"):
            x = net.conv(x, f"conv{index}", out, kernel, stride, pad=pad)
            x = net.relu(net.add(x, net.reshape(net.weight(f"conv{index}.bias", (out,)), (1, out, 1, 1))))
            x = net.max_pool(x, 3, 2, padded=False) if pool else x
    x = net.reshape(x, (-1, math.prod(net.shape(x)[1:])))
    for index, out in enumerate((4096, 4096, CLASSES)):
        with net.scope(f"fc{index}"):
            x = net.dense(x, f"fc{index}", out)
            x = net.relu(x) if index < 2 else x
    return x


INCEPTION = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
"""Channels of 1x1; 3x3 reduced and out; 5x5 reduced and out; pooled projection (Szegedy et al. 2014, table 1)."""
POOL_BEFORE = frozenset({2, 7})
"""Modules that follow a max-pool of stride two."""


def googlenet(net: Network, images: str) -> str:
    """Logits of GoogLeNet, its two auxiliary classifiers left out."""

    def unit(x: str, name: str, out: int, kernel: int, stride: int = 1) -> str:
        return net.relu(net.normalise(net.conv(x, name, out, kernel, stride), f"{name}.norm"))

    with net.scope("stem"):
        x = net.max_pool(unit(images, "stem0", 64, 7, 2), 3, 2)
        x = net.max_pool(unit(unit(x, "stem1", 64, 1), "stem2", 192, 3), 3, 2)
    for index, (one, three_in, three, five_in, five, pooled) in enumerate(INCEPTION):
        name = f"inception{index}"
        with net.scope(name):
            x = net.max_pool(x, 3, 2) if index in POOL_BEFORE else x
            branches = [
                unit(x, f"{name}.one", one, 1),
                unit(unit(x, f"{name}.three_in", three_in, 1), f"{name}.three", three, 3),
                unit(unit(x, f"{name}.five_in", five_in, 1), f"{name}.five", five, 5),
                unit(net.max_pool(x, 3, 1), f"{name}.pool", pooled, 1),
            ]
            x = net.concat(branches, 1)
    with net.scope("head"):
        return net.dense(net.average_field(x), "head", CLASSES)


MOBILE = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *((512, 1),) * 5,
    (1024, 2),
    (1024, 1),
)
"""Channels and stride of the separable convolutions of MobileNet v1 (Howard et al. 2017, table 1)."""


def mobilenet(net: Network, images: str) -> str:
    """Logits of MobileNet v1."""
    with net.scope("stem"):
        x = net.relu(net.normalise(net.conv(images, "stem", 32, 3, 2), "stem.norm"))
    for index, (out, stride) in enumerate(MOBILE):
        name = f"separable{index}"
        with net.scope(name):
            channels = net.shape(x)[1]
            x = net.conv(x, f"{name}.depthwise", channels, 3, stride, channels)
            x = net.relu(net.normalise(x, f"{name}.norm0"))
            x = net.relu(net.normalise(net.conv(x, f"{name}.pointwise", out, 1), f"{name}.norm1"))
    with net.scope("head"):
        return net.dense(net.average_field(x), "head", CLASSES)
