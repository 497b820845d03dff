"""The arithmetic of dimension 0: device iterations, gradient accumulation, replicas and samples.

Dimension 0 of every input holds, outermost first: device iterations, gradient accumulation, replicas (or groups of
replicas with the same input), and the samples of one micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.api.enums import CommGroupType, OutputMode
from podrun.poptorch.errors import ArgumentError

if TYPE_CHECKING:
    from podrun.poptorch.api.options import Options


@dataclass(frozen=True, slots=True)
class BatchDimensions:
    """The factors of dimension 0. ``groups``: groups of replicas with an input of their own."""

    iterations: int
    accumulation: int
    replicas: int
    groups: int
    orthogonal: bool = False
    """Whether replicas of a group lie as far apart as there are groups, instead of next to each other."""

    @property
    def group_of_replica(self) -> list[int]:
        """The input group of each replica."""
        size = self.replicas // self.groups
        return [r % self.groups if self.orthogonal else r // size for r in range(self.replicas)]

    @property
    def replica_of_group(self) -> list[int]:
        """The first replica of each input group."""
        return [self.group_of_replica.index(group) for group in range(self.groups)]

    @property
    def inputs(self) -> int:
        """Micro-batches that one call takes."""
        return self.iterations * self.accumulation * self.groups

    def outputs(self, mode: OutputMode, period: int) -> int:
        """Micro-batches of each result that one call returns."""
        if mode == OutputMode.All:
            return self.iterations * self.accumulation * self.replicas
        if mode == OutputMode.EveryN:
            return self.iterations // period * self.accumulation * self.replicas
        return self.replicas

    def describe(self) -> str:
        """The factors in words, for messages."""
        return (
            f"device iterations ({self.iterations}) x gradient accumulation ({self.accumulation}) x replicas with "
            f"data of their own ({self.groups})"
        )

    def narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """One micro-batch of an input. AssertionError if dimension 0 cannot be divided."""
        size = tensor.shape[0] if tensor.dim() else 1
        if size % self.inputs != 0:
            raise ArgumentError(
                f"Invalid batch dimension: In the input {list(tensor.shape)}, the batch dimension ({size}) must be a "
                f"multiple of {self.inputs}: {self.describe()}"
            )
        if not tensor.dim():
            if self.inputs != 1:
                raise ArgumentError(
                    f"Invalid batch dimension: a tensor without dimensions cannot hold {self.inputs} micro-batches: "
                    f"{self.describe()}"
                )
            return tensor
        return tensor.narrow(0, 0, size // self.inputs)


def batch_dimensions(options: Options, training: bool) -> BatchDimensions:
    """The factors that options set. Inference does not accumulate."""
    return BatchDimensions(
        iterations=options.device_iterations,
        accumulation=options.Training.gradient_accumulation if training else 1,
        replicas=options.replication_factor,
        groups=options.replication_factor // options.input_group_size,
        orthogonal=options.input_cgt == CommGroupType.Orthogonal,
    )
