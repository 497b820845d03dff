"""What a session asks for of its model."""

from __future__ import annotations

from dataclasses import dataclass

from podrun.session.optimizers.base import Optimizer
from podrun.session.options.session_options import SessionOptions
from podrun.session.step_data.dataflow import DataFlow
from podrun.session.tensor_info import InputShapeInfo


@dataclass(frozen=True, slots=True)
class Request:
    """Which tensors, trained by what, on how many IPUs. ``as_in_training``: operators drop out and change running
    statistics although there is no loss. ``own_copies``: each machine keeps and updates all weights by itself.
    """

    name: str
    flow: DataFlow
    options: SessionOptions
    shapes: InputShapeInfo
    ipus_per_replica: int
    loss: str | None = None
    optimizer: Optimizer | None = None
    as_in_training: bool = False
    own_copies: bool = False

    @property
    def training(self) -> bool:
        """Whether operators mean what they mean in training."""
        return self.as_in_training or self.loss is not None
