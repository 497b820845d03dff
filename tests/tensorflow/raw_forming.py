"""Cases of `RawCase`: shapes, slices, blocks, places by index, segments, diagonals."""

from __future__ import annotations

import numpy as np

from tests.tensorflow.comparing import RawCase, case
from tests.tensorflow.raw_pointwise import ORDINARY, ROWS, TIES, WHOLE

_random = np.random.RandomState(12)
VOLUME = _random.randn(2, 4, 6, 3).astype(np.float32)
SQUARES = _random.randn(2, 4, 4).astype(np.float32)
WIDE = _random.randn(2, 3, 5).astype(np.float32)

SHAPES = [
    case("Reshape", tensor=ROWS, shape=[-1, 10]),
    case("Reshape", "scalar", tensor=np.float32(3).reshape(1), shape=[]),
    *(case("Shape", kind, input=ROWS, out_type=kind) for kind in ("int32", "int64")),
    case("ShapeN", input=[ROWS, ROWS + 1]),
    case("Size", input=ROWS),
    case("Rank", input=ROWS),
    case("Fill", dims=[2, 3], value=np.float32(1.5).reshape(())),
    case("Fill", "scalar", dims=[], value=np.float32(1.5).reshape(())),
    case("Range", start=2, limit=11, delta=3),
    case("Range", "down", start=2.0, limit=-1.0, delta=-0.5),
    case(
        "LinSpace",
        start=np.float32(-1).reshape(()),
        stop=np.float32(2).reshape(()),
        num=5,
        _gradient=False,
        _skip_half="float32 alone",
    ),
    case(
        "LinSpace",
        "one",
        start=np.float32(-1).reshape(()),
        stop=np.float32(2).reshape(()),
        num=1,
        _gradient=False,
        _skip_half="float32 alone",
    ),
    case("Tile", input=ORDINARY, multiples=[2, 3]),
    case("BroadcastTo", input=ORDINARY[:, :1], shape=[3, 4, 5]),
    case("BroadcastArgs", s0=[3, 1], s1=[2, 1, 4]),
    *(case("ExpandDims", f"axis{axis}", input=ROWS, axis=axis) for axis in (0, 2, -1, -2)),
    case("Squeeze", input=ROWS[:, :1, :1]),
    case("Squeeze", "some", input=ROWS[:1, :1], axis=[0]),
    case("Squeeze", "last", input=ROWS[..., :1], axis=[-1]),
    case("Transpose", x=ROWS, perm=[2, 0, 1]),
    *(case("ConcatV2", f"axis{axis}", values=[ROWS, ROWS * 2, ROWS + 1], axis=axis) for axis in (0, 1, -1)),
    *(case("Pack", f"axis{axis}", values=[ORDINARY, ORDINARY + 1], axis=axis) for axis in (0, 1, -1)),
    *(case("Unpack", f"axis{axis}", value=ROWS, num=ROWS.shape[axis], axis=axis) for axis in (0, 1, -1)),
    *(case("Split", f"axis{axis}", axis=axis, value=ORDINARY, num_split=2) for axis in (0, -1)),
    case("SplitV", value=ROWS, size_splits=[1, -1, 2], axis=2, num_split=3),
    case("Pad", input=ORDINARY, paddings=[[1, 0], [0, 2]]),
    case("PadV2", input=ORDINARY, paddings=[[1, 0], [0, 2]], constant_values=1.5),
    case(
        "PadV2",
        "given",
        input=ORDINARY,
        paddings=[[1, 0], [0, 2]],
        constant_values=np.float32(1.5).reshape(()),
    ),
    *(
        case("MirrorPad", mode, input=ROWS, paddings=[[0, 0], [2, 1], [0, 3]], mode=mode)
        for mode in ("REFLECT", "SYMMETRIC")
    ),
    case("Slice", input=ROWS, begin=[1, 0, 2], size=[-1, 2, 3]),
    case("Slice", "computed", input=ROWS, begin=np.array([1, 0, 2], np.int32), size=[1, 2, 3]),
    case("StridedSlice", input=ROWS, begin=[1, 3, 0], end=[3, 0, 5], strides=[1, -2, 2]),
    case(
        "StridedSlice",
        "masks",
        input=ROWS,
        begin=[0, 2, 1, 0],
        end=[0, 0, 3, 0],
        strides=[1, 1, 1, 1],
        begin_mask=1,
        end_mask=1,
        ellipsis_mask=1,
        new_axis_mask=8,
        shrink_axis_mask=2,
    ),
    case("StridedSlice", "shrunk", input=ROWS, begin=[-1, 1], end=[0, 2], strides=[1, 1], shrink_axis_mask=1),
    case(
        "StridedSlice",
        "backwards",
        input=ROWS,
        begin=[0, 0],
        end=[0, 0],
        strides=[-1, 1],
        begin_mask=3,
        end_mask=3,
    ),
    case(
        "StridedSlice",
        "computed",
        input=ROWS,
        begin=np.array([1], np.int32),
        end=np.array([2], np.int32),
        strides=[1],
        shrink_axis_mask=1,
    ),
    case("ReverseV2", tensor=ROWS, axis=[0, -1]),
    *(
        case(op, layout, input=values, block_size=2, data_format=layout)
        for op, values in (("SpaceToDepth", VOLUME), ("DepthToSpace", np.concatenate([VOLUME] * 4, -1)))
        for layout in ("NHWC",)
    ),
    *(
        case("MatrixBandPart", f"{low}{high}", input=WIDE, num_lower=low, num_upper=high)
        for low, high in ((0, 0), (1, -1), (-1, 0), (0, 2))
    ),
    case("InvertPermutation", x=[2, 0, 3, 1]),
    case("InvertPermutation", "given", x=np.array([2, 0, 3, 1], np.int32)),
    case("Roll", input=ROWS, shift=[2, -1], axis=[0, 2]),
    case("Roll", "one", input=ROWS, shift=7, axis=1),
    case("ReverseSequence", input=VOLUME, seq_lengths=np.array([4, 1], np.int32), seq_dim=2, batch_dim=0),
    case(
        "ReverseSequence",
        "first",
        input=VOLUME,
        seq_lengths=np.array([2, 1, 0, 2, 2, 1], np.int32),
        seq_dim=0,
        batch_dim=2,
    ),
    case("SpaceToBatchND", input=VOLUME, block_shape=[2, 3], paddings=[[0, 0], [2, 1]]),
    case("BatchToSpaceND", input=np.concatenate([VOLUME] * 3), block_shape=[2, 3], crops=[[0, 1], [1, 0]]),
    case("SpaceToBatchND", "one", input=VOLUME, block_shape=[2], paddings=[[1, 1]]),
    case("BatchToSpaceND", "one", input=VOLUME, block_shape=[2], crops=[[1, 2]]),
    *(
        case(
            "ExtractImagePatches",
            padding,
            images=VOLUME,
            ksizes=[1, 3, 2, 1],
            strides=[1, 1, 2, 1],
            rates=[1, 1, 2, 1],
            padding=padding,
        )
        for padding in ("SAME", "VALID")
    ),
]

