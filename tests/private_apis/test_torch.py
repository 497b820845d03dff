"""The private names of torch that podrun uses are there."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from podrun.private_apis import torch as private


def test_torch_has_every_private_name_that_podrun_uses() -> None:
    assert private.missing() == []
