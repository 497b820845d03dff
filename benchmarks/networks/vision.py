"""Convolutional networks: ResNet, EfficientNet, AlexNet; NHWC activations, HWIO weights.

A network is a function ``(parameters, images) -> logits`` and a dict of parameter shapes, made together by
a `Maker` that records each weight the first time it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Shapes = dict[str, tuple[int, ...]]


class Maker:
    """Hands out parameters by name; on the recording pass it notes their shapes."""

    def __init__(self, parameters: dict[str, Any] | None, dtype: Any) -> None:
        self.parameters, self.dtype = parameters, dtype
        self.shapes: Shapes = {}

    def get(self, name: str, shape: tuple[int, ...]) -> Any:
        """The parameter called ``name``."""
        self.shapes[name] = shape
        if self.parameters is None:
            import jax.numpy as jnp

            return jnp.zeros(shape, self.dtype)
        return self.parameters[name]


def conv(make: Maker, name: str, x: Any, out: int, kernel: int, stride: int = 1, groups: int = 1) -> Any:
    """A convolution with padding that keeps the field (before striding)."""
    from jax import lax

    weight = make.get(name, (kernel, kernel, x.shape[-1] // groups, out))
    return lax.conv_general_dilated(
        x,
        weight,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def norm(make: Maker, name: str, x: Any, kind: str, group_size: int = 16, train: bool = True) -> Any:
    """Batch or group normalisation, or none. In inference batch norm is folded into the convolution before
    it."""
    if kind == "none" or (kind == "batch" and not train):
        return x + make.get(name + ".beta", (x.shape[-1],))
    gamma, beta = make.get(name + ".gamma", (x.shape[-1],)), make.get(name + ".beta", (x.shape[-1],))
    if kind == "group":
        groups = x.shape[-1] // math.gcd(x.shape[-1], group_size)
        size = x.shape[-1] // groups
        shaped = x.reshape(x.shape[0], -1, groups, size)
        scaled = normalise(shaped, gamma.reshape(groups, size), beta.reshape(groups, size), (1, 3))
        return scaled.reshape(x.shape)
    return normalise(x, gamma, beta, (0, 1, 2))


def normalise(x: Any, gamma: Any, beta: Any, axes: tuple[int, ...]) -> Any:
    """Zero mean and unit variance along ``axes``, scaled and shifted, with the library's own gradient.

    It keeps the whitened values and nothing else of this size.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    count = math.prod(x.shape[axis] for axis in axes)
    outer = tuple(range(x.ndim - gamma.ndim))

    def whiten(x: Any) -> tuple[Any, Any]:
        mean = jnp.sum(x, axes, keepdims=True) * (1.0 / count)
        square = jnp.sum(x * x, axes, keepdims=True) * (1.0 / count)
        scale = lax.rsqrt(square - mean * mean + 1e-3)
        return (x - mean) * scale, scale

    @jax.custom_vjp
    def apply(x: Any, gamma: Any, beta: Any) -> Any:
        return whiten(x)[0] * gamma + beta

    def forward(x: Any, gamma: Any, beta: Any) -> Any:
        whitened, scale = whiten(x)
        return whitened * gamma + beta, (whitened, scale, gamma)

    def backward(saved: Any, gradient: Any) -> Any:
        whitened, scale, gamma = saved
        product = gradient * whitened
        for_gamma, for_beta = jnp.sum(product, outer), jnp.sum(gradient, outer)
        if axes == outer:
            first, second = for_beta * gamma, for_gamma * gamma
        else:
            first = jnp.sum(gradient * gamma, axes, keepdims=True)
            second = jnp.sum(product * gamma, axes, keepdims=True)
        through = (gradient * gamma - first * (1.0 / count) - whitened * second * (1.0 / count)) * scale
        return through, for_gamma, for_beta

    apply.defvjp(forward, backward)
    return apply(x, gamma, beta)


def relu(x: Any) -> Any:
    """Rectifier in place: its gradient reads its own output."""
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def apply(x: Any) -> Any:
        return jnp.maximum(x, 0)

    def forward(x: Any) -> Any:
        y = jnp.maximum(x, 0)
        return y, y

    def backward(y: Any, gradient: Any) -> Any:
        return (jnp.where(y > 0, gradient, 0).astype(gradient.dtype),)

    apply.defvjp(forward, backward)
    return apply(x)


def max_pool(x: Any, window: int, stride: int) -> Any:
    """Max-pooling."""
    from jax import lax

    return lax.reduce_window(x, -math.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), "SAME")


def dense(make: Maker, name: str, x: Any, out: int) -> Any:
    """A fully connected layer."""
    return x @ make.get(name, (x.shape[-1], out)) + make.get(name + ".bias", (out,))


