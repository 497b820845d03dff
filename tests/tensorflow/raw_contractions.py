"""Cases of `RawCase`: products, convolutions, pools, resizing, norms, linear algebra, and updates of variables."""

from __future__ import annotations

import numpy as np

from tests.tensorflow.comparing import RawCase, case

_random = np.random.RandomState(13)


def _values(*shape: int) -> np.ndarray:
    return (_random.rand(*shape) - 0.5).astype(np.float32)


LEFT, RIGHT = _values(3, 4), _values(4, 5)
BATCH, OTHERS = _values(2, 3, 4), _values(2, 4, 5)
IMAGE, VOLUME = _values(2, 7, 8, 4), _values(2, 4, 6, 5, 2)
PRODUCTS = [
    *(
        case(
            "MatMul",
            f"{a}{b}",
            a=LEFT.T.copy() if a else LEFT,
            b=RIGHT.T.copy() if b else RIGHT,
            transpose_a=a,
            transpose_b=b,
        )
        for a in (False, True)
        for b in (False, True)
    ),
    *(
        case(
            op,
            f"{a}{b}",
            x=BATCH.swapaxes(1, 2).copy() if a else BATCH,
            y=OTHERS.swapaxes(1, 2).copy() if b else OTHERS,
            adj_x=a,
            adj_y=b,
        )
        for op in ("BatchMatMul", "BatchMatMulV2")
        for a in (False, True)
        for b in (False, True)
    ),
    case("BatchMatMulV2", "broadcast", x=_values(3, 1, 2, 4), y=OTHERS),
    case("BatchMatMulV3", x=BATCH, y=OTHERS, Tout="float32", _skip_half="says its type"),
    *(
        case("Einsum", equation.replace(",", "_"), inputs=[BATCH, OTHERS], equation=equation)
        for equation in ("bij,bjk->bik", "bij,cjk->bcik", "bij,bjk->ik")
    ),
    case("Einsum", "trace", inputs=[_values(3, 4, 4)], equation="bii->b"),
    case("Einsum", "ellipsis", inputs=[BATCH, _values(4, 6)], equation="...j,jk->...k"),
    case("Cross", a=_values(4, 3), b=_values(4, 3)),
    case("Cross", "whole", a=np.array([[1, 2, 3]], np.int32), b=np.array([[4, -5, 6]], np.int32)),
]

_CONVOLVED = [
    ("same", {"strides": [1, 2, 2, 1], "padding": "SAME"}),
    ("valid", {"strides": [1, 1, 2, 1], "padding": "VALID"}),
    ("dilated", {"strides": [1, 1, 1, 1], "padding": "SAME", "dilations": [1, 2, 2, 1]}),
    (
        "explicit",
        {"strides": [1, 1, 1, 1], "padding": "EXPLICIT", "explicit_paddings": [0, 0, 1, 2, 0, 3, 0, 0]},
    ),
]
CONVOLUTIONS = [
    *(
        case("Conv2D", label, input=IMAGE, filter=_values(3, 2, 4, 6), **options)
        for label, options in _CONVOLVED
    ),
    case("Conv2D", "grouped", input=IMAGE, filter=_values(3, 3, 2, 6), strides=[1, 1, 1, 1], padding="SAME"),
    *(
        # TensorFlow's gradient on the CPU passes over dilations.
        case(
            "DepthwiseConv2dNative",
            label,
            input=IMAGE,
            filter=_values(3, 3, 4, 2),
            **options,
            _gradient=label != "dilated",
        )
        for label, options in _CONVOLVED
        if label != "valid"
    ),
    *(
        case(
            "Conv2DBackpropInput",
            label,
            input_sizes=[2, 7, 8, 4],
            filter=_values(3, 2, 4, 6),
            out_backprop=_values(*shape),
            **options,
        )
        for (label, options), shape in zip(
            _CONVOLVED, [(2, 4, 4, 6), (2, 5, 4, 6), (2, 7, 8, 6), (2, 8, 10, 6)], strict=True
        )
        if label != "dilated"
    ),
    *(
        case(
            "Conv3D",
            padding,
            input=VOLUME,
            filter=_values(2, 3, 2, 2, 4),
            strides=[1, 1, 2, 1, 1],
            padding=padding,
        )
        for padding in ("SAME", "VALID")
    ),
    case(
        "Conv3DBackpropInputV2",
        input_sizes=[2, 4, 6, 5, 2],
        filter=_values(2, 3, 2, 2, 4),
        out_backprop=_values(2, 4, 3, 5, 4),
        strides=[1, 1, 2, 1, 1],
        padding="SAME",
    ),
]

