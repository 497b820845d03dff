"""Cases of `RawCase`: arithmetic, comparisons, activations, casts, colours and slopes.

Each operation has ordinary values and the corners of its definition: zeros of both signs, ties, ends of its domain.
"""

from __future__ import annotations

import numpy as np

from tests.tensorflow.comparing import RawCase, case

_random = np.random.RandomState(11)
ORDINARY = np.linspace(-3.1, 3.3, 24).astype(np.float32).reshape(4, 6)
CORNERS = np.array([-6, -2.5, -1.5, -1, -0.5, -0.0, 0, 0.5, 1, 1.5, 2.5, 6, 7], np.float32)
POSITIVE = (np.linspace(0.2, 3.7, 24).astype(np.float32)).reshape(4, 6)
OPEN = (np.linspace(-0.93, 0.95, 24).astype(np.float32)).reshape(4, 6)
EDGE = np.array([-1, -0.5, 0, 0.5, 1], np.float32)
ABOVE = (np.linspace(1.1, 4, 24).astype(np.float32)).reshape(4, 6)
UNREAL = np.array([np.inf, -np.inf, np.nan, 1, 0], np.float32)
LEFT, RIGHT = (
    v.reshape(-1).astype(np.float32) for v in np.meshgrid([-2, -1.5, -0.0, 0, 1, 1.5, 3], [-2, -1, 0, 1, 2])
)
WHOLE = np.array([[-7, -3, 0], [2, 5, 11]], np.int32)
DIVISORS = np.array([[2, -2, 3], [-3, 4, 1]], np.int32)
BITS = np.array([[1, 2, 60], [255, 1024, 77]], np.int32)
SHIFTS = np.array([[0, 1, 3], [2, 4, 7]], np.int32)
TRUTH = np.array([True, True, False, False])
OTHER = np.array([True, False, True, False])
ROWS = (_random.randn(3, 4, 5)).astype(np.float32)
TIES = np.array([[1, 3, 3, 0], [2, 2, 2, 2], [0, -1, 0, 0]], np.float32)
COLOURS = (_random.rand(2, 3, 4, 3) * 0.9 + 0.05).astype(np.float32)
GREYS = np.array(
    [[[0.5, 0.5, 0.5], [0, 0, 0], [1, 1, 1], [1, 0, 0], [0.2, 0.7, 0.7], [0.3, 0.3, 0.1]]], np.float32
)

