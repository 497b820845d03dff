"""Cases of `RawCase`: reductions, running sums, losses, classes, and special functions of several arguments."""

from __future__ import annotations

import numpy as np

from tests.tensorflow.comparing import RawCase, case
from tests.tensorflow.raw_pointwise import ROWS, TIES, WHOLE

_random = np.random.RandomState(13)

_REDUCED = ["Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm"]
REDUCTIONS = [
    *(
        case(op, label, input=ROWS, axis=axis, keep_dims=keep)
        for op in _REDUCED
        for label, axis, keep in (
            ("one", 1, False),
            ("two", [0, -1], True),
            ("all", [0, 1, 2], False),
            ("none", [], False),
        )
    ),
    *(case(op, "ties", input=TIES, axis=1, keep_dims=False) for op in ("Max", "Min", "Sum", "Mean")),
    case("Prod", "zeros", input=TIES, axis=1, keep_dims=False),
    *(
        case(op, "whole", input=WHOLE, axis=1, keep_dims=False)
        for op in ["Sum", "Mean", "Max", "Min", "Prod"]
    ),
    *(case(op, "", input=ROWS > 0.4, axis=[1], keep_dims=False) for op in ("All", "Any")),
    case("Sum", "long", input=np.full((2, 3000), 1.5, np.float32), axis=1, keep_dims=False),
    case("Mean", "long", input=np.full((2, 70000), 1.5, np.float32), axis=1, keep_dims=False),
    case("EuclideanNorm", "large", input=np.full((2, 9), 300, np.float32), axis=1, keep_dims=False),
    case("L2Loss", "large", t=np.full(900, 10, np.float32)),
    *(
        case(op, f"{exclusive}{reverse}", x=ROWS, axis=-2, exclusive=exclusive, reverse=reverse)
        for op in ("Cumsum", "Cumprod", "CumulativeLogsumexp")
        for exclusive in (False, True)
        for reverse in (False, True)
    ),
    case("Cumsum", "whole", x=WHOLE, axis=1, exclusive=True, reverse=False),
    *(case(op, f"axis{axis}", input=ROWS, dimension=axis) for op in ("ArgMax", "ArgMin") for axis in (0, -1)),
    *(case(op, "ties", input=TIES, dimension=1, output_type="int32") for op in ("ArgMax", "ArgMin")),
]

LOGITS = (_random.randn(5, 4) * 3).astype(np.float32)
SHARES = np.array(
    [[0.1, 0.2, 0.3, 0.4], [1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4, [0, 0, 0.3, 0.3]], np.float32
)
LOSSES = [
    case("SoftmaxCrossEntropyWithLogits", features=LOGITS, labels=SHARES, _outputs=(0,)),
    case(
        "SoftmaxCrossEntropyWithLogits",
        "backprop",
        features=LOGITS,
        labels=SHARES,
        _outputs=(1,),
        _gradient=False,
    ),
    case(
        "SparseSoftmaxCrossEntropyWithLogits",
        features=LOGITS,
        labels=np.array([0, 3, 1, 1, 2], np.int32),
        _outputs=(0,),
    ),
    case(
        "SparseSoftmaxCrossEntropyWithLogits",
        "backprop",
        features=LOGITS,
        labels=np.array([0, 3, 1, 1, 2], np.int32),
        _outputs=(1,),
        _gradient=False,
    ),
    case(
        "InTopKV2",
        predictions=LOGITS,
        targets=np.array([0, 3, 1, 1, 2], np.int32),
        k=2,
        _skip_half="float32 alone",
    ),
    case(
        "InTopKV2",
        "ties",
        predictions=np.array([[1, 1, 0], [0, 1, 1], [1, 1, 1]], np.float32),
        targets=np.array([1, 0, 2], np.int32),
        k=1,
        _skip_half="float32 alone",
    ),
    case(
        "Bucketize",
        input=np.array([[-1, 0.25, 0.2], [0.5, 0.8, np.inf]], np.float32),
        boundaries=[0.25, 0.5, 0.75],
        _skip_half="float32 alone",
    ),
    case("Bucketize", "integers", input=WHOLE, boundaries=[-3.0, 0.0, 4.5, 11.0], _skip_half="integers"),
    case("Bucketize", "one class", input=WHOLE, boundaries=[], _skip_half="integers"),
]

_SHAPE = np.linspace(0.3, 5, 12).astype(np.float32)
_AT = np.linspace(0.1, 6, 12).astype(np.float32)[::-1].copy()
SPECIAL = [
    case("Igamma", a=_SHAPE, x=_AT, _tolerance=2e-4, _skip_half="differentiates badly in halves"),
    case("Igammac", a=_SHAPE, x=_AT, _tolerance=2e-4, _skip_half="differentiates badly in halves"),
    case(
        "Betainc",
        a=_SHAPE,
        b=_AT,
        x=np.linspace(0.05, 0.95, 12).astype(np.float32),
        _tolerance=2e-4,
        _skip_half="float32 alone",
    ),
    case(
        "Polygamma",
        a=np.array([1, 2, 3, 0, 1], np.float32),
        x=np.array([0.5, 1, 2, 3, 4], np.float32),
        _tolerance=2e-4,
        _skip_half="float32 alone",
    ),
    case(
        "Zeta",
        x=np.array([1.5, 2, 3, 4, 7], np.float32),
        q=np.array([0.5, 1, 2, 3, 4], np.float32),
        _tolerance=2e-4,
        _skip_half="float32 alone",
    ),
]

REDUCED: list[RawCase] = [*REDUCTIONS, *LOSSES, *SPECIAL]