TIED = np.round(_values(2, 7, 8, 4) * 4).astype(np.float32) / 2
POOLS = [
    *(
        case(
            op,
            f"{padding}{size}",
            **{name: values},
            ksize=[1, size, 2, 1],
            strides=[1, 2, 1, 1],
            padding=padding,
        )
        for op, name in (("MaxPool", "input"), ("AvgPool", "value"))
        for padding in ("SAME", "VALID")
        for size in (2, 3)
        for values in (IMAGE,)
    ),
    case("MaxPool", "ties", input=TIED, ksize=[1, 3, 3, 1], strides=[1, 2, 2, 1], padding="SAME"),
    case(
        "MaxPool",
        "explicit",
        input=IMAGE - 2,
        ksize=[1, 3, 3, 1],
        strides=[1, 2, 2, 1],
        padding="EXPLICIT",
        explicit_paddings=[0, 0, 1, 1, 0, 1, 0, 0],
    ),
    case(
        "MaxPool",
        "channels",
        input=IMAGE,
        ksize=[1, 1, 1, 2],
        strides=[1, 1, 1, 2],
        padding="VALID",
        _gradient=False,
    ),
    case("MaxPoolV2", input=IMAGE, ksize=[1, 3, 2, 1], strides=[1, 2, 2, 1], padding="SAME"),
    *(
        case(op, padding, input=VOLUME, ksize=[1, 2, 3, 2, 1], strides=[1, 2, 2, 1, 1], padding=padding)
        for op in ("MaxPool3D", "AvgPool3D")
        for padding in ("SAME", "VALID")
    ),
    case(
        "MaxPool3D",
        "ties",
        input=np.round(VOLUME * 4),
        ksize=[1, 2, 3, 2, 1],
        strides=[1, 1, 2, 1, 1],
        padding="SAME",
    ),
]

NORMS = [
    *(
        case("LRN", f"{radius}", input=IMAGE, depth_radius=radius, bias=1.5, alpha=0.3, beta=0.7)
        for radius in (1, 5)
    ),
    *(
        case(op, size_label, images=IMAGE, size=size, align_corners=align, half_pixel_centers=half)
        for op in ("ResizeBilinear", "ResizeNearestNeighbor")
        for size in ([3, 5], [13, 16], [7, 8], [1, 1])
        for align, half in ((False, False), (True, False), (False, True))
        for size_label in [f"{size[0]}x{size[1]}{'align' * align}{'half' * half}"]
    ),
    *(
        case(
            op,
            f"{'training' if training else 'inference'}{moving}",
            x=IMAGE * 3 + 1,
            scale=_values(4) + 1,
            offset=_values(4),
            mean=_values(4),
            variance=_values(4) + 1,
            epsilon=1e-3,
            is_training=training,
            exponential_avg_factor=moving,
            _outputs=(0, 1, 2),
            _gradient=False,
            _skip_half=skip,
        )
        for op, skip in (
            ("FusedBatchNorm", "float32 alone"),
            ("FusedBatchNormV2", "statistics in float32"),
            ("FusedBatchNormV3", "statistics in float32"),
        )
        for training, moving in ((True, 1.0), (True, 0.1), (False, 1.0))
    ),
    *(
        case(
            op,
            f"{'training' if training else 'inference'}-gradient",
            x=IMAGE * 3 + 1,
            scale=_values(4) + 1,
            offset=_values(4),
            mean=_values(4),
            variance=_values(4) + 1,
            epsilon=1e-3,
            is_training=training,
            _outputs=(0,),
            _skip_half="statistics",
            _tolerance=1e-4,
        )
        for op in ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
        for training in (True, False)
    ),
]

