"""The networks of `train_step`, written once for both sides: each side gives the layers, weights come by name.

Needs the standard library only, so that the peer's interpreter reads it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

BATCH, PIXELS, CLASSES, RATE = 16, 64, 100, 0.002
"""The rate is small because MobileNet's first gradients are ill-conditioned: at ten times the rate torch's second loss
in float32 is 0.6 % off its own in float64, so losses would say nothing."""


class Layers(Protocol):
    """What a network is made of. Images are ``[N, C, H, W]``."""

    def conv(self, x: Any, name: str, shape: tuple[int, ...], stride: int, pad: int, groups: int) -> Any:
        """Convolution without bias."""

    def norm(self, x: Any, name: str, channels: int) -> Any:
        """Batch normalisation by the batch's statistics."""

    def relu(self, x: Any) -> Any: ...

    def add(self, a: Any, b: Any) -> Any: ...

    def max_pool(self, x: Any) -> Any:
        """3x3, stride 2, padding 1."""

    def dense(self, x: Any, name: str, shape: tuple[int, int]) -> Any:
        """Mean over positions, then logits ``[N, CLASSES]``."""


def _unit(
    on: Layers, x: Any, name: str, sizes: tuple[int, int], kernel: int = 3, stride: int = 1, groups: int = 1
) -> Any:
    """Convolution and normalisation."""
    inputs, outputs = sizes
    shape = (outputs, inputs // groups, kernel, kernel)
    x = on.conv(x, f"{name}.w", shape, stride, kernel // 2, groups)
    return on.norm(x, name, outputs)


def resnet18(on: Layers, x: Any) -> Any:
    """ResNet-18: 11.2 million weights."""
    x = on.max_pool(on.relu(_unit(on, x, "stem", (3, 64), 7, 2)))
    inputs = 64
    for stage, outputs in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            name = f"s{stage}b{block}"
            y = on.relu(_unit(on, x, f"{name}a", (inputs, outputs), 3, stride))
            y = _unit(on, y, f"{name}b", (outputs, outputs))
            if stride > 1:
                x = _unit(on, x, f"{name}c", (inputs, outputs), 1, stride)
            x = on.relu(on.add(x, y))
            inputs = outputs
    return on.dense(x, "head", (512, CLASSES))


def mobilenet(on: Layers, x: Any) -> Any:
    """MobileNet (v1): depthwise convolutions and convolutions of one position, 3.3 million weights."""
    x = on.relu(_unit(on, x, "stem", (3, 32), 3, 2))
    inputs = 32
    widths = (
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
    for place, (outputs, stride) in enumerate(widths):
        x = on.relu(_unit(on, x, f"d{place}", (inputs, inputs), 3, stride, inputs))
        x = on.relu(_unit(on, x, f"p{place}", (inputs, outputs), 1))
        inputs = outputs
    return on.dense(x, "head", (1024, CLASSES))


NETWORKS: dict[str, Callable[[Layers, Any], Any]] = {"resnet18": resnet18, "mobilenet": mobilenet}


class Shapes:
    """A side that only writes down which weights there are: ``weights`` by name."""

    def __init__(self) -> None:
        self.weights: dict[str, tuple[int, ...]] = {}

    def conv(self, x: Any, name: str, shape: tuple[int, ...], stride: int, pad: int, groups: int) -> Any:
        self.weights[name] = shape

    def norm(self, x: Any, name: str, channels: int) -> Any:
        self.weights |= {f"{name}.scale": (channels,), f"{name}.bias": (channels,)}

    def relu(self, x: Any) -> Any:
        return x

    def add(self, a: Any, b: Any) -> Any:
        return a

    def max_pool(self, x: Any) -> Any:
        return x

    def dense(self, x: Any, name: str, shape: tuple[int, int]) -> Any:
        self.weights[name] = shape


def weight_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a network's weights."""
    shapes = Shapes()
    NETWORKS[name](shapes, None)
    return shapes.weights