ROW_IDS = np.array([2, 0, 2], np.int32)
PAIRS = np.array([[0, 1], [2, 3], [0, 1]], np.int32)
ONES = np.array([[2], [0], [2]], np.int32)
ONCE = np.array([[2], [0]], np.int32)
PICKED = [
    *(case("GatherV2", f"axis{axis}", params=ROWS, indices=ROW_IDS[:2], axis=axis) for axis in (0, 1, -1)),
    case(
        "GatherV2",
        "rows",
        params=ROWS,
        indices=np.array([[0, 3], [1, 1], [2, 0]], np.int32),
        axis=1,
        batch_dims=1,
    ),
    case("GatherV2", "deep", params=ROWS, indices=np.array([[0], [1], [4]], np.int32), axis=2, batch_dims=1),
    case("GatherV2", "scalar", params=ROWS, indices=np.array(1, np.int32), axis=1),
    case("Gather", params=ROWS, indices=ROW_IDS),
    case("GatherNd", params=ROWS, indices=PAIRS),
    case("GatherNd", "rows", params=ROWS, indices=ONES),
    case("ScatterNd", indices=ONES, updates=ROWS, shape=[4, 4, 5]),
    case("ScatterNd", "points", indices=PAIRS, updates=ROWS[:, 0, 0].copy(), shape=[3, 4]),
    *(
        case(op, "", tensor=ROWS, indices=ONES, updates=ROWS + 0.7)
        for op in ("TensorScatterAdd", "TensorScatterSub", "TensorScatterMax", "TensorScatterMin")
    ),
    case("TensorScatterUpdate", tensor=ROWS, indices=ONCE, updates=ROWS[:2] + 0.7),
    *(
        case(op, "ties", tensor=TIES, indices=np.array([[0], [2]], np.int32), updates=TIES[[0, 1]].copy())
        for op in ("TensorScatterMax", "TensorScatterMin")
    ),
    *(
        case(
            "OneHot",
            f"axis{axis}",
            indices=np.array([[0, 3], [-1, 7]], np.int32),
            depth=5,
            on_value=np.float32(2).reshape(()),
            off_value=np.float32(-1).reshape(()),
            axis=axis,
        )
        for axis in (-1, 0, 1)
    ),
    case("OneHot", "whole", indices=np.array([0, 3], np.int32), depth=4, on_value=5, off_value=1),
    *(case("TopKV2", f"{k}", input=ROWS, k=k) for k in (1, 3)),
    case("TopKV2", "ties", input=TIES, k=3),
    case("TopKV2", "whole", input=WHOLE, k=2),
]