_SQUARE = (_random.rand(2, 4, 4) * 0.3 + np.eye(4)).astype(np.float32)
_POSITIVE = (_SQUARE @ _SQUARE.swapaxes(1, 2)).astype(np.float32)
_BESIDE = _values(2, 4, 3)
_HALVES = "condition of the matrix"
ALGEBRA = [
    case("Cholesky", input=_POSITIVE, _tolerance=1e-4, _skip_half=_HALVES),
    *(
        case(
            "MatrixInverse", f"{adjoint}", input=_SQUARE, adjoint=adjoint, _tolerance=1e-4, _skip_half=_HALVES
        )
        for adjoint in (False, True)
    ),
    case("MatrixDeterminant", input=_SQUARE, _tolerance=1e-4, _skip_half=_HALVES),
    case(
        "LogMatrixDeterminant",
        input=_SQUARE * np.array([1, 1, -1, 1], np.float32),
        _tolerance=1e-4,
        _skip_half=_HALVES,
    ),
    *(
        case(
            "MatrixSolve",
            f"{adjoint}",
            matrix=_SQUARE,
            rhs=_BESIDE,
            adjoint=adjoint,
            _tolerance=1e-4,
            _skip_half=_HALVES,
        )
        for adjoint in (False, True)
    ),
    *(
        case(
            "MatrixTriangularSolve",
            f"{lower}{adjoint}",
            matrix=_SQUARE,
            rhs=_BESIDE,
            lower=lower,
            adjoint=adjoint,
            _tolerance=1e-4,
            _skip_half=_HALVES,
        )
        for lower in (False, True)
        for adjoint in (False, True)
    ),
    case("Qr", input=_SQUARE, _gradient=True, _tolerance=1e-4, _skip_half=_HALVES),
    case(
        "Qr",
        "full",
        input=_values(4, 2),
        full_matrices=True,
        _outputs=(1,),
        _gradient=False,
        _tolerance=1e-4,
        _skip_half=_HALVES,
    ),
    case(
        "Svd", "values", input=_SQUARE, compute_uv=False, _outputs=(0,), _tolerance=1e-4, _skip_half=_HALVES
    ),
    case(
        "SelfAdjointEigV2",
        "values",
        input=_POSITIVE,
        compute_v=False,
        _outputs=(0,),
        _tolerance=1e-4,
        _skip_half=_HALVES,
    ),
    case(
        "SelfAdjointEigV2",
        "both",
        input=_POSITIVE,
        compute_v=True,
        _outputs=(0,),
        _tolerance=1e-4,
        _skip_half=_HALVES,
    ),
]

_WEIGHTS, _GRADIENT, _SLOT, _OTHER = (
    _values(3, 4),
    _values(3, 4),
    np.abs(_values(3, 4)) + 0.1,
    np.abs(_values(3, 4)) + 0.6,
)


