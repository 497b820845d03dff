"""Examples of ai.graphcore's operators, which ONNX's suite has none of."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
from onnx import TensorProto

from podrun.onnx_models.ops.registry import GRAPHCORE
from tests.onnx_models.example_models import Example, example, ints, random, subgraph


def elementwise() -> list[Example]:
    """ai.graphcore's operators that work element by element."""
    x = random(2, 3)
    g = functools.partial(example, GRAPHCORE)
    return [
        *(
            g(op, [x])
            for op in ("Gelu", "GeluErf", "Swish", "Expm1", "Round", "NearbyInt", "Nop", "TensorRemap")
        ),
        *(g(op, [x]) for op in ("Detach", "PrintTensor", "PrintTileMapping")),
        g("Log1p", [np.abs(x)]),
        *(g(op, [x, random(2, 3, seed=1, low=0.5, high=2.0)]) for op in ("Atan2", "Fmod", "Remainder")),
        g("Scale", [x], scale=1.5),
        g("ScaledAdd", [x, random(2, 3, seed=1)], scale0=0.5, scale1=2.0),
        g("ShapedDropout", [x], shape=[2, 1], ratio=0.25),
        *(g(op, [ints(5, 3), ints(6, 1)]) for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseXnor")),
        g("BitwiseNot", [ints(5, 3)]),
        g("AttentionMask", [np.asarray([[1, 1, 2], [1, 0, 0]], np.int32)]),
        g("Unpack", [random(2, 3, 4), np.asarray([[2], [3]], np.int32)], maxSequenceLength=3),
        g("Pack", [random(2, 3, 4), np.asarray([[2], [3]], np.int32)], rows=2, rowLength=3),
        g("ErfV2", [x]),
        g("SoftmaxV2", [x]),
        g("WhereV2", [np.asarray([[True], [False]]), x, random(2, 3, seed=1)]),
        g("FastNorm", [random(3, 8), random(8, seed=1), random(8, seed=2)]),
        g("Pow2ScaleThenCast", [x, ints(-1)], to=TensorProto.FLOAT8E4M3FNUZ),
        g("CastThenPow2Scale", [x.astype(ml_dtypes.float8_e4m3fnuz), ints(-1)], to=TensorProto.FLOAT),
    ]


def losses() -> list[Example]:
    """Losses, and what reads their inputs."""
    x = random(2, 3)
    ctc_targets = np.asarray([[1, 2, 2], [3, 1, 0]], np.int32)
    g = functools.partial(example, GRAPHCORE)
    return [
        g("L1", [x], **{"lambda": 0.3, "reduction": "Mean"}),
        g("IdentityLoss", [x], reduction="Sum"),
        g("Nll", [random(4, 5, low=0.1, high=0.9), ints(0, 2, 4, 1)], reduction="Mean", ignoreIndex=2),
        g(
            "Ctc",
            [np.log(random(7, 2, 5, low=0.1)), ctc_targets, ints(7, 6), ints(3, 2)],
            reduction="Mean",
        ),
        g(
            "CtcBeamSearchDecoder",
            [np.log(random(4, 2, 3, low=0.1)), ints(4, 3)],
            3,
            beam_width=8,
            top_paths=2,
        ),
    ]


def layers() -> list[Example]:
    """Norms, convolutions, recurrent and spline layers."""
    image = random(2, 4, 5, 5)
    g = functools.partial(example, GRAPHCORE)
    return [
        g("GroupNormalization", [image, random(4), random(4, seed=1)], 3, num_groups=2),
        g(
            "BatchNormalization",
            [image, random(4), random(4, seed=1), random(4, seed=2), random(4, low=0.5)],
            5,
        ),
        g("NormalizeImage", [random(2, 4, 4, 3), random(3), random(3, seed=1)], scale=0.5),
        g("LSTM", [random(4, 2, 3), random(4, 5, 2), random(4, 2)], 2),
        g("MultiConv", [image, random(3, 4, 3, 3), image, random(4, 2, 1, 1)], 2),
        g(
            "SplineBasis",
            [random(3, 2, low=0.1, high=0.9), ints(4, 4), np.asarray([1, 0], np.uint8)],
            2,
            degree=2,
        ),
        g(
            "SplineWeighting",
            [
                random(3, 2),
                random(5, 2, 4),
                random(3, 2, seed=1),
                np.asarray([[0, 1], [4, 2], [3, 3]], np.int32),
            ],
        ),
    ]


def moving() -> list[Example]:
    """What moves, picks, orders or changes elements."""
    x = random(2, 3)
    image = random(2, 4, 5, 5)
    g = functools.partial(example, GRAPHCORE)
    return [
        g("Subsample", [image], strides=[1, 2, 2, 2]),
        g("Reverse", [image], dimensions=[1, 3]),
        g("Reshape", [x], shape=[3, -1]),
        g("Slice", [image], starts=[1, 0], ends=[3, 4], axes=[1, 2]),
        g("DepthToSpace", [image], blocksize=2, mode="CRD"),
        g("ReduceMedian", [x], 2, axes=[1], keepdims=0),
        g("Sort", [x], 2, axis=1, descending=1),
        g("Bucketize", [x, random(4, seed=3)]),
        g("Init", [], shape=[2, 2], data_type=1, init_type=1),
        g("CopyVarUpdate", [x, random(2, 3, seed=1)]),
        g("IncrementMod", [ints(1, 2, 3)], increment=1.0, modulus=3.0),
        g("DynamicSlice", [image, np.asarray([1, 2], np.uint32)], axes=[1, 2], sizes=[2, 2]),
        g("DynamicUpdate", [image, np.asarray([1], np.uint32), random(2, 2, 5, 5)], axes=[1], sizes=[2]),
        g("DynamicAdd", [image, np.asarray([1], np.uint32), random(2, 2, 5, 5)], axes=[1], sizes=[2]),
        g("DynamicZero", [image, np.asarray([1], np.uint32)], axes=[1], sizes=[2]),
        g(
            "SequenceSlice",
            [random(5, 2), random(6, 2), ints(2, 1), ints(0, 3), ints(1, 4)],
            zeroUnused=1,
        ),
        g(
            "ScatterReduce",
            [x, np.asarray([[0, 1, 0], [2, 2, 1]], np.int32)],
            axis_size=4,
            axis=1,
            reduction=0,
        ),
        g(
            "GroupedScatterReduce",
            [random(2, 3, 2), np.asarray([[0, 1, 0], [2, 2, 1]], np.int32)],
            axis_size=4,
            axis=1,
            group_size=2,
        ),
        g("GroupedGather", [random(2, 4, 3), np.asarray([[0, 3], [1, 1]], np.int32)], axis=1, group_size=2),
        g("Call", [x, random(2, 3, seed=1)], callee=subgraph("Mul", 2)),
        g(
            "PackedDataBlock",
            [random(7, 2), ints(0, 3), ints(3, 2), ints(0, 3), ints(3, 2)],
            maxSequenceLengths=[4],
            resultSize=6,
            callbackBatchSize=1,
            callback=subgraph("Tanh", 1),
        ),
    ]