_ANYWHERE = [
    "Abs",
    "Exp",
    "Expm1",
    "Sin",
    "Cos",
    "Tan",
    "Atan",
    "Sinh",
    "Cosh",
    "Tanh",
    "Sigmoid",
    "Erf",
    "Erfc",
    "Relu",
    "Relu6",
    "Elu",
    "Selu",
    "Softplus",
    "Softsign",
    "Neg",
    "Sign",
    "Square",
    "Asinh",
    "OnesLike",
    "ZerosLike",
    "Rint",
    "Round",
    "Floor",
    "Ceil",
    "BesselI0e",
    "BesselI1e",
    "BesselI0",
    "BesselI1",
]
_DOMAINS = {
    "Log": POSITIVE,
    "Log1p": POSITIVE,
    "Sqrt": POSITIVE,
    "Rsqrt": POSITIVE,
    "Reciprocal": POSITIVE,
    "Inv": POSITIVE,
    "Lgamma": POSITIVE,
    "Digamma": POSITIVE,
    "Asin": OPEN,
    "Acos": OPEN,
    "Atanh": OPEN,
    "Acosh": ABOVE,
    "Erfinv": OPEN,
    "Ndtri": (OPEN + 1) / 2,
}
_EDGES = {
    "Log": CORNERS,
    "Log1p": CORNERS,
    "Sqrt": CORNERS,
    "Rsqrt": CORNERS[CORNERS != 0],
    "Reciprocal": CORNERS,
    "Inv": CORNERS,
    "Lgamma": CORNERS,
    "Digamma": np.array([-2.5, -1.5, -0.5, 0.5, 6, 7], np.float32),
    "Asin": EDGE,
    "Acos": EDGE,
    "Atanh": EDGE,
    "Acosh": np.array([0.5, 1, 2], np.float32),
    "Erfinv": EDGE,
    "Ndtri": (EDGE[1:-1] + 1) / 2,
}
_LOOSE = {"Lgamma": 1e-4, "Digamma": 1e-4, "Erfinv": 1e-4, "Ndtri": 1e-4, "Tan": 1e-4}
_INPUT = dict.fromkeys(["Relu", "Relu6", "Elu", "Selu", "Softplus", "Softsign"], "features")
UNARY = [
    *(
        case(op, label, **{_INPUT.get(op, "x"): values})
        for op in _ANYWHERE
        for label, values in (("", ORDINARY), ("corners", CORNERS))
        if (op, label) != ("BesselI1", "corners")  # TensorFlow says that its slope at 0 is 1; it is 1/2.
    ),
    *(case(op, "", x=values, _tolerance=_LOOSE.get(op, 2e-5)) for op, values in _DOMAINS.items()),
    *(
        case(op, "corners", x=values, _tolerance=_LOOSE.get(op, 2e-5), _skip_half="overflow")
        for op, values in _EDGES.items()
    ),
    *(
        case(op, "unreal", x=UNREAL, _skip_half="halves are clipped")
        for op in (
            [
                "Abs",
                "Exp",
                "Log",
                "Sqrt",
                "Tanh",
                "Sigmoid",
                "Sign",
                "Neg",
                "Square",
                "Floor",
                "Ceil",
                "Round",
                "Erf",
                "Log1p",
                "Expm1",
                "Reciprocal",
            ]
        )
    ),
    *(
        case(op, "unreal", features=UNREAL, _skip_half="halves are clipped")
        for op in ["Relu", "Relu6", "Softplus"]
    ),
    case("Elu", "unreal", features=UNREAL, _gradient=False, _skip_half="halves are clipped"),
    *(case(op, "unreal", x=UNREAL, _skip_half="halves are clipped") for op in ["IsNan", "IsInf", "IsFinite"]),
    case("LeakyRelu", features=CORNERS, alpha=0.3),
    case("Neg", "whole", x=WHOLE),
    case("Abs", "whole", x=WHOLE),
    case("Sign", "whole", x=WHOLE),
    case("Square", "whole", x=WHOLE),
    case("StopGradient", input=ORDINARY),
    case("PreventGradient", input=ORDINARY, message="", _gradient=False),
    case("Softmax", logits=ROWS),
    case("LogSoftmax", logits=ROWS * 20),
    case("L2Loss", t=ROWS),
]

