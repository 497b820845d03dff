"""Calls of every form of the table of operators, with shapes and values of their own, to compare with torch.

    python -m tests.poptorch.operators.operator_cases [FORM or FAMILY ...]

prints the cases that differ. A form is compared as torch's operator of that name: forward, and the gradient of every
floating-point argument, in float32 and in float16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

from tests.poptorch.operators.cases import Case
from tests.poptorch.operators.layer_cases import indexing, linear_algebra, losses, networks, products
from tests.poptorch.operators.plain_cases import activations, factories, pointwise, reductions, shaping

FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    each.__name__: each
    for each in (
        *(pointwise, activations, shaping, factories, reductions, products),
        *(linear_algebra, networks, indexing, losses),
    )
}

WITHOUT_CASES = {
    "random numbers: what they are is compared by their statistics": (
        "dropout native_dropout feature_dropout bernoulli.default bernoulli.p bernoulli.Tensor randn randn_like rand "
        "rand_like uniform uniform_ normal_functional normal_ normal exponential exponential_ randint.default "
        "randint_like.default randint.low randint_like.low_dtype randperm multinomial "
        "random.default random.to random.from"
    ),
    "elements that torch leaves undefined": (
        "empty.memory_format empty_like new_empty empty_strided new_empty_strided empty_permuted"
    ),
    "other names and parts of forms that have cases": (
        "zero_ fill_ copy_ to.dtype_layout to.device lift_fresh_copy numpy_T.default new_zeros.default _convolution "
        "_cdist_forward _pdist_forward _fused_rms_norm _weight_norm_interface _index_put_impl "
        "embedding_bag _embedding_bag _embedding_bag_forward_only max_unpool3d "
        "nanmean _linalg_check_errors"
    ),
}
"""Forms without a case of their own, and why."""


def cases(family: str) -> list[Case]:
    """The cases of a family, by its name."""
    return list(FAMILIES[family]())


def main(wanted: list[str]) -> None:
    """Print the cases that differ."""
    from tests.poptorch.operators.opinfo import compare_case

    count = bad = 0
    for family in FAMILIES:
        for case in cases(family):
            if wanted and case.form not in wanted and family not in wanted:
                continue
            for dtype in (torch.float32, torch.float16):
                if dtype is torch.float16 and family == "linear_algebra":
                    continue
                count += 1
                try:
                    compare_case(case, dtype)
                except Exception as error:
                    bad += 1
                    text = " ".join(str(error).strip().split("\n")[:12])[:300]
                    print(f"{family} {case.label} {dtype}: {type(error).__name__}: {text}", flush=True)
    print(f"{count} cases, {bad} differ")


if __name__ == "__main__":
    main(sys.argv[1:])
