"""Which planner prices which primitive. The whole list of what the model knows, in one place."""

from __future__ import annotations

from collections.abc import Callable

from podrun.costmodel import ctc, elementwise, families, lookups
from podrun.costmodel.elementwise import OPS
from podrun.costmodel.flat_graph import Equation
from podrun.costmodel.plan import Plan
from podrun.costmodel.target import Chip

Planner = Callable[[Chip, Equation], Plan]

VIEWS = frozenset(
    {
        "reshape",
        "broadcast_in_dim",
        "squeeze",
        "expand_dims",
        "stop_gradient",
        "optimization_barrier",
        "random_wrap",
        "random_unwrap",
        "random_seed",
        "sharding_constraint",
        "pvary",
        "name",
        "split",
        "create_token",
        "slice",
        "empty",
    }
)
"""Equations that only rename or select bytes. Poplar keeps them as views; the consumer's exchange does the
move."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "product"})
"""Products and convolutions; ``product`` is one whose sizes stand in its parameters (`operators`)."""

REDUCTIONS: dict[str, Callable[[Chip, Equation, float], Plan]] = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"),
        elementwise.plan_reduction,
    ),
    **dict.fromkeys(("argmax", "argmin"), elementwise.plan_arg_reduce),
}
"""Reductions, which begin where their operand lies."""

PLANNERS: dict[str, Planner] = {
    **dict.fromkeys(("transpose", "pad", "concatenate", "rev", "tile"), families.plan_movement),
    **dict.fromkeys(("gather", "dynamic_slice"), lookups.plan_gather),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"),
        lookups.plan_scatter,
    ),
    "dynamic_update_slice": lookups.plan_scatter,
    **dict.fromkeys(
        (
            "reduce_window",
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "select_and_scatter_add",
            "select_and_gather_add",
            "select_and_scatter",
        ),
        families.plan_pooling,
    ),
    **dict.fromkeys(
        (
            "random_bits",
            "threefry2x32",
            "random_fold_in",
            "random_split",
            "rng_bit_generator",
            "random_clone",
        ),
        families.plan_random,
    ),
    "iota": families.plan_fill,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), families.plan_scan_reduce),
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), families.plan_sort),
    **dict.fromkeys(
        ("cholesky", "lu", "geqrf", "householder_product", "qr", "eigh", "svd", "triangular_solve"),
        families.plan_factorisation,
    ),
    "fft": families.plan_fft,
    "ctc_loss": ctc.plan_loss,
    "ctc_beam_search": ctc.plan_beam_search,
}
"""Families priced equation by equation."""


def known(primitive: str) -> bool:
    """True iff a planner of its own prices ``primitive``; otherwise the stated bound does."""
    return any(primitive in those for those in (OPS, VIEWS, PRODUCTS, REDUCTIONS, PLANNERS))