_BINARY = [
    "Add",
    "AddV2",
    "Sub",
    "Mul",
    "RealDiv",
    "Div",
    "DivNoNan",
    "Maximum",
    "Minimum",
    "SquaredDifference",
    "Pow",
    "FloorDiv",
    "FloorMod",
    "Atan2",
]
_COMPARED = ["Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual"]
_WIDE = np.array([[2], [0.5], [-1.5]], np.float32)
_LONG = np.array([1, -2, 0.25, 3], np.float32)
BINARY = [
    *(
        case(
            op,
            "corners",
            x=LEFT,
            y=RIGHT,
            _skip_half="overflow" if op in ("RealDiv", "Div", "Pow", "FloorDiv") else "",
        )
        for op in (*_BINARY, *_COMPARED)
        if op not in ("FloorMod", "FloorDiv", "Atan2")
    ),
    *(
        case(op, "corners", x=LEFT[RIGHT != 0], y=RIGHT[RIGHT != 0])
        for op in ("FloorMod", "FloorDiv", "Atan2")
    ),
    *(case(op, "broadcast", x=_WIDE, y=_LONG) for op in _BINARY if op != "Pow"),
    case("Pow", "broadcast", x=np.abs(_WIDE), y=_LONG),
    *(
        case(op, "whole", x=WHOLE, y=DIVISORS)
        for op in [
            "Add",
            "AddV2",
            "Sub",
            "Mul",
            "Div",
            "Maximum",
            "Minimum",
            "FloorDiv",
            "FloorMod",
            "TruncateDiv",
            "TruncateMod",
            "Mod",
            "SquaredDifference",
            "Less",
            "Equal",
            "NotEqual",
            "GreaterEqual",
        ]
    ),
    case("Pow", "whole", x=WHOLE, y=np.abs(DIVISORS)),
    case(
        "FloorDiv",
        "tenths",
        x=np.array([1, 0.3, -1, 6], np.float32),
        y=np.array([0.1, 0.1, 0.1, 0.7], np.float32),
        _skip_half="tenths of halves",
    ),
    case("Mod", "floats", x=LEFT[RIGHT != 0], y=RIGHT[RIGHT != 0], _gradient=False),
    case("TruncateMod", "floats", x=LEFT[RIGHT != 0], y=RIGHT[RIGHT != 0], _gradient=False),
    case("TruncateDiv", "broadcast", x=WHOLE, y=np.array([2, -3, 4], np.int32)),
    *(
        case(
            op,
            "ends",
            x=np.array([np.inf, 2, 0, -1], np.float32),
            y=np.array([0, 0, 0, 3], np.float32),
            _skip_half="halves are clipped",
        )
        for op in ("MulNoNan", "DivNoNan")
    ),
    case("MulNoNan", "", x=LEFT, y=RIGHT),
    *(
        case(
            op,
            "",
            x=np.array([0, 0, 1, 2, 0.5], np.float32),
            y=np.array([0, 2, 0.5, 3, 1], np.float32),
            _skip_half="overflow",
        )
        for op in ("Xlogy", "Xdivy", "Xlog1py")
    ),
    case(
        "NextAfter",
        x1=np.array([0, 1, 1, -3], np.float32),
        x2=np.array([1, 2, 0, -3], np.float32),
        _exact=True,
        _skip_half="defined for wide types",
    ),
    case(
        "ApproximateEqual",
        x=ORDINARY,
        y=ORDINARY + np.float32(0.01) * np.arange(24, dtype=np.float32).reshape(4, 6),
        tolerance=0.1,
        _skip_half="the tolerance as a half",
    ),
    case("ClipByValue", t=CORNERS, clip_value_min=-1.0, clip_value_max=1.5),
    case(
        "ClipByValue",
        "given",
        t=CORNERS,
        clip_value_min=np.float32(-1).reshape(()),
        clip_value_max=np.float32(1.5).reshape(()),
    ),
    case("Select", condition=ORDINARY > 0.3, x=ORDINARY, y=POSITIVE),
    case("Select", "rows", condition=TRUTH, x=ORDINARY, y=POSITIVE),
    case("SelectV2", condition=ORDINARY > 0.3, t=ORDINARY, e=POSITIVE[:1]),
    case("AddN", inputs=[ORDINARY, POSITIVE, ORDINARY]),
    case("AccumulateNV2", inputs=[ORDINARY, POSITIVE], shape=[4, 6]),
    *(case(op, "", x=TRUTH, y=OTHER) for op in ("LogicalAnd", "LogicalOr")),
    case("LogicalNot", x=TRUTH),
    *(
        case(op, "", x=BITS, y=SHIFTS)
        for op in ["LeftShift", "RightShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor"]
    ),
    case("RightShift", "negative", x=-BITS, y=SHIFTS),
    case("Invert", x=BITS),
    case("PopulationCount", x=BITS),
    case("BiasAdd", value=ROWS, bias=np.arange(5, dtype=np.float32)),
    case("BiasAdd", "first", value=ROWS, bias=np.arange(4, dtype=np.float32), data_format="NCHW"),
    case("BiasAddV1", value=ROWS, bias=np.arange(5, dtype=np.float32)),
]