def _number(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def _update(op: str, label: str = "", /, **arguments: object) -> RawCase:
    """Variables are named ``var``, ``m`` and so on; the gradient and scalars are inputs."""
    names = ("var", "accum", "accum_update", "linear", "m", "v", "vhat", "ms", "mom", "mg")
    starts = {
        "var": _WEIGHTS,
        "m": _SLOT * 0.1,
        "v": _SLOT,
        "vhat": _OTHER * 0.4,
        "accum": _SLOT,
        "linear": _SLOT * 0.2,
        "accum_update": _OTHER,
        "ms": _SLOT,
        "mom": _SLOT * 0.3,
        "mg": _SLOT * 0.1,
    }
    own = arguments.pop("of")
    variables = {name: starts[name] for name in names if name in str(own).split()}
    scalars = {k: _number(v) if isinstance(v, float) else v for k, v in arguments.items()}
    return RawCase(
        op, label, {**scalars, "grad": _GRADIENT}, gradient=False, variables=variables, half_tolerance=2e-2
    )


UPDATES = [
    case("AssignVariableOp", value=_GRADIENT, _variables={"resource": _WEIGHTS}, _gradient=False),
    case("AssignAddVariableOp", value=_GRADIENT, _variables={"resource": _WEIGHTS}, _gradient=False),
    case("AssignSubVariableOp", value=_GRADIENT, _variables={"resource": _WEIGHTS}, _gradient=False),
    RawCase(
        "ResourceApplyGradientDescent",
        "",
        {"alpha": _number(0.1), "delta": _GRADIENT},
        variables={"var": _WEIGHTS},
        gradient=False,
    ),
    *(
        _update(op, f"{nesterov}", of="var accum", lr=0.1, momentum=0.9, use_nesterov=nesterov)
        for op in ("ResourceApplyMomentum", "ResourceApplyKerasMomentum")
        for nesterov in (False, True)
    ),
    *(
        _update(
            "ResourceApplyAdam",
            f"{nesterov}",
            of="var m v",
            beta1_power=0.81,
            beta2_power=0.99,
            lr=0.1,
            beta1=0.9,
            beta2=0.95,
            epsilon=1e-3,
            use_nesterov=nesterov,
        )
        for nesterov in (False, True)
    ),
    _update(
        "ResourceApplyAdamWithAmsgrad",
        of="var m v vhat",
        beta1_power=0.81,
        beta2_power=0.99,
        lr=0.1,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-3,
    ),
    _update(
        "ResourceApplyAdaMax", of="var m v", beta1_power=0.81, lr=0.1, beta1=0.9, beta2=0.95, epsilon=1e-3
    ),
    *(
        _update("ResourceApplyAdagrad", f"{slots}", of="var accum", lr=0.1, update_slots=slots)
        for slots in (False, True)
    ),
    *(
        _update(
            "ResourceApplyAdagradV2", f"{slots}", of="var accum", lr=0.1, epsilon=1e-3, update_slots=slots
        )
        for slots in (False, True)
    ),
    _update("ResourceApplyAdadelta", of="var accum accum_update", lr=0.1, rho=0.9, epsilon=1e-3),
    _update("ResourceApplyRMSProp", of="var ms mom", lr=0.1, rho=0.9, momentum=0.5, epsilon=1e-3),
    _update("ResourceApplyCenteredRMSProp", of="var mg ms mom", lr=0.1, rho=0.9, momentum=0.5, epsilon=1e-3),
    *(
        _update(
            "ResourceApplyFtrl",
            f"{multiplied}{power}",
            of="var accum linear",
            lr=0.1,
            l1=0.02,
            l2=0.03,
            lr_power=power,
            multiply_linear_by_lr=multiplied,
        )
        for multiplied, power in ((False, -0.5), (False, -0.7), (True, -0.5))
    ),
    *(
        _update(
            "ResourceApplyFtrlV2",
            f"{multiplied}",
            of="var accum linear",
            lr=0.1,
            l1=0.02,
            l2=0.03,
            l2_shrinkage=0.1,
            lr_power=power,
            multiply_linear_by_lr=multiplied,
        )
        for multiplied, power in ((False, -0.5), (True, -0.5))
    ),
    RawCase(
        "ResourceApplyProximalGradientDescent",
        "",
        {"alpha": _number(0.1), "l1": _number(0.2), "l2": _number(0.3), "delta": _GRADIENT},
        variables={"var": _WEIGHTS},
        gradient=False,
    ),
    *(
        _update("ResourceApplyProximalAdagrad", f"{l1}", of="var accum", lr=0.1, l1=l1, l2=0.3)
        for l1 in (0.0, 0.2)
    ),
    *(
        RawCase(
            "ResourceApplyAdagradDA",
            f"{l1}",
            {
                "grad": _GRADIENT,
                "lr": _number(0.1),
                "l1": _number(l1),
                "l2": _number(0.02),
                "global_step": np.array(3, np.int64),
            },
            gradient=False,
            half_tolerance=2e-2,
            variables={
                "var": _WEIGHTS,
                "gradient_accumulator": _SLOT - 0.3,
                "gradient_squared_accumulator": _OTHER,
            },
        )
        for l1 in (0.0, 0.05)
    ),
    _update("ResourceApplyAddSign", of="var m", lr=0.1, alpha=1.0, sign_decay=0.9, beta=0.8),
    _update("ResourceApplyPowerSign", of="var m", lr=0.1, logbase=1.0, sign_decay=0.9, beta=0.8),
    *(
        RawCase(
            f"ResourceScatter{kind}",
            "",
            {"indices": np.array([2, 0], np.int32), "updates": _OTHER[:2].copy()},
            variables={"resource": _WEIGHTS},
            gradient=False,
        )
        for kind in ["Add", "Sub", "Update", "Mul", "Div", "Min", "Max"]
    ),
    *(
        RawCase(
            f"ResourceScatter{kind}",
            "twice",
            {"indices": np.array([2, 2, 0], np.int32), "updates": _OTHER},
            variables={"resource": _WEIGHTS},
            gradient=False,
        )
        for kind in ["Add", "Sub", "Mul", "Div", "Min", "Max"]
    ),
    *(
        RawCase(
            f"ResourceScatterNd{kind}",
            "",
            {"indices": np.array([[2, 1], [0, 3]], np.int32), "updates": _OTHER[0, :2].copy()},
            variables={"ref": _WEIGHTS},
            gradient=False,
        )
        for kind in ("Update", "Add", "Sub")
    ),
]

CONTRACTIONS: list[RawCase] = [*PRODUCTS, *CONVOLUTIONS, *POOLS, *NORMS, *ALGEBRA, *UPDATES]
