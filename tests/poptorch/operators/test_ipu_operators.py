"""PopTorch's own operators in models: control flow, slices at run time, printing, decoding, points, custom ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402


class Function(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def on_ipu(function: Any, *args: Any) -> Any:
    """The results of a function as an inference model."""
    return poptorch.inferenceModel(Function(function))(*args)


def test_a_loop_runs_its_body_with_values_from_outside() -> None:
    def forward(module: Any, x: Any) -> Any:
        total, steps = poptorch.for_loop(
            5, lambda y, n: [y * 1.5 + module.weight + x, n + 1], [x, torch.zeros(1)]
        )
        return total, steps

    x = torch.tensor([[0.5, -1.0]])
    module = Function(forward)
    expected = module(x)
    total, steps = on_ipu(forward, x)
    torch.testing.assert_close(total, expected[0].detach())
    assert steps.item() == 5


def test_a_branch_computes_one_body() -> None:
    def forward(module: Any, which: Any, x: Any) -> Any:
        return poptorch.cond(
            which,
            lambda a: torch.log(a),
            [x],
            lambda a: a.sum(0, keepdim=True).expand(2) - module.weight,
            [x],
        )[0]

    model = poptorch.inferenceModel(Function(forward))
    x = torch.tensor([1.0, 4.0])
    torch.testing.assert_close(model(torch.tensor([True]), x), torch.log(x))
    torch.testing.assert_close(model(torch.tensor([False]), x), torch.tensor([4.0, 3.0]))


def test_control_flow_is_refused_where_it_cannot_work() -> None:
    def loop(module: Any, x: Any) -> Any:
        made = poptorch.for_loop(2, lambda y: y * module.weight, [x])[0]
        return made, poptorch.identity_loss(made, "sum")

    training = poptorch.trainingModel(Function(loop))
    with pytest.raises(
        poptorch.Error, match=r"for_loop is supported in inference models only[\s\S]*test_ipu_operators"
    ):
        training(torch.ones(1, 2))
    with pytest.raises(poptorch.Error, match="shapes and types"):
        on_ipu(lambda m, x: poptorch.for_loop(2, lambda y: y.sum(), [x])[0], torch.ones(1, 2))
    with pytest.raises(poptorch.Error, match="in place"):
        on_ipu(lambda m, x: poptorch.for_loop(2, lambda y: y + x.add_(1), [x * 1])[0], torch.ones(1, 2))
    with pytest.raises(ValueError, match="list of tensors"):
        poptorch.for_loop(2, lambda y: y, torch.ones(1))
    with pytest.raises(poptorch.Error, match=r"poptorch.CPU \('host'\)[\s\S]*test_ipu_operators"):
        on_ipu(lambda m, x: poptorch.CPU(lambda y: y, "host")(1.0), torch.ones(1))
    with pytest.raises(poptorch.Error, match="must return tensors"):
        on_ipu(lambda m, x: poptorch.CPU(lambda y: 1, "host")(x), torch.ones(1))

    def on_host(module: Any, x: Any) -> Any:
        made = poptorch.CPU(lambda y: y, "host")(x * module.weight)
        return poptorch.identity_loss(made, "sum")

    with pytest.raises(poptorch.Error, match=r"poptorch\.CPU is supported in inference models only"):
        poptorch.trainingModel(Function(on_host))(torch.ones(1, 2))


def test_constants_go_to_the_device_of_an_input() -> None:
    def both(module: Any, x: Any) -> Any:
        return torch.where(torch.ones(2, 2).to(device=x.device, dtype=torch.bool), x, -x)

    assert torch.equal(on_ipu(both, torch.ones(2, 2)), torch.ones(2, 2))


def test_distributions_do_not_look_at_values_in_forward() -> None:
    def divergence(module: Any, x: Any) -> Any:
        q = torch.distributions.Normal(x, torch.exp(x))
        p = torch.distributions.Normal(torch.zeros_like(x), torch.ones_like(x))
        return torch.distributions.kl_divergence(q, p), q.log_prob(x), q.rsample().shape[0]

    x = torch.linspace(-1, 1, 4)
    found, expected = on_ipu(divergence, x), divergence(None, x)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(x, -torch.exp(x))


class AroundTheHost(torch.nn.Module):
    """Two functions of the host, one of numpy and one with parameters of the model, between layers of the IPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own, self.last = (torch.nn.Linear(4, 4) for _ in range(3))
        self.calls = 0
        self.sorted, self.applied = poptorch.CPU(self.count, "sorted"), poptorch.CPU(self.own, "own")

    def count(self, x: Any, y: Any) -> Any:
        self.calls += 1
        return torch.from_numpy(np.sort(x.detach().numpy(), 1)), y.sum()

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        ordered, total = self.sorted(hidden, x)
        return self.last(self.applied(torch.relu(ordered) + total)) + hidden, x * 2