def resnet(make: Maker, images: Any, *, depth: int, kind: str, train: bool, recompute: bool) -> Any:
    """ResNet-18, 34, 50, 101 (He et al.), ResNeXt-101 32x4d as depth 1011; v1.5: the stride is in the 3x3."""
    import jax
    import jax.numpy as jnp

    blocks = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 1011: (3, 4, 23, 3)}[
        depth
    ]
    bottleneck = depth >= 50
    groups, width = (32, 2) if depth == 1011 else (1, 1)
    with jax.named_scope("stem"):
        x = relu(norm(make, "stem.norm", conv(make, "stem", images, 64, 7, 2), kind, train=train))
        x = max_pool(x, 3, 2)

    def block(x: Any, name: str, channels: int, stride: int) -> Any:
        out = channels * (4 if bottleneck else 1)
        y = x
        plan = (
            ((1, channels * width, 1, 1), (3, channels * width, stride, groups), (1, out, 1, 1))
            if bottleneck
            else ((3, channels, stride, 1), (3, channels, 1, 1))
        )
        for index, (kernel, features, step, grouped) in enumerate(plan):
            y = conv(make, f"{name}.conv{index}", y, features, kernel, step, grouped)
            y = norm(make, f"{name}.norm{index}", y, kind, train=train)
            if index < len(plan) - 1:
                y = relu(y)
        if x.shape != y.shape:
            x = norm(
                make, f"{name}.down.norm", conv(make, f"{name}.down", x, out, 1, stride), kind, train=train
            )
        return relu(x + y)

    for stage, count in enumerate(blocks):
        for index in range(count):
            name = f"stage{stage}.block{index}"
            stride = 2 if stage and not index else 1
            with jax.named_scope(name):
                channels = 64 * 2**stage
                x = _maybe_checkpoint(
                    make, lambda x, n=name, c=channels, s=stride: block(x, n, c, s), x, recompute
                )
    with jax.named_scope("head"):
        return dense(make, "head", jnp.mean(x, (1, 2)), 1000)


def _maybe_checkpoint(make: Maker, function: Callable[[Any], Any], x: Any, recompute: bool) -> Any:
    """Recompute the block in the backward pass: its parameters become arguments of the checkpoint."""
    import jax

    if not recompute or make.parameters is None:
        return function(x)
    everything = make.parameters

    def inner(parameters: dict[str, Any], x: Any) -> Any:
        make.parameters = parameters
        try:
            return function(x)
        finally:
            make.parameters = everything

    return jax.checkpoint(inner)(everything, x)


def efficientnet(
    make: Maker, images: Any, *, variant: str, kind: str, train: bool, group_size: int = 1
) -> Any:
    """EfficientNet-B0 or B4 (Tan and Le); ``group_size`` of the depthwise convolutions as on the IPU (1 or
    16)."""
    import jax
    import jax.numpy as jnp

    wide, deep = {"b0": (1.0, 1.0), "b4": (1.4, 1.8)}[variant]

    def channels(c: int) -> int:
        scaled = c * wide
        rounded = max(8, int(scaled + 4) // 8 * 8)
        return rounded + 8 if rounded < 0.9 * scaled else rounded

    plan = ((1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2), (6, 112, 3, 5, 1))
    plan += ((6, 192, 4, 5, 2), (6, 320, 1, 3, 1))
    if group_size > 1:
        plan = tuple((4 if e == 6 else e, c, n, k, s) for e, c, n, k, s in plan)
    x = jax.nn.silu(
        norm(make, "stem.norm", conv(make, "stem", images, channels(32), 3, 2), kind, train=train)
    )
    for stage, (expand, out, count, kernel, stride) in enumerate(plan):
        for index in range(math.ceil(count * deep)):
            name = f"stage{stage}.block{index}"
            with jax.named_scope(name):
                x = _mbconv(
                    make,
                    x,
                    name,
                    expand,
                    channels(out),
                    kernel,
                    stride if not index else 1,
                    kind,
                    train,
                    group_size,
                )
    x = jax.nn.silu(norm(make, "top.norm", conv(make, "top", x, channels(1280), 1), kind, train=train))
    return dense(make, "head", jnp.mean(x, (1, 2)), 1000)


def _mbconv(
    make: Maker,
    x: Any,
    name: str,
    expand: int,
    out: int,
    kernel: int,
    stride: int,
    kind: str,
    train: bool,
    group: int,
) -> Any:
    import jax
    import jax.numpy as jnp

    inside, y = x.shape[-1] * expand, x
    if expand > 1:
        y = jax.nn.silu(
            norm(make, name + ".n0", conv(make, name + ".expand", y, inside, 1), kind, train=train)
        )
    size = math.gcd(inside, group)
    y = conv(make, name + ".depthwise", y, inside, kernel, stride, inside // size)
    y = jax.nn.silu(norm(make, name + ".n1", y, kind, train=train))
    squeezed = jnp.mean(y, (1, 2))
    gate = jax.nn.silu(dense(make, name + ".se0", squeezed, max(1, x.shape[-1] // 4)))
    y = y * jax.nn.sigmoid(dense(make, name + ".se1", gate, inside))[:, None, None, :]
    y = norm(make, name + ".n2", conv(make, name + ".project", y, out, 1), kind, train=train)
    return x + y if x.shape == y.shape else y


def alexnet(make: Maker, images: Any) -> Any:
    """AlexNet, one-tower form."""
    import jax

    x = images
    for index, (out, kernel, stride, pool) in enumerate(
        ((64, 11, 4, True), (192, 5, 1, True), (384, 3, 1, False), (256, 3, 1, False), (256, 3, 1, True))
    ):
        with jax.named_scope(f"conv{index}"):
            x = relu(conv(make, f"conv{index}", x, out, kernel, stride) + make.get(f"bias{index}", (out,)))
            x = max_pool(x, 3, 2) if pool else x
    x = x.reshape(x.shape[0], -1)
    for index, out in enumerate((4096, 4096, 1000)):
        with jax.named_scope(f"fc{index}"):
            x = dense(make, f"fc{index}", x, out)
            x = relu(x) if index < 2 else x
    return x
