"""Results written into tensors that are given (``out=``), and numbers drawn in place, against the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0], [2.0, 2.5, 0.25]])


class Called(torch.nn.Module):
    """Calls a function with the argument."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("held", torch.zeros(3, 3))

    def forward(self, x: Any) -> Any:
        return self.call(self, x)


def _two(function: Any, **keywords: Any) -> Callable[..., Any]:
    def call(module: Any, x: Any) -> Any:
        values, places = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
        given = function(x, 1, out=(values, places), **keywords)
        return values, places, given[0] + 1

    return call


def _out(function: Any, *shape: int, dtype: Any = torch.float32) -> Callable[..., Any]:
    def call(module: Any, x: Any) -> Any:
        made = torch.ones(shape, dtype=dtype)
        given = function(x, made)
        return made, given + 1

    return call


def _view(module: Any, x: Any) -> Any:
    made = torch.zeros(2, 3, 3)
    torch.matmul(x, x, out=made[1])
    return made


def _buffer(module: Any, x: Any) -> Any:
    torch.add(module.held, x, out=module.held)
    return module.held * 2


def _argument(module: Any, x: Any) -> Any:
    y = x.clone()
    torch.exp(y, out=y)
    return y


BOUNDS = torch.tensor([-1.0, 0.0, 2.0])
FORMS: dict[str, Callable[..., Any]] = {
    "addmv": _out(lambda x, o: torch.addmv(x[0], x, x[1], beta=0.5, alpha=2, out=o), 3),
    "addmm": _out(lambda x, o: torch.addmm(x, x, x, beta=0.5, out=o), 3, 3),
    "addbmm": _out(lambda x, o: torch.addbmm(x, x[None], x[None], out=o), 3, 3),
    "addcmul": _out(lambda x, o: torch.addcmul(x, x, x, value=0.5, out=o), 3, 3),
    "matmul": _out(lambda x, o: torch.matmul(x, x, out=o), 3, 3),
    "matmul vector": _out(lambda x, o: torch.matmul(x, x[0], out=o), 3),
    "mm": _out(lambda x, o: torch.mm(x, x, out=o), 3, 3),
    "mv": _out(lambda x, o: torch.mv(x, x[0], out=o), 3),
    "dot": _out(lambda x, o: torch.dot(x[1], x[0], out=o), *()),
    "bmm": _out(lambda x, o: torch.bmm(x[None], x[None], out=o), 1, 3, 3),
    "cumsum": _out(lambda x, o: torch.cumsum(x, 1, out=o), 3, 3),
    "cumprod": _out(lambda x, o: torch.cumprod(x, 0, out=o), 3, 3),
    "bucketize": _out(lambda x, o: torch.bucketize(x, BOUNDS.to(x.device), out=o), 3, 3, dtype=torch.int64),
    "searchsorted": _out(
        lambda x, o: torch.searchsorted(BOUNDS.to(x.device), x, right=True, out=o), 3, 3, dtype=torch.int64
    ),
    "add": _out(lambda x, o: torch.add(x, x, alpha=3, out=o), 3, 3),
    "sub": _out(lambda x, o: torch.sub(x, x[0], out=o), 3, 3),
    "mul half": _out(lambda x, o: torch.mul(x, 2, out=o), 3, 3, dtype=torch.float16),
    "compare": _out(lambda x, o: torch.gt(x, 0, out=o), 3, 3, dtype=torch.bool),
    "exp": _out(lambda x, o: torch.exp(x, out=o), 3, 3),
    "clamp": _out(lambda x, o: torch.clamp(x, -1, 1, out=o), 3, 3),
    "where": _out(lambda x, o: torch.where(x > 0, x, x * 2, out=o), 3, 3),
    "sum": _out(lambda x, o: torch.sum(x, 1, out=o), 3),
    "mean": _out(lambda x, o: torch.mean(x, (0,), True, out=o), 1, 3),
    "cat": _out(lambda x, o: torch.cat([x, x], 1, out=o), 3, 6),
    "stack": _out(lambda x, o: torch.stack([x, x], out=o), 2, 3, 3),
    "gather": _out(lambda x, o: torch.gather(x, 1, (x > 0).long(), out=o), 3, 3),
    "index_select": _out(lambda x, o: torch.index_select(x, 0, (x[0] > 0).long(), out=o), 3, 3),
    "arange": _out(lambda x, o: torch.arange(3, out=o), 3),
    "linspace": _out(lambda x, o: torch.linspace(0, 1, 3, out=o), 3),
    "full": _out(lambda x, o: torch.full((3,), 2.5, out=o), 3),
    "softmax": _out(lambda x, o: torch.softmax(x, 1, out=o), 3, 3),
    "argmax": _out(lambda x, o: torch.argmax(x, 1, out=o), 3, dtype=torch.int64),
    "norm": _out(lambda x, o: torch.linalg.norm(x, dim=1, out=o), 3),
    "empty": _out(lambda x, o: torch.matmul(x, x, out=o), 0),
    "max": _two(torch.max),
    "min": _two(torch.min),
    "topk values": lambda m, x: torch.topk(
        x, 1, out=(torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.int64))
    )[0],
    "view": _view,
    "buffer": _buffer,
    "argument": _argument,
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", FORMS)
def test_results_are_written_into_what_is_given(name: str) -> None:
    call = FORMS[name]
    expected = call(Called(call), X.clone())
    made = poptorch.inferenceModel(Called(call))(X)
    torch.testing.assert_close(made, expected, check_dtype=False, rtol=1e-4, atol=1e-5)


