"""Cases of operators that compute element by element, move, make or reduce elements."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.poptorch.operators.cases import Case, Make, cases_of, shaped


def pointwise() -> Iterator[Case]:
    """Arithmetic and elementary functions."""
    yield from shaped("abs neg exp exp2 expm1 square sin cos tan sinh cosh tanh asinh atan erf erfc sinc sgn")
    yield from shaped("log log1p log2 log10 sqrt rsqrt reciprocal lgamma digamma special_psi", 0.2, 3.0)
    yield from shaped("asin acos atanh erfinv", -0.8, 0.8)
    yield from shaped("acosh", 1.3, 3.0)
    yield from shaped("angle", smooth=False)
    yield from shaped("ceil floor trunc frac sign round", smooth=False)
    yield from shaped("signbit isnan isinf isfinite isposinf isneginf logical_not", smooth=False)
    yield from shaped(
        "add sub subtract mul maximum minimum fmax fmin hypot atan2 logaddexp logaddexp2", count=2
    )
    yield from shaped("div true_divide divide pow copysign xlogy", 0.3, 2.5, count=2)
    yield from shaped("eq ne lt gt le ge logical_and logical_or logical_xor heaviside", smooth=False, count=2)
    yield from shaped("floor_divide remainder fmod nextafter", 0.3, 3.0, smooth=False, count=2)
    yield from cases_of("rsub", lambda n: (n(3, 4), n(3, 4)), lambda n: (n(3, 4), 2.5))
    yield from cases_of("add sub", lambda n: (n(3, 1), n(4)), lambda n: (n(3, 4), 1.5), alpha=2)
    yield from cases_of("mul div", lambda n: (n(2, 1, 4), n(3, 1, low=0.5)), lambda n: (n(3), 2))
    yield from cases_of("pow", lambda n: (n(3, 4), 2), lambda n: (n(3, 4), 3), lambda n: (2.5, n(3, 4)))
    yield from cases_of("addcmul", lambda n: (n(3, 4), n(3, 4), n(4)), value=0.5)
    yield from cases_of("addcdiv", lambda n: (n(3, 4), n(3, 4), n(4, low=0.5)), value=0.5)
    yield from cases_of(
        "lerp", lambda n: (n(3, 4), n(3, 4), 0.3), lambda n: (n(3, 4), n(3, 4), n(3, 4, low=0))
    )
    yield from cases_of("clamp clip", lambda n: (n(3, 4), -1.0, 1.0), lambda n: (n(3, 4), None, 0.5))
    yield from cases_of("clamp_min clamp_max", lambda n: (n(3, 4), 0.1), lambda n: (n(5), n(5)))
    yield from cases_of("where.self", lambda n: (n.truths(3, 4), n(3, 4), n(4)))
    yield from cases_of("where.ScalarOther", lambda n: (n.truths(3, 4), n(3, 4), 1.5))
    yield from cases_of("where.ScalarSelf", lambda n: (n.truths(3, 4), 1.5, n(3, 4)))
    yield from cases_of("where.Scalar", lambda n: (n.truths(3, 4), 1.5, 2.5), smooth=False)
    yield from cases_of("masked_fill", lambda n: (n(3, 4), n.truths(4), 1.5))
    yield from cases_of(
        "nan_to_num", lambda n: (torch.tensor([1.0, float("nan"), -3.0]).to(n.dtype),), smooth=False
    )
    yield from shaped("logit special_logit special_entr", 0.1, 0.9)
    yield from shaped("special_erfcx special_i0 i0 special_i0e special_i1 special_i1e special_ndtr")
    yield from shaped("special_modified_bessel_i0 special_modified_bessel_i1", smooth=False)
    yield from shaped("digamma", -4.0, -0.2)
    yield from shaped("special_ndtri", 0.1, 0.9)
    yield from shaped("special_log_ndtr", -1.5, 1.5)
    yield from cases_of("polygamma", lambda n: (1, n(5, low=0.5)), lambda n: (2, n(5, low=0.5)))
    yield from cases_of(
        "special_zeta", lambda n: (n(5, low=1.5, high=3), n(5, low=0.5, high=2)), smooth=False
    )
    yield from cases_of(
        "igamma igammac special_gammainc special_gammaincc",
        lambda n: (n(5, low=0.5, high=3), n(5, low=0.5, high=3)),
        smooth=False,
    )
    yield from cases_of("frexp", lambda n: (n(5),), smooth=False)
    yield from cases_of("ldexp", lambda n: (n(5), n.whole(3, 5)))
    yield from cases_of("isclose", lambda n: (n(5), n(5)), smooth=False)
    bits = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift"
    operators = "__and__ __or__ __xor__ __lshift__ __rshift__"
    yield from cases_of(f"{bits} {operators}", lambda n: (n.whole(9, 3, 4), n.whole(4, 4)), smooth=False)
    yield from cases_of("bitwise_not", lambda n: (n.whole(9, 3, 4),), lambda n: (n.truths(5),), smooth=False)


def activations() -> Iterator[Case]:
    """Activation functions."""
    yield from shaped(
        "relu relu6 sigmoid log_sigmoid silu mish gelu hardswish hardsigmoid hardtanh elu celu selu"
    )
    yield from shaped("leaky_relu softplus hardshrink softshrink")
    yield from cases_of("gelu", lambda n: (n(3, 4),), approximate="tanh")
    yield from cases_of("elu", lambda n: (n(3, 4), 0.7, 1.2, 0.9))
    yield from cases_of("hardtanh", lambda n: (n(3, 4), -0.5, 0.7))
    yield from cases_of("threshold", lambda n: (n(3, 4), 0.1, 0.7))
    yield from cases_of("log_sigmoid_forward", lambda n: (n(3, 4),), smooth=False)
    yield from cases_of("_prelu_kernel", lambda n: (n(2, 3, 4), n(1, 3, 1)))
    yield from cases_of("glu", lambda n: (n(3, 4),), lambda n: (n(4, 3), 0))
    yield from cases_of("_softmax _log_softmax", lambda n: (n(3, 4), 1, False), lambda n: (n(3, 4), 0, False))
    yield from cases_of(
        "_safe_softmax softmax.int log_softmax.int", lambda n: (n(3, 4), 1), lambda n: (n(2, 3, 4), 1)
    )
    evaluated = (0.1, 0.3, False)
    yield from cases_of(
        "rrelu_with_noise", lambda n: (n(3, 4), torch.zeros(3, 4, dtype=n.dtype), *evaluated), smooth=False
    )
    noisy: Make = lambda n: (n(3, 4), torch.zeros(3, 4, dtype=n.dtype), *evaluated)  # noqa: E731
    yield from cases_of("rrelu_with_noise_functional", noisy, smooth=False)


def shaping() -> Iterator[Case]:
    """Moves of elements."""
    yield from cases_of(
        "view reshape _unsafe_view view_copy _reshape_copy",
        lambda n: (n(3, 4), [2, 6]),
        lambda n: (n(3, 4), [12]),
    )
    yield from cases_of("unsqueeze", lambda n: (n(3, 4), 1), lambda n: (n(3), -1))
    yield from cases_of("squeeze", lambda n: (n(3, 1, 4),), lambda n: (n(1, 3),))
    yield from cases_of("flatten", lambda n: (n(2, 3, 4), 1))
    yield from cases_of("t numpy_T", lambda n: (n(3, 4),), lambda n: (n(5),))
    yield from cases_of("mT", lambda n: (n(2, 3, 4),))
    yield from cases_of(
        "transpose.int transpose_copy.int swapaxes swapdims",
        lambda n: (n(2, 3, 4), 0, 2),
        lambda n: (n(3, 4), -1, 0),
    )
    yield from cases_of(
        "permute permute_copy", lambda n: (n(2, 3, 4), [2, 0, 1]), lambda n: (n(3, 4), [-1, 0])
    )
    yield from cases_of("movedim", lambda n: (n(2, 3, 4), [0], [2]))
    yield from cases_of("expand expand_copy", lambda n: (n(3, 1), [2, 3, 4]), lambda n: (n(4), [3, -1]))
    yield from cases_of("broadcast_to", lambda n: (n(3, 1), [2, 3, 4]))
    yield from cases_of("expand_as", lambda n: (n(3, 1), n(3, 4)), smooth=False)
    yield from cases_of("clone alias contiguous positive lift_fresh", lambda n: (n(3, 4),))
    yield from cases_of("view_as type_as", lambda n: (n(3, 4), n(4, 3).reshape(3, 4)), smooth=False)
    yield from cases_of("detach", lambda n: (n(3, 4),), smooth=False)
    yield from cases_of("_to_copy", lambda n: (n(3, 4),), dtype=torch.float32)
    yield from cases_of("_to_copy", lambda n: (n(3, 4),), dtype=torch.int32, smooth=False)
    yield from cases_of("to.dtype", lambda n: (n(3, 4), torch.float32), lambda n: (n(3, 4), torch.float16))
    yield from cases_of("to.other", lambda n: (n(3, 4), n(2)), smooth=False)
    yield from cases_of("copy", lambda n: (n(3, 4), n(4)), smooth=False)
    yield from cases_of(
        "slice.Tensor slice_copy.Tensor", lambda n: (n(5, 4), 0, 1, 4, 2), lambda n: (n(5, 4), 1, -3)
    )
    yield from cases_of(
        "select.int select_copy.int", lambda n: (n(5, 4), 0, -2), lambda n: (n(2, 3, 4), 1, 2)
    )
    yield from cases_of("narrow", lambda n: (n(5, 4), 0, 1, 3))
    yield from cases_of("narrow.Tensor", lambda n: (n(5, 4), 0, torch.tensor(2), 3), smooth=False)
    yield from cases_of(
        "cat concat concatenate", lambda n: ([n(2, 3), n(4, 3)],), lambda n: ([n(2, 3), n(2, 1)], 1)
    )
    yield from cases_of("stack", lambda n: ([n(2, 3), n(2, 3)], 1))
    yield from cases_of("split.Tensor split_copy.Tensor", lambda n: (n(5, 4), 2), lambda n: (n(5, 4), 3, 1))
    yield from cases_of("split_with_sizes split_with_sizes_copy", lambda n: (n(5, 4), [2, 3]))
    yield from cases_of("split.sizes", lambda n: (n(5, 4), [1, 3], 1))
    yield from cases_of("chunk", lambda n: (n(5, 4), 2))
    yield from cases_of("unbind.int unbind_copy.int", lambda n: (n(3, 4),), lambda n: (n(3, 4), 1))
    yield from cases_of("flip", lambda n: (n(2, 3, 4), [0, 2]))
    yield from cases_of("roll", lambda n: (n(3, 4), [1]), lambda n: (n(3, 4), [1, -2], [0, 1]))
    yield from cases_of("repeat tile", lambda n: (n(3, 4), [2, 1, 2]))
    yield from cases_of("repeat_interleave.self_int", lambda n: (n(3, 4), 2), lambda n: (n(3, 4), 2, 1))
    yield from cases_of("diagonal diagonal_copy", lambda n: (n(4, 5),), lambda n: (n(2, 4, 5), -1, 1, 2))
    yield from cases_of("diag_embed", lambda n: (n(3, 4),), lambda n: (n(3), 1))
    yield from cases_of("tril triu", lambda n: (n(4, 5),), lambda n: (n(2, 4, 4), -1))
    yield from cases_of("unfold unfold_copy", lambda n: (n(7, 2), 0, 3, 2))
    yield from cases_of("as_strided as_strided_copy", lambda n: (n(4, 5), [2, 3], [5, 1], 1))
    yield from cases_of(
        "constant_pad_nd", lambda n: (n(3, 4), [1, 2], 0.5), lambda n: (n(2, 3, 4), [1, -1, 0, 2])
    )
    for count in (1, 2, 3):
        sizes = (2, 3, *(4,) * count)
        name = f"reflection_pad{count}d replication_pad{count}d"
        yield from cases_of(name, lambda n, s=sizes, c=count: (n(*s), [1, 2] * c))
    yield from cases_of("_pad_circular", lambda n: (n(2, 3, 4), [1, 2]))
    yield from cases_of("pixel_shuffle", lambda n: (n(2, 8, 3, 3), 2))
    yield from cases_of("pixel_unshuffle", lambda n: (n(2, 2, 4, 6), 2))
    yield from cases_of("meshgrid", lambda n: ([n(3), n(4)],))
    yield from cases_of("meshgrid.indexing", lambda n: ([n(3), n(4)],), indexing="xy")
    yield from cases_of("cartesian_prod", lambda n: ([n(3), n(2)],))
    yield from cases_of("diagonal_scatter", lambda n: (n(4, 4), n(4)), lambda n: (n(4, 5), n(4), 1))
    yield from cases_of("as_strided_scatter", lambda n: (n(4, 5), n(2, 3), [2, 3], [5, 1], 1), smooth=False)


def factories() -> Iterator[Case]:
    """Tensors from numbers."""
    sized = "zeros ones"
    yield from cases_of(sized, lambda n: ([2, 3],), smooth=False)
    yield from cases_of("zeros_like ones_like", lambda n: (n(2, 3),), smooth=False)
    yield from cases_of("new_zeros new_ones", lambda n: (n(2), [3, 4]), smooth=False)
    yield from cases_of("zero", lambda n: (n(2, 3),), smooth=False)
    yield from cases_of("full", lambda n: ([2, 3], 1.5), lambda n: ([2], 3), smooth=False)
    yield from cases_of("full_like", lambda n: (n(2, 3), 1.5), smooth=False)
    yield from cases_of("new_full", lambda n: (n(2), [3], 1.5), smooth=False)
    yield from cases_of("fill", lambda n: (n(2, 3), 1.5), smooth=False)
    yield from cases_of("scalar_tensor", lambda n: (1.5,), smooth=False)
    yield from cases_of("arange.default", lambda n: (5,), lambda n: (3.5,), smooth=False)
    yield from cases_of("arange.start", lambda n: (2, 6), smooth=False)
    yield from cases_of("arange.start_step", lambda n: (1, 6, 2), lambda n: (0.5, 2.0, 0.25), smooth=False)
    yield from cases_of("linspace logspace", lambda n: (0.0, 1.0, 5), smooth=False)
    yield from cases_of("eye", lambda n: (3,), smooth=False)
    yield from cases_of("eye.m", lambda n: (3, 4), smooth=False)
    yield from cases_of("tril_indices triu_indices", lambda n: (3, 4), smooth=False)


def reductions() -> Iterator[Case]:
    """Reductions, running sums and sorting."""
    yield from cases_of("histc", lambda n: (n(5, 7), 4), lambda n: (n(5, 7), 6, -1.2, 1.4), smooth=False)
    whole, one, two = (
        (lambda n: (n(3, 4),)),
        (lambda n: (n(3, 4), [1])),
        (lambda n: (n(2, 3, 4), [0, 2], True)),
    )
    yield from cases_of("sum mean", whole, lambda n: (n(),))
    yield from cases_of("sum.dim_IntList mean.dim amax amin logsumexp", one, two)
    yield from cases_of("nansum", whole)
    yield from cases_of("prod", whole)
    yield from cases_of("prod.dim_int", lambda n: (n(3, 4), 1))
    yield from cases_of("max min median nanmedian", whole)
    yield from cases_of("any all argmax argmin count_nonzero", whole, lambda n: (n(),), smooth=False)
    yield from cases_of("any.dim all.dim", lambda n: (n.truths(3, 4), 1), smooth=False)
    yield from cases_of("any.dims all.dims", lambda n: (n.truths(2, 3, 4), [0, 2]), smooth=False)
    yield from cases_of(
        "max.dim min.dim cummax cummin median.dim mode", lambda n: (n(3, 5), 1), lambda n: (n(4, 3), 0)
    )
    yield from cases_of("argmax argmin", lambda n: (n(3, 4), 1), smooth=False)
    yield from cases_of("aminmax", lambda n: (n(3, 4),), smooth=False)
    yield from cases_of("var std", whole, lambda n: (n(3, 4), False))
    yield from cases_of("var.dim std.dim", lambda n: (n(3, 4), [1], True))
    yield from cases_of(
        "var.correction std.correction var_mean.correction std_mean.correction", one, correction=1
    )
    yield from cases_of(
        "cumsum cumprod logcumsumexp", lambda n: (n(3, 4, low=0.3), 1), lambda n: (n(5, low=0.3), 0)
    )
    yield from cases_of(
        "linalg_vector_norm",
        whole,
        lambda n: (n(3, 4), 1),
        lambda n: (n(3, 4), float("inf")),
        lambda n: (n(3, 4), 3, [0]),
    )
    yield from cases_of("norm.ScalarOpt_dim", lambda n: (n(3, 4), 2, [1]))
    yield from cases_of("norm.Scalar", lambda n: (n(3, 4), 2))
    yield from cases_of("sort argsort", lambda n: (n(3, 5),), lambda n: (n(3, 5), 0, True))
    yield from cases_of("sort.stable argsort.stable", lambda n: (n(3, 5),), stable=True)
    yield from cases_of("topk", lambda n: (n(3, 5), 2), lambda n: (n(5, 3), 2, 0, False))
    yield from cases_of("kthvalue", lambda n: (n(3, 5), 2))
    yield from cases_of("searchsorted.Tensor", lambda n: (n(5).sort().values, n(3)), smooth=False)
    yield from cases_of("searchsorted.Scalar", lambda n: (n(5).sort().values, 0.5), smooth=False)
    yield from cases_of("bucketize.Tensor", lambda n: (n(3), n(5).sort().values), smooth=False)
    yield from cases_of("bucketize.Scalar", lambda n: (0.5, n(5).sort().values), smooth=False)