CASTS = [
    *(
        case("Cast", f"{source.dtype.name}-{to}", x=source, DstT=to)
        for source in (ORDINARY, WHOLE, TRUTH)
        for to in ("float32", "int32", "bool", "uint8", "int8", "int16", "uint32")
        if not (to.startswith("u") and source is not TRUTH)
    ),
    case("Cast", "truncated", x=CORNERS, DstT="int32", Truncate=True),
    case("Bitcast", "whole", input=ORDINARY, type="int32", _skip_half="other size"),
    case("Bitcast", "float", input=WHOLE, type="float32", _gradient=False),
    case("Bitcast", "smaller", input=WHOLE, type="uint8"),
    case("Bitcast", "larger", input=BITS.astype(np.int16).reshape(3, 2), type="int32"),
]

IMAGES_OF_COLOURS = [
    case("RGBToHSV", images=COLOURS, _skip_half="float32 alone"),
    case("RGBToHSV", "greys", images=GREYS, _skip_half="float32 alone", _gradient=False),
    case("HSVToRGB", images=COLOURS, _skip_half="float32 alone"),
    case("AdjustContrastv2", images=COLOURS, contrast_factor=1.7),
    case("AdjustSaturation", images=COLOURS, scale=0.6, _half_tolerance=1e-2),
    case("AdjustSaturation", "more", images=COLOURS, scale=2.5, _half_tolerance=1e-2),
    case("AdjustHue", images=COLOURS, delta=0.3, _half_tolerance=1e-2),
    case("AdjustHue", "back", images=COLOURS, delta=-0.4, _half_tolerance=1e-2),
    *(
        case(
            "FakeQuantWithMinMaxArgs",
            f"{bits}{narrow}",
            inputs=ORDINARY,
            min=-2.0,
            max=2.5,
            num_bits=bits,
            narrow_range=narrow,
            _skip_half="float32 alone",
        )
        for bits, narrow in ((8, False), (4, True))
    ),
    *(
        case(
            "FakeQuantWithMinMaxVars",
            f"{bits}{narrow}",
            inputs=ORDINARY,
            min=np.float32(-2.1).reshape(()),
            max=np.float32(2.4).reshape(()),
            num_bits=bits,
            narrow_range=narrow,
            _skip_half="float32 alone",
        )
        for bits, narrow in ((8, False), (5, True))
    ),
    case(
        "FakeQuantWithMinMaxVarsPerChannel",
        inputs=ORDINARY,
        min=np.linspace(-3, -1, 6).astype(np.float32),
        max=np.linspace(1, 2.9, 6).astype(np.float32),
        _skip_half="float32 alone",
    ),
]

_SLOPES = np.linspace(-1.4, 1.2, 24).astype(np.float32).reshape(4, 6)
SLOPES = [
    *(case(op, y=POSITIVE, dy=_SLOPES) for op in ("SqrtGrad", "RsqrtGrad", "InvGrad", "ReciprocalGrad")),
    *(case(op, y=OPEN, dy=_SLOPES) for op in ("TanhGrad", "SigmoidGrad")),
    *(case(op, gradients=_SLOPES, features=ORDINARY) for op in ("ReluGrad", "Relu6Grad")),
    case("SoftplusGrad", gradients=_SLOPES, features=ORDINARY),
    case("SoftsignGrad", gradients=_SLOPES, features=ORDINARY, _gradient=False),
    *(case(op, gradients=_SLOPES, outputs=OPEN) for op in ("EluGrad", "SeluGrad")),
    case("LeakyReluGrad", gradients=_SLOPES, features=ORDINARY, alpha=0.3),
    case("BiasAddGrad", out_backprop=ROWS),
    case("BiasAddGrad", "channels_first", out_backprop=ROWS[..., None], data_format="NCHW"),
]  # fmt: skip
"""Operations that TensorFlow's own gradients consist of."""

POINTWISE: list[RawCase] = [
    *SLOPES,
    *UNARY,
    *BINARY,
    *CASTS,
    *IMAGES_OF_COLOURS,
]
