"""Cases of products, linear algebra, layers of networks, indexing and losses."""

# ruff: noqa: E731

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.poptorch.operators.cases import Case, Make, Numbers, cases_of


def products() -> Iterator[Case]:
    """Products of matrices and linear algebra."""
    yield from cases_of("mm", lambda n: (n(3, 4), n(4, 2)))
    yield from cases_of("bmm", lambda n: (n(2, 3, 4), n(2, 4, 2)))
    yield from cases_of("matmul linalg_matmul", lambda n: (n(3, 4), n(4)), lambda n: (n(2, 3, 4), n(4, 2)))
    yield from cases_of("mv", lambda n: (n(3, 4), n(4)))
    yield from cases_of("dot vdot", lambda n: (n(4), n(4)))
    yield from cases_of("inner", lambda n: (n(3, 4), n(2, 4)), lambda n: (n(3), n()))
    yield from cases_of("linear", lambda n: (n(2, 3, 4), n(5, 4), n(5)), lambda n: (n(1, 4), n(5, 4)))
    yield from cases_of("addmm", lambda n: (n(2), n(3, 4), n(4, 2)), beta=0.5, alpha=2)
    yield from cases_of("addmv", lambda n: (n(3), n(3, 4), n(4)))
    yield from cases_of("baddbmm", lambda n: (n(2, 3, 2), n(2, 3, 4), n(2, 4, 2)))
    yield from cases_of("addbmm", lambda n: (n(3, 2), n(2, 3, 4), n(2, 4, 2)))
    yield from cases_of("addr", lambda n: (n(3, 4), n(3), n(4)))
    yield from cases_of("outer ger", lambda n: (n(3), n(4)))
    yield from cases_of("einsum", lambda n: ("bij,bjk->bik", [n(2, 3, 4), n(2, 4, 2)]))
    yield from cases_of("bilinear", lambda n: (n(3, 4), n(3, 5), n(2, 4, 5), n(2)))
    yield from cases_of("cdist", lambda n: (n(3, 4), n(5, 4)), lambda n: (n(3, 4), n(5, 4), 1.0))
    yield from cases_of("pdist", lambda n: (n(4, 3),))
    yield from cases_of("kron", lambda n: (n(2, 3), n(3, 2)))
    yield from cases_of("cov corrcoef", lambda n: (n(3, 6),))


def linear_algebra() -> Iterator[Case]:
    """Factorizations and solutions, in float32 alone."""
    yield from cases_of("cholesky", lambda n: (n.matrix(3),), lambda n: (n.matrix(3, 2), True))
    yield from cases_of("linalg_lstsq", lambda n: (n(2, 5, 3), n(2, 5, 4)), lambda n: (n.matrix(3), n(3, 2)))
    yield from cases_of("linalg_lstsq", lambda n: (n(2, 5, 3), n(2, 5, 4)), driver="gels")
    yield from cases_of("linalg_lstsq", lambda n: (n(2, 3, 5), n(2, 3, 4)), smooth=False)
    yield from cases_of("linalg_cholesky_ex", lambda n: (n.matrix(3, 2),))
    yield from cases_of("cholesky_inverse", lambda n: (torch.linalg.cholesky(n.matrix(3)),), smooth=False)
    yield from cases_of(
        "cholesky_solve", lambda n: (n(3, 2), torch.linalg.cholesky(n.matrix(3))), smooth=False
    )
    yield from cases_of("linalg_qr", lambda n: (n.matrix(3),))
    yield from cases_of("geqrf", lambda n: (n(4, 3),), smooth=False)
    yield from cases_of("linalg_householder_product", lambda n: torch.geqrf(n(4, 3)))
    yield from cases_of("_linalg_svd", lambda n: (n(3, 4), False, False), smooth=False)
    yield from cases_of("_linalg_eigh", lambda n: (n.matrix(3), "L", False), smooth=False)
    yield from cases_of(
        "linalg_inv_ex _linalg_det _linalg_slogdet", lambda n: (n.matrix(3),), lambda n: (n.matrix(2, 3),)
    )
    yield from cases_of("linalg_pinv.atol_rtol_tensor", lambda n: (n(4, 3),))
    yield from cases_of("linalg_lu_factor_ex linalg_lu", lambda n: (n.matrix(3),))
    yield from cases_of("lu_unpack", lambda n: torch.linalg.lu_factor(n.matrix(3)))
    yield from cases_of("linalg_lu_solve", lambda n: (*torch.linalg.lu_factor(n.matrix(3)), n(3, 2)))
    yield from cases_of("_linalg_solve_ex", lambda n: (n.matrix(3), n(3, 2)), lambda n: (n.matrix(3), n(3)))
    yield from cases_of("linalg_solve_triangular", lambda n: (n.matrix(3).triu(), n(3, 2)), upper=True)
    yield from cases_of("triangular_solve", lambda n: (n(3, 2), n.matrix(3)))
    yield from cases_of("linalg_matrix_exp", lambda n: (n(3, 3),))


