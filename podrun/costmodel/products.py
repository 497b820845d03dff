"""The product that a traced dot, convolution or size table stands for."""

from __future__ import annotations

import math
from typing import Any

from podrun.core.errors import InvalidOptionError
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.equations import Equation
from podrun.costmodel.settings import DEFAULT_PROPORTION


@dataclass(frozen=True, slots=True)
class Product:
    """G products [M, K] x [K, N]; a convolution if ``kernel`` > 1 (K is then the channels of one position).

    ``row_length``: output pixels side by side. ``stride``: how far apart the input pixels of neighbouring outputs are.
    ``transposed``: the rows' operand must be regrouped first. ``reuse``: how often each input element stands in the
    rows (kernel positions of a weight gradient), so that fewer bytes move than the rows hold.
    """

    groups: int
    m: int
    k: int
    n: int
    input_type: str = "float16"
    output_type: str = "float16"
    partials_type: str = "float16"
    kernel: int = 1
    row_length: int = 1
    stride: int = 1
    proportion: float = DEFAULT_PROPORTION
    transposed: bool = False
    reuse: int = 1
    rows_resident: bool = False

    @property
    def macs(self) -> float:
        """How many multiply-adds the product takes."""
        return float(self.groups) * self.m * self.k * self.n * self.kernel


def check_proportion(proportion: float) -> None:
    """Raises InvalidOptionError for an availableMemoryProportion outside (0, 1]."""
    if not 0.0 < proportion <= 1.0:
        raise InvalidOptionError(
            f"availableMemoryProportion {proportion} is not above 0 and at most 1",
            hint="Give a share of tile memory such as 0.6 (the default).",
        )


def _type(dtype: str) -> str:
    if dtype.startswith("float8"):
        return "float8"
    return "float16" if dtype in ("float16", "bfloat16") else "float32"


def _planned(equation: Equation, partials_type: str, proportion: float) -> dict[str, Any]:
    """What the planner goes by besides sizes: types, and the share of tile memory."""
    input_type = _type(equation.operands[0].dtype)
    partials = {"float16": partials_type, "float8": "float16"}  # 8-bit products have half partials only.
    return {
        "input_type": input_type,
        "output_type": _type(equation.results[0].dtype),
        "partials_type": partials.get(input_type, "float32"),
        "proportion": proportion,
    }


def of_dot(equation: Equation, partials_type: str, proportion: float) -> Product:
    """Batch dimensions become groups, contracted ones K, the rest of each side M and N."""
    (contract_l, contract_r), (batch_l, batch_r) = equation.params["dimension_numbers"]
    left, right = equation.operands
    groups = math.prod(left.shape[d] for d in batch_l)
    k = math.prod(left.shape[d] for d in contract_l)
    m = math.prod(s for d, s in enumerate(left.shape) if d not in (*contract_l, *batch_l))
    n = math.prod(s for d, s in enumerate(right.shape) if d not in (*contract_r, *batch_r))
    transposed = bool(left.shape) and len(left.shape) - 1 not in contract_l
    swapped = n > m and groups == 1
    if swapped:
        # The planner may swap sides: the longer one feeds rows.
        m, n = n, m
    return Product(
        groups,
        m,
        k,
        n,
        transposed=transposed,
        rows_resident=swapped,
        **_planned(equation, partials_type, proportion),
    )


def of_sizes(equation: Equation, partials_type: str, proportion: float) -> Product:
    """A product whose sizes are the equation's parameters."""
    return Product(**_planned(equation, partials_type, proportion), **equation.params)


def of_convolution(equation: Equation, partials_type: str, proportion: float) -> Product:
    """Forward and data-gradient convolutions keep kernel positions; a weight gradient becomes a plain product.

    A weight gradient is seen by its window being larger than its result's field: its contraction runs over
    the batch and the field, its rows are the kernel positions and input channels.
    """
    params = equation.params
    numbers = params["dimension_numbers"]
    left, right = equation.operands
    out = equation.results[0]
    batch = left.shape[numbers.lhs_spec[0]]
    channels_in = right.shape[numbers.rhs_spec[1]]
    channels_out = right.shape[numbers.rhs_spec[0]]
    window = [right.shape[d] for d in numbers.rhs_spec[2:]]
    field = [out.shape[d] for d in numbers.out_spec[2:]]
    groups = int(params["feature_group_count"])
    batch_groups = int(params["batch_group_count"])
    planned = _planned(equation, partials_type, proportion)
    kernel, positions = math.prod(window), math.prod(field)
    if kernel > positions and kernel > 1:
        all_groups = groups * batch_groups
        rows = batch // batch_groups * positions
        return Product(
            all_groups,
            max(1, rows),
            channels_in * kernel,
            max(1, channels_out // all_groups),
            transposed=True,
            reuse=positions,
            **planned,
        )
    spread = math.prod(params["lhs_dilation"])
    stride = int(params["window_strides"][0]) if params["window_strides"] else 1
    # A dilated input (gradient of a strided convolution) is mostly zeros, which the library's split skips.
    effective = max(1, round(kernel / spread))
    return Product(
        groups,
        batch * positions,
        channels_in,
        max(1, channels_out // groups),
        kernel=effective,
        row_length=field[-1] if field else 1,
        stride=min(stride, max(window)) if kernel > 1 else 1,
        transposed=False,
        **planned,
    )