def test_functions_of_the_host_run_in_the_middle_of_a_model_in_every_run() -> None:
    torch.manual_seed(0)
    model = AroundTheHost().eval()
    inference = poptorch.inferenceModel(
        model, poptorch.Options().deviceIterations(2).replicationFactor(2).logCycleCount(True)
    )
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(12, 4)
        made, double = inference(x)
        expected = torch.cat([model(each)[0].detach() for each in x.split(3)])
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(double, 2 * x)
    assert model.calls == 1 + 2 * (4 + 4)  # Once to learn the shapes; then in each run, and in torch's.
    assert inference.cycleCount() > 0
    with torch.no_grad():
        model.last.bias += 1.0
    inference.copyWeightsToDevice()
    torch.testing.assert_close(inference(x)[0], made + 1.0, rtol=1e-4, atol=1e-5)
    inference.detachFromDevice()
    torch.testing.assert_close(inference(x)[0], made + 1.0, rtol=1e-4, atol=1e-5)
    with pytest.raises(poptorch.Error, match="cannot be saved"):
        inference.save("model.poptorch")


def test_what_a_function_of_the_host_gives_keeps_its_shape() -> None:
    model = poptorch.inferenceModel(
        Function(lambda m, x: poptorch.CPU(lambda y: y[: 1 + int(y.sum() != 0)], "cut")(x * 1) + 1)
    )
    with pytest.raises(poptorch.Error, match="shape"):
        model(torch.ones(2))


def test_slices_at_run_time_follow_their_start() -> None:
    def forward(module: Any, x: Any, start: Any) -> Any:
        part = poptorch.dynamic_slice(x, 1, start, 4, 2)
        return part, poptorch.dynamic_update(x, part[:, :1] * 0, 1, start, 1)

    model = poptorch.inferenceModel(Function(forward))
    x = torch.arange(16.0).reshape(2, 8)
    for first in (0, 3):
        part, updated = model(x, torch.tensor([first], dtype=torch.int32))
        torch.testing.assert_close(part, x[:, first : first + 4 : 2])
        assert torch.equal(updated[:, first], torch.zeros(2))


def test_a_tensor_is_printed_with_its_gradient(capfd: pytest.CaptureFixture[str]) -> None:
    def forward(module: Any, x: Any) -> Any:
        seen = poptorch.ipu_print_tensor(x * module.weight, "product")
        return seen, poptorch.identity_loss(seen, "sum")

    training = poptorch.trainingModel(Function(forward), optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.0))
    training(torch.tensor([[3.0, 4.0]]))
    printed = capfd.readouterr().err
    assert "product: ((3.000, 8.000))" in printed
    assert "product_gradient: ((1.000, 1.000))" in printed


def test_the_decoder_finds_the_most_probable_labels() -> None:
    probabilities = torch.tensor([[0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8], [0.1, 0.1, 0.8]])
    logs = probabilities.log()[:, None]
    scores, lengths, labels = on_ipu(
        lambda m, p, n: poptorch.ctc_beam_search_decoder(p, n, beam_width=4, top_paths=2),
        logs,
        torch.tensor([4]),
    )
    assert lengths[0, 0] == 2
    assert labels[0, 0].tolist() == [1, 2, 0, 0]
    assert scores[0, 0] > scores[0, 1]


def test_points_are_chosen_as_on_the_host() -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(12, 3, generator=generator), torch.randn(5, 3, generator=generator)
    chosen = on_ipu(lambda m, p: poptorch.fps(p, [0, 5, 12], 0.5), x)
    assert chosen.tolist() == poptorch.fps(x, [0, 5, 12], 0.5).tolist()
    batches = ([0] * 6 + [1] * 6, [0, 0, 1, 1, 1])
    near = on_ipu(lambda m, a, b: poptorch.nearest(a, b, *batches), x, y)
    assert near.tolist() == poptorch.nearest(x, y, *batches).tolist()


def test_a_custom_operator_computes_a_jax_function() -> None:
    import jax.numpy as jnp

    from podrun.popart import register_op

    register_op("poptorch.tests", "Cube", 1, lambda x, *, scale=1.0: scale * jnp.power(x, 3))

    def forward(module: Any, x: Any) -> Any:
        (cubed,) = poptorch.custom_op([x], "Cube", "poptorch.tests", 1, [x], {"scale": 2.0})
        return cubed

    torch.testing.assert_close(on_ipu(forward, torch.tensor([1.0, 3.0])), torch.tensor([2.0, 54.0]))
    with pytest.raises(poptorch.Error, match="Absent"):
        on_ipu(lambda m, x: poptorch.custom_op([x], "Absent", "poptorch.tests", 1, [x])[0], torch.ones(2))
    with pytest.raises(ValueError, match="attributes"):
        poptorch.custom_op([torch.ones(1)], "Cube", "poptorch.tests", 1, [torch.ones(1)], {"scale": object()})


def test_what_is_missing_is_named_with_its_line() -> None:
    with pytest.raises(poptorch.Error, match=r"aten::nonzero[\s\S]*module ''.*test_ipu_operators.py:\d+"):
        on_ipu(lambda m, x: x[x > 0], torch.ones(2))
    with pytest.raises(poptorch.Error, match=r"complex|fft[\s\S]*test_ipu_operators.py:\d+"):
        on_ipu(lambda m, x: torch.fft.fft(x).real, torch.ones(2))