def test_a_result_that_does_not_fit_the_type_is_refused_as_by_torch() -> None:
    call = _out(lambda x, o: torch.add(x, x, out=o), 3, 3, dtype=torch.int64)
    with pytest.raises(poptorch.Error, match=r"float32 can't be cast to the output type torch\.int64"):
        poptorch.inferenceModel(Called(call))(X)


def test_a_result_of_another_shape_takes_its_place_with_torchs_warning() -> None:
    call = _out(lambda x, o: torch.add(x, x, out=o), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = call(Called(call), X)
    with pytest.warns(UserWarning, match="resized"):
        made = poptorch.inferenceModel(Called(call))(X)
    torch.testing.assert_close(made, expected)


def test_integers_drawn_in_place_lie_within_their_bounds() -> None:
    cases: list[tuple[tuple[int, ...], int, int, Any]] = [
        ((), 0, 1 << 24, torch.float32),
        ((7,), 0, 6, torch.float32),
        ((-3, 5), -3, 4, torch.float32),
        ((2, 9), 2, 8, torch.int32),
    ]

    def call(module: Any, x: Any) -> Any:
        return tuple(torch.zeros(4000, dtype=dtype).random_(*bounds) for bounds, _, _, dtype in cases)

    results = poptorch.inferenceModel(Called(call))(X)
    for drawn, (bounds, low, high, dtype) in zip(results, cases, strict=True):
        assert drawn.shape == (4000,)
        assert drawn.dtype == dtype
        assert torch.equal(drawn, drawn.round())
        assert drawn.min() >= low
        assert drawn.max() <= high
        if bounds:
            assert set(drawn.tolist()) == set(range(low, high + 1))


def test_normalisations_inside_loops_compute_what_the_cpu_computes() -> None:
    class Looped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                [torch.nn.GroupNorm(2, 4), torch.nn.LayerNorm(5), torch.nn.InstanceNorm1d(4)]
            )
            with torch.no_grad():
                for value in self.parameters():
                    value.uniform_(0.5, 1.5)

        def forward(self, x: Any) -> Any:
            def body(y: Any) -> Any:
                for layer in self.layers:
                    y = layer(y) * 2
                return [y]

            return poptorch.for_loop(2, body, [x])[0]

    torch.manual_seed(3)
    module = Looped().eval()
    x = torch.randn(3, 4, 5)
    torch.testing.assert_close(poptorch.inferenceModel(module)(x), module(x).detach(), rtol=1e-4, atol=1e-5)
