"""Loading in this process: batch sizes, lengths, parts of several processes, samplers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from tests.poptorch.data.data_sets import Numbered, Streamed  # noqa: E402


def options_for(iterations: int = 1, replicas: int = 1, accumulation: int = 1) -> Any:
    made = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    made.Training.gradientAccumulation(accumulation)
    return made


def in_process(process: int, processes: int, seed: int | None = None) -> Any:
    made = poptorch.Options()
    made.Distributed.configureProcessId(process, processes)
    return made if seed is None else made.randomSeed(seed)


def numbers(loader: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


def test_a_batch_has_the_samples_of_one_call() -> None:
    options = options_for(iterations=2, replicas=4, accumulation=3)
    options.inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    loader = poptorch.DataLoader(options, Numbered(60), batch_size=2)
    assert loader.combinedBatchSize == 2 * 2 * 2 * 3
    assert loader.options is options
    assert len(loader) == 2
    assert numbers(loader) == [list(range(24)), list(range(24, 48))]
    with pytest.raises(AttributeError, match="frozen"):
        options.deviceIterations(3)


def test_the_last_batch_is_dropped_unless_it_is_asked_for(caplog: Any) -> None:
    assert numbers(poptorch.DataLoader(options_for(), Numbered(5), batch_size=2)) == [[0, 1], [2, 3]]
    assert not caplog.records
    loader = poptorch.DataLoader(options_for(), Numbered(5), batch_size=2, drop_last=False)
    assert numbers(loader)[-1] == [4]
    assert "last batch has 1 of 2 samples" in caplog.text


def test_a_batch_size_of_none_leaves_batches_to_the_data_set() -> None:
    loader = poptorch.DataLoader(options_for(), Numbered(3), batch_size=None)
    assert loader.combinedBatchSize is None
    assert [labels.item() for _, labels in loader] == [0, 1, 2]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_processes_load_parts_that_do_not_overlap(shuffle: bool, drop_last: bool) -> None:
    found: list[set[int]] = [set(), set()]
    loaders = [
        poptorch.DataLoader(
            in_process(process, 3, 7), Numbered(20), batch_size=2, shuffle=shuffle, drop_last=drop_last
        )
        for process in range(3)
    ]
    for epoch in range(2):
        parts = [[n for batch in numbers(loader) for n in batch] for loader in loaders]
        assert len({n for part in parts for n in part}) == sum(map(len, parts))
        assert [len(part) for part in parts] == ([6, 6, 6] if drop_last else [7, 7, 6])
        found[epoch] = {n for part in parts for n in part}
    if not shuffle:
        assert found[0] | found[1] == set(range(20))
    else:
        assert parts[0] != sorted(parts[0])


def test_loaders_of_several_processes_refuse_what_would_repeat_elements() -> None:
    with pytest.raises(AssertionError, match="randomSeed"):
        poptorch.DataLoader(in_process(0, 2), Numbered(8), shuffle=True)
    with pytest.raises(AssertionError, match="auto_distributed_partitioning=False"):
        poptorch.DataLoader(in_process(0, 2), Streamed(8))
    loader = poptorch.DataLoader(in_process(0, 2), Streamed(4), auto_distributed_partitioning=False)
    assert len(list(loader)) == 4
    everything = poptorch.DataLoader(in_process(1, 2), Numbered(4), auto_distributed_partitioning=False)
    assert numbers(everything) == [[0], [1], [2], [3]]


def test_batches_of_a_sampler_are_micro_batches() -> None:
    def sampler() -> Any:
        return torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(range(10)), 2, drop_last=True)

    loader = poptorch.DataLoader(options_for(iterations=2), Numbered(10), batch_sampler=sampler())
    assert loader.combinedBatchSize == 4
    assert (len(loader), numbers(loader)) == (2, [[0, 1, 2, 3], [4, 5, 6, 7]])
    rest = poptorch.DataLoader(
        options_for(iterations=2), Numbered(10), batch_sampler=sampler(), drop_last=False
    )
    assert (len(rest), numbers(rest)[-1]) == (3, [8, 9])
    for wrong in ({"batch_size": 2}, {"shuffle": True}):
        with pytest.raises(poptorch.Error, match="batch_sampler excludes"):
            poptorch.DataLoader(options_for(), Numbered(10), batch_sampler=sampler(), **wrong)
    with pytest.raises(poptorch.Error, match="auto_distributed_partitioning"):
        poptorch.DataLoader(in_process(0, 2), Numbered(10), batch_sampler=sampler())


def test_arguments_that_do_not_go_together_are_refused(caplog: Any) -> None:
    with pytest.raises(AssertionError, match=r"poptorch\.Options"):
        poptorch.DataLoader({}, Numbered(2))
    with pytest.raises(AssertionError, match="AsyncRebatched"):
        poptorch.DataLoader(options_for(), Numbered(2), rebatched_worker_size=2)
    with pytest.raises(AssertionError, match="asynchronous"):
        poptorch.DataLoader(options_for(), Numbered(2), async_options={"buffer_size": 2})
    poptorch.DataLoader(options_for(), Streamed(4), num_workers=2)
    assert "worker_init_fn" in caplog.text


def test_shuffling_alone_follows_torchs_seed() -> None:
    orders = []
    for _ in range(2):
        loader = poptorch.DataLoader(options_for().randomSeed(3), Numbered(20), shuffle=True)
        orders.append(numbers(loader))
    assert orders[0] == orders[1] != sorted(orders[0])