def networks() -> Iterator[Case]:
    """Convolutions, pooling, resizing, normalisation, recurrent networks, attention."""
    yield from _convolutions_and_pooling()
    yield from _resizing()
    yield from _normalisation()
    yield from _sequences()


def _convolutions_and_pooling() -> Iterator[Case]:
    sizes = {1: (9,), 2: (7, 6), 3: (5, 4, 6)}
    for count, size in sizes.items():
        d = f"{count}d"
        one = (1,) * count
        yield from cases_of(
            f"conv{d}",
            lambda n, s=size, c=count: (n(2, 4, *s), n(6, 4, *(3,) * c), n(6), [2] * c, [1] * c),
            lambda n, s=size, c=count: (n(2, 4, *s), n(4, 2, *(2,) * c), None, [1] * c, [0] * c, [2] * c, 2),
        )
        yield from cases_of(
            f"conv{d}.padding",
            lambda n, s=size, c=count: (n(2, 4, *s), n(6, 4, *(3,) * c), None, [1] * c, "same"),
        )
        yield from cases_of(
            f"conv_transpose{d}.input" if count > 1 else "conv_transpose1d",
            lambda n, s=size, c=count: (n(2, 4, *s), n(4, 3, *(3,) * c), n(3), [2] * c, [1] * c, [1] * c),
        )
        yield from cases_of(
            "convolution",
            lambda n, s=size, c=count, o=one: (
                *(n(2, 4, *s), n(6, 4, *(3,) * c), None, [1] * c, [1] * c, [1] * c),
                *(False, [0] * c, 1),
            ),
        )
        yield from cases_of(
            f"max_pool{d}", lambda n, s=size, c=count: (n(2, 4, *s), [3] * c, [2] * c, [1] * c)
        )
        name = f"max_pool{d}_with_indices"
        yield from cases_of(name, lambda n, s=size, c=count: (n(2, 4, *s), [2] * c, [2] * c))
        yield from cases_of(
            f"avg_pool{d}", lambda n, s=size, c=count: (n(2, 4, *s), [3] * c, [2] * c, [1] * c, True)
        )
        yield from cases_of(f"adaptive_avg_pool{d}", lambda n, s=size, c=count: (n(2, 4, *s), [3] * c))
        yield from cases_of(f"adaptive_max_pool{d}", lambda n, s=size, c=count: (n(2, 4, *s), [3] * c))
        if count > 1:
            yield from cases_of(f"_adaptive_avg_pool{d}", lambda n, s=size, c=count: (n(2, 4, *s), [2] * c))
        for kind in (f"upsample_nearest{d}", f"_upsample_nearest_exact{d}"):
            yield from cases_of(kind, lambda n, s=size, c=count: (n(2, 4, *s), [8] * c))


