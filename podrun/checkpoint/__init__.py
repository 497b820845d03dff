"""Checkpoints of a training run: atomic, verified, a part for each instance, written while training goes on.

The state of a session or model enters as plain data (`values`); files leave. `folder` has their format and writes them
so that a kill at any byte leaves the last good checkpoint; `checkpoints` is what a training loop calls.
"""

from podrun.checkpoint.checkpoints import Checkpointed, Checkpoints, Resumed
from podrun.checkpoint.policy import CheckpointPolicy, Spacing, WriteMode, checkpoint_policy_of
from podrun.checkpoint.values import (
    CheckpointError,
    DamagedCheckpointError,
    random_state,
    set_random_state,
)

__all__ = [
    "CheckpointError",
    "CheckpointPolicy",
    "Checkpointed",
    "Checkpoints",
    "DamagedCheckpointError",
    "Resumed",
    "Spacing",
    "WriteMode",
    "checkpoint_policy_of",
    "random_state",
    "set_random_state",
]
