"""Independent optimizers in float64 NumPy, written from the textbook forms rather than from the rules under
test.

Each takes the unscaled gradient of every step and gives the weight after every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


def sgd(
    w, gradients: Iterable[np.ndarray], *, lr, wd=0.0, mm=0.0, dm=0.0, vs=1.0, nesterov=False
) -> Iterator:
    """v <- mm v + (1-dm) vs (g + wd w); w <- w - lr/vs v. With mm = 0 this is plain SGD with dampened
    steps.
    """
    v = np.zeros_like(w)
    for g in gradients:
        drive = (1 - dm) * vs * (g + wd * w)
        v = mm * v + drive
        w = w - lr / vs * (drive + mm * v if nesterov else v)
        yield w


def adam(
    w,
    gradients: Iterable[np.ndarray],
    *,
    lr,
    b1,
    b2,
    eps,
    wd=0.0,
    l2=False,
    bias=True,
    adamax=False,
    lamb=None,
) -> Iterator:
    """Adam (Kingma and Ba), AdaMax with ``adamax``, LAMB (You et al.) with ``lamb`` = the bound on the
    norm.
    """
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, gradient in enumerate(gradients, 1):
        g = gradient + (wd * w if l2 else 0)
        m = b1 * m + (1 - b1) * g
        v = np.maximum(b2 * v, np.abs(g)) if adamax else b2 * v + (1 - b2) * g**2
        m_hat = m / (1 - b1**t) if bias else m
        v_hat = v / (1 - b2**t) if bias and not adamax else v
        x = m_hat / ((v_hat if adamax else np.sqrt(v_hat)) + eps) + (0 if l2 else wd * w)
        ratio = 1.0
        if lamb is not None:
            nw, nx = np.linalg.norm(w), np.linalg.norm(x)
            ratio = min(nw, lamb) / nx if nw > 0 and nx > 0 and lamb > 0 else 1.0
        w = w - lr * ratio * x
        yield w


def adaptive(
    w, gradients: Iterable[np.ndarray], *, mode, lr, alpha, eps, momentum=0.0, wd=0.0, l2=False, tf=False
) -> Iterator:
    """AdaGrad, RMSProp (also centred), AdaDelta; ``tf`` is TensorFlow's way of writing RMSProp."""
    v1 = np.ones_like(w) if tf else np.zeros_like(w)
    v2, v3 = np.zeros_like(w), np.zeros_like(w)
    for gradient in gradients:
        g = gradient + (wd * w if l2 else 0)
        v1 = v1 + g**2 if mode == "AdaGrad" else alpha * v1 + (1 - alpha) * g**2
        if mode == "AdaDelta":
            x = g * np.sqrt(v2 + eps) / np.sqrt(v1 + eps)
            v2 = alpha * v2 + (1 - alpha) * x**2
        else:
            v2 = alpha * v2 + (1 - alpha) * g if mode == "CenteredRMSProp" else v2
            spread = v1 - v2**2 if mode == "CenteredRMSProp" else v1
            x = g / (np.sqrt(spread + eps) if tf else np.sqrt(spread) + eps)
        decay = 0 if l2 else wd * w
        if tf and momentum:
            v3 = momentum * v3 + lr * x
            w = w - v3 - lr * decay
        elif momentum:
            v3 = momentum * v3 + x
            w = w - lr * (v3 + decay)
        else:
            w = w - lr * (x + decay)
        yield w


def clipped(tensors: dict[str, np.ndarray], bound: float) -> dict[str, np.ndarray]:
    """Tensors scaled so that their common 2-norm is at most ``bound``."""
    norm = np.sqrt(sum((value**2).sum() for value in tensors.values()))
    return {name: value * (bound / max(norm, bound)) for name, value in tensors.items()}