def _resizing() -> Iterator[Case]:
    yield from cases_of(
        "upsample_linear1d", lambda n: (n(2, 3, 5), [8], False), lambda n: (n(2, 3, 5), [8], True)
    )
    yield from cases_of(
        "upsample_bilinear2d upsample_bicubic2d",
        lambda n: (n(2, 3, 5, 4), [8, 7], False),
        lambda n: (n(2, 3, 5, 4), [3, 9], True),
    )
    yield from cases_of("upsample_trilinear3d", lambda n: (n(1, 2, 3, 4, 3), [5, 6, 4], False))
    yield from cases_of(
        "max_unpool2d",
        lambda n: (n(2, 2, 2, 2), torch.tensor([0, 2, 8, 10]).reshape(2, 2).expand(2, 2, 2, 2), [4, 4]),
    )
    for how in range(12):
        volume: Make = lambda n, h=how: (
            *(n(2, 3, 4, 3, 5), n(2, 2, 3, 2, 3, low=-1.4, high=1.4)),
            *(h // 6, h // 2 % 3, bool(h % 2)),
        )
        yield from cases_of("grid_sampler_3d", volume)
    for how in ("sum", "mean", "max", "min", "prod"):
        parts: Make = lambda n, h=how: (n(6, 2), h)
        yield from cases_of("segment_reduce", parts, lengths=torch.tensor([2, 0, 3, 1]), initial=1.5)
    yield from cases_of("im2col", lambda n: (n(2, 3, 5, 6), [2, 3], [1, 1], [1, 0], [1, 2]))
    yield from cases_of("col2im", lambda n: (n(2, 12, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1]))


def _normalisation() -> Iterator[Case]:
    statistics: Make = lambda n: (
        n(4, 3, 5),
        n(3),
        n(3),
        torch.zeros(3),
        torch.ones(3),
        False,
        0.1,
        1e-5,
        False,
    )
    yield from cases_of(
        "batch_norm", statistics, lambda n: (n(4, 3, 5), n(3), n(3), None, None, True, 0.1, 1e-5, False)
    )
    yield from cases_of("layer_norm", lambda n: (n(3, 4), [4], n(4), n(4)), lambda n: (n(2, 3, 4), [3, 4]))
    yield from cases_of("native_layer_norm", lambda n: (n(3, 4), [4], n(4), n(4), 1e-5))
    yield from cases_of("rms_norm", lambda n: (n(3, 4), [4], n(4), 1e-5))
    yield from cases_of("group_norm", lambda n: (n(2, 4, 5), 2, n(4), n(4)))
    yield from cases_of("native_group_norm", lambda n: (n(2, 4, 5), n(4), n(4), 2, 4, 5, 2, 1e-5))
    yield from cases_of("_weight_norm", lambda n: (n(3, 4), n(3, 1)))


def _sequences() -> Iterator[Case]:
    recurrent = (True, 2, 0.0, False, True, False)
    for form, gates, states in (
        ("lstm.input", 4, 2),
        ("gru.input", 3, 1),
        ("rnn_tanh.input", 1, 1),
        ("rnn_relu.input", 1, 1),
    ):
        yield from cases_of(form, lambda n, g=gates, s=states: _recurrent(n, g, s, recurrent))
    yield from cases_of(
        "scaled_dot_product_attention",
        lambda n: (n(2, 2, 5, 4), n(2, 2, 6, 4), n(2, 2, 6, 4)),
        lambda n: (n(2, 5, 4), n(2, 5, 4), n(2, 5, 4), None, 0.0, True),
        lambda n: (n(2, 3, 4), n(2, 3, 4), n(2, 3, 4), torch.eye(3).bool() | n.truths(3, 3)),
    )


def _recurrent(n: Numbers, gates: int, states: int, settings: tuple[Any, ...]) -> tuple[Any, ...]:
    weights = []
    for entering in (3, 3, 8, 8):
        weights += [n(gates * 4, entering, low=-0.5, high=0.5), n(gates * 4, 4, low=-0.5, high=0.5)]
        weights += [n(gates * 4), n(gates * 4)]
    start = [n(4, 2, 4) for _ in range(states)]
    return n(5, 2, 3), start if states > 1 else start[0], weights, *settings


def indexing() -> Iterator[Case]:
    """Reading and writing by index."""
    yield from cases_of(
        "embedding", lambda n: (n(6, 4), n.whole(6, 2, 3)), lambda n: (n(6, 4), n.whole(6, 5), 2)
    )
    yield from cases_of(
        "index_select", lambda n: (n(5, 4), 0, n.whole(5, 3)), lambda n: (n(5, 4), 1, n.whole(4, 6))
    )
    yield from cases_of(
        "gather", lambda n: (n(5, 4), 1, n.whole(4, 3, 2)), lambda n: (n(5, 4), 0, n.whole(5, 2, 4))
    )
    yield from cases_of("take", lambda n: (n(3, 4), n.whole(12, 5)))
    yield from cases_of(
        "index.Tensor _unsafe_index.Tensor",
        lambda n: (n(5, 4), [n.whole(5, 3)]),
        lambda n: (n(5, 4), [None, n.whole(4, 3)]),
    )
    rows: Make = lambda n: (n(5, 4), [torch.tensor([0, 3])], n(2, 4))
    yield from cases_of(
        "index_put _unsafe_index_put", rows, lambda n: (n(5, 4), [n.whole(5, 3)], n(3, 4), True)
    )
    yield from cases_of(
        "index_put", lambda n: (n(5, 4), [n.truths(5, 4)], torch.tensor(1.5).to(n.dtype)), smooth=False
    )
    once = torch.tensor([[0, 1], [2, 0], [1, 2]])
    yield from cases_of("scatter.src", lambda n: (n(3, 2), 0, once, n(3, 2)))
    yield from cases_of("scatter.value", lambda n: (n(3, 2), 0, once, 1.5))
    yield from cases_of(
        "scatter.reduce", lambda n: (n(3, 2), 0, n.whole(3, 3, 2), n(3, 2)), reduce="add", smooth=False
    )
    yield from cases_of("scatter_add", lambda n: (n(3, 4), 0, n.whole(3, 5, 4), n(5, 4)))
    for how in ("sum", "amax", "amin", "mean", "prod"):
        into: Make = lambda n, h=how: (n(3, 4), 0, n.whole(3, 5, 4), n(5, 4), h)
        yield from cases_of("scatter_reduce.two", into)
    for how in ("amax", "amin", "mean", "prod"):
        rows: Make = lambda n, h=how: (n(5, 4), 0, torch.tensor([3, 1, 3]), n(3, 4), h)
        yield from cases_of("index_reduce", rows)
        yield from cases_of("index_reduce", rows, include_self=False, smooth=how != "prod")
    yield from cases_of("put", lambda n: (n(3, 4), torch.tensor([[7, 2]]), n(1, 2), True))
    yield from cases_of("put", lambda n: (n(3, 4), torch.tensor([7, 2]), n(2)))
    mask = torch.tensor([True, False, True])
    yield from cases_of("index_put", lambda n: (n(3, 4), [mask], n(2, 4)))
    yield from cases_of("index_put", lambda n: (n(3, 4), [mask], n(4), True))
    yield from cases_of("index_add", lambda n: (n(5, 4), 0, n.whole(5, 3), n(3, 4)), alpha=0.5)
    yield from cases_of("index_copy", lambda n: (n(5, 4), 0, torch.tensor([3, 1]), n(2, 4)))
    yield from cases_of("index_fill.int_Scalar", lambda n: (n(5, 4), 0, torch.tensor([3, 1]), 1.5))
    yield from cases_of(
        "index_fill.int_Tensor", lambda n: (n(5, 4), 0, torch.tensor([3, 1]), n()), smooth=False
    )
    yield from cases_of("masked_scatter", lambda n: (n(3, 4), n.truths(3, 4), n(12)))
    yield from cases_of("select_scatter", lambda n: (n(5, 4), n(4), 0, 2))
    yield from cases_of("slice_scatter", lambda n: (n(5, 4), n(2, 4), 0, 1, 4, 2))
    yield from cases_of("bincount", lambda n: (torch.tensor([0, 2, 2, 4]), None, 6), smooth=False)
    yield from cases_of("one_hot", lambda n: (n.whole(4, 2, 3), 4), smooth=False)
    yield from cases_of("nonzero_static", lambda n: (n.truths(3, 4),), size=5, smooth=False)


def losses() -> Iterator[Case]:
    """Loss functions."""
    for reduction in (0, 1, 2):
        pair: Make = lambda n, r=reduction: (n(3, 4), n(3, 4), r)
        yield from cases_of("mse_loss l1_loss smooth_l1_loss huber_loss", pair)
        yield from cases_of("kl_div", lambda n, r=reduction: (n(3, 4), n(3, 4, low=0.1, high=1), r))
        yield from cases_of("soft_margin_loss", lambda n, r=reduction: (n(3, 4), n(3, 4).sign(), r))
        inside: Make = lambda n, r=reduction: (n(3, 4, low=0.1, high=0.9), n(3, 4, low=0, high=1), None, r)
        yield from cases_of("binary_cross_entropy", inside)
        yield from cases_of(
            "binary_cross_entropy_with_logits",
            lambda n, r=reduction: (n(3, 4), n(3, 4, low=0, high=1), None, n(4, low=0.5), r),
        )
        classes: Make = lambda n, r=reduction: (n(5, 4), torch.tensor([0, 3, -100, 1, 2]), n(4, low=0.5), r)
        yield from cases_of("nll_loss nll_loss_nd cross_entropy_loss", classes)
        image: Make = lambda n, r=reduction: (n(2, 4, 3, 3), n.whole(4, 2, 3, 3), None, r)
        yield from cases_of("nll_loss2d cross_entropy_loss", image)
        yield from cases_of(
            "cross_entropy_loss", lambda n, r=reduction: (n(5, 4), n.whole(4, 5), None, r, -100, 0.1)
        )
        yield from cases_of(
            "cross_entropy_loss", lambda n, r=reduction: (n(5, 4), n(5, 4, low=0, high=1), None, r)
        )
        yield from cases_of(
            "ctc_loss.IntList",
            lambda n, r=reduction: (
                n(6, 2, 5).float().log_softmax(2),
                n.whole(4, 2, 3) + 1,
                [6, 5],
                [3, 2],
                0,
                r,
            ),
        )
    yield from cases_of("nll_loss_forward", lambda n: (n(5, 4), n.whole(4, 5), None, 1, -100), smooth=False)
    yield from cases_of(
        "nll_loss2d_forward", lambda n: (n(2, 4, 3, 3), n.whole(4, 2, 3, 3), None, 1, -100), smooth=False
    )
