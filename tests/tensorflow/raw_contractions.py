"""Cases of `RawCase`: products, convolutions, pools, resizing, norms and linear algebra."""

from __future__ import annotations

import numpy as np

from tests.tensorflow.comparing import RawCase, case

_random = np.random.RandomState(13)


def random_values(*shape: int) -> np.ndarray:
    """Numbers from -0.5 to 0.5, others in each call."""
    return (_random.rand(*shape) - 0.5).astype(np.float32)


LEFT, RIGHT = random_values(3, 4), random_values(4, 5)
BATCH, OTHERS = random_values(2, 3, 4), random_values(2, 4, 5)
IMAGE, VOLUME = random_values(2, 7, 8, 4), random_values(2, 4, 6, 5, 2)
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
    case("BatchMatMulV2", "broadcast", x=random_values(3, 1, 2, 4), y=OTHERS),
    case("BatchMatMulV3", x=BATCH, y=OTHERS, Tout="float32", _skip_half="says its type"),
    *(
        case("Einsum", equation.replace(",", "_"), inputs=[BATCH, OTHERS], equation=equation)
        for equation in ("bij,bjk->bik", "bij,cjk->bcik", "bij,bjk->ik")
    ),
    case("Einsum", "trace", inputs=[random_values(3, 4, 4)], equation="bii->b"),
    case("Einsum", "ellipsis", inputs=[BATCH, random_values(4, 6)], equation="...j,jk->...k"),
    case("Cross", a=random_values(4, 3), b=random_values(4, 3)),
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
        case("Conv2D", label, input=IMAGE, filter=random_values(3, 2, 4, 6), **options)
        for label, options in _CONVOLVED
    ),
    case(
        "Conv2D",
        "grouped",
        input=IMAGE,
        filter=random_values(3, 3, 2, 6),
        strides=[1, 1, 1, 1],
        padding="SAME",
    ),
    *(
        # TensorFlow's gradient on the CPU passes over dilations.
        case(
            "DepthwiseConv2dNative",
            label,
            input=IMAGE,
            filter=random_values(3, 3, 4, 2),
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
            filter=random_values(3, 2, 4, 6),
            out_backprop=random_values(*shape),
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
            filter=random_values(2, 3, 2, 2, 4),
            strides=[1, 1, 2, 1, 1],
            padding=padding,
        )
        for padding in ("SAME", "VALID")
    ),
    case(
        "Conv3DBackpropInputV2",
        input_sizes=[2, 4, 6, 5, 2],
        filter=random_values(2, 3, 2, 2, 4),
        out_backprop=random_values(2, 4, 3, 5, 4),
        strides=[1, 1, 2, 1, 1],
        padding="SAME",
    ),
]

TIED = np.round(random_values(2, 7, 8, 4) * 4).astype(np.float32) / 2
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
            scale=random_values(4) + 1,
            offset=random_values(4),
            mean=random_values(4),
            variance=random_values(4) + 1,
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
            scale=random_values(4) + 1,
            offset=random_values(4),
            mean=random_values(4),
            variance=random_values(4) + 1,
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
_BESIDE = random_values(2, 4, 3)
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
        input=random_values(4, 2),
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

CONTRACTIONS: list[RawCase] = [*PRODUCTS, *CONVOLUTIONS, *POOLS, *NORMS, *ALGEBRA]
