"""The private names of torch that podrun uses are there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from podrun.private_apis import torch as private  # noqa: E402


def test_torch_has_every_private_name_that_podrun_uses() -> None:
    assert private.missing_torch_names() == []


def test_a_tensor_without_data_says_that_it_is_on_the_device_that_is_shown() -> None:
    x = private.fake_mode().from_tensor(torch.ones(2))
    answers = iter([torch.device("ipu:0"), None])
    with private.shown_device(lambda: next(answers)):
        assert [str(x.device), str(x.device)] == ["ipu:0", "cpu"]
    assert str(x.device) == "cpu"