SORTED_IDS = np.array([0, 0, 2], np.int32)
_ANY_IDS = np.array([[0, 2, -1, 2], [1, 1, 2, 0], [2, 2, 2, 0]], np.int32)
SEGMENTS = [
    *(
        case(f"Segment{kind}", "", data=ROWS, segment_ids=[0, 0, 2])
        for kind in ["Sum", "Mean", "Max", "Min", "Prod"]
    ),
    *(
        case(f"Segment{kind}V2", "", data=ROWS, segment_ids=SORTED_IDS, num_segments=4, _xla=True)
        for kind in ["Sum", "Max", "Min", "Prod"]
    ),
    *(case(f"Segment{kind}", "ties", data=TIES, segment_ids=[0, 0, 0]) for kind in ("Max", "Min")),
    *(
        case(f"Segment{kind}", "whole", data=WHOLE, segment_ids=[0, 0])
        for kind in ["Sum", "Mean", "Max", "Min", "Prod"]
    ),
    *(
        case(f"UnsortedSegment{kind}", "", data=ROWS, segment_ids=_ANY_IDS, num_segments=4)
        for kind in ["Sum", "Max", "Min", "Prod"]
    ),
    *(
        case(f"UnsortedSegment{kind}", "rows", data=ROWS, segment_ids=ROW_IDS, num_segments=3)
        for kind in ["Sum", "Max", "Min", "Prod"]
    ),
    *(
        case(f"UnsortedSegment{kind}", "ties", data=TIES, segment_ids=np.zeros(3, np.int32), num_segments=2)
        for kind in ("Max", "Min", "Prod")
    ),
    case(
        "Bincount",
        arr=np.array([[0, 2, 2], [1, 7, 2]], np.int32),
        size=5,
        weights=np.zeros(0, np.float32),
        _gradient=False,
        _skip_half="float32 alone",
    ),
    case(
        "Bincount",
        "weights",
        arr=np.array([[0, 2, 2], [1, 7, 2]], np.int32),
        size=5,
        weights=np.arange(6, dtype=np.float32).reshape(2, 3),
        _gradient=False,
        _skip_half="float32 alone",
    ),
    *(
        case(
            "DenseBincount",
            f"{rank}{binary}{weighted}",
            input=np.array([[0, 2, 2], [1, 7, 2]], np.int32)[:rank].squeeze(),
            size=5,
            weights=(
                np.arange(1, 7, dtype=np.float32).reshape(2, 3)[:rank].squeeze()
                if weighted
                else np.zeros(0, np.float32)
            ),
            binary_output=binary,
            _gradient=False,
            _skip_half="float32 alone",
        )
        for rank in (1, 2)
        for binary in (False, True)
        for weighted in (False, True)
    ),
]

_ALIGN = ("LEFT_RIGHT", "RIGHT_LEFT", "LEFT_LEFT", "RIGHT_RIGHT")
BAND = _random.randn(2, 3, 4).astype(np.float32)
DIAGONALS = [
    case("Diag", diagonal=ORDINARY[:2, :3].copy()),
    case("DiagPart", input=_random.randn(2, 3, 2, 3).astype(np.float32)),
    case("MatrixDiag", diagonal=ORDINARY),
    case("MatrixDiagPart", input=WIDE),
    case("MatrixSetDiag", input=WIDE, diagonal=BAND[:, 0, :3].copy()),
    case("MatrixDiagV2", diagonal=ORDINARY, k=0, num_rows=-1, num_cols=-1, padding_value=0.0),
    *(
        case(
            "MatrixDiagV2",
            f"k{k}",
            diagonal=ORDINARY,
            k=k,
            num_rows=rows,
            num_cols=columns,
            padding_value=0.5,
        )
        for k, rows, columns in ((2, -1, -1), (-1, -1, -1), (1, 6, 9), (-2, 8, 6))
    ),
    *(
        case(
            "MatrixDiagV3",
            f"k{k}{align}",
            diagonal=BAND,
            k=k,
            num_rows=rows,
            num_cols=columns,
            padding_value=-0.5,
            align=align,
        )
        for k, rows, columns in (([-1, 1], -1, -1), ([0, 2], 4, 5), ([-2, 0], 5, 4))
        for align in _ALIGN
    ),
    *(
        case("MatrixDiagPartV2", f"k{k}", input=SQUARES if k == 3 else WIDE, k=k, padding_value=0.25)
        for k in (0, 1, -1, 3, [-1, 1])
    ),
    *(
        case("MatrixDiagPartV3", f"k{k}{align}", input=WIDE, k=k, padding_value=-9.0, align=align)
        for k in ([-1, 2], [-2, -1], [0, 0])
        for align in _ALIGN
    ),
    *(
        case("MatrixSetDiagV2", f"k{k}", input=SQUARES, diagonal=diagonal, k=k)
        for k, diagonal in ((1, BAND[:, 0, :3].copy()), (-2, BAND[:, 0, :2].copy()), (0, BAND[:, 0].copy()))
    ),
    *(
        case("MatrixSetDiagV3", f"{align}", input=SQUARES, diagonal=BAND, k=[-1, 1], align=align)
        for align in _ALIGN
    ),
]

FORMING: list[RawCase] = [*SHAPES, *PICKED, *SEGMENTS, *DIAGONALS]
