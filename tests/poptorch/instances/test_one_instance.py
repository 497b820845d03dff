"""A single instance: Horovod's calls give it back its own values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from podrun.poptorch.instances import launched as hvd  # noqa: E402


@pytest.fixture(autouse=True)
def _started() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def test_reductions_in_place_keep_the_values_of_one_instance() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([[3, 4]])]
    results = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert [result is tensor for result, tensor in zip(results, tensors, strict=True)] == [True, True]
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 2.0], [[3, 4]]]


def test_objects_of_all_instances_are_those_of_one() -> None:
    assert hvd.allgather_object({"epoch": 7}) == [{"epoch": 7}]


def test_an_optimizer_keeps_its_attributes_and_state() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((2,), 2.0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [2.0, 2.0]


def test_an_instance_that_does_not_exist_is_refused() -> None:
    with pytest.raises(hvd.popdist_error, match="no instance 1 among 1"):
        hvd.broadcast_object(1, root_rank=1)


def test_calls_before_init_are_refused() -> None:
    hvd.shutdown()
    for call in (hvd.size, hvd.rank, hvd.local_size, hvd.local_rank, lambda: hvd.allgather_object(1)):
        with pytest.raises(ValueError, match=r"use hvd\.init\(\)"):
            call()
