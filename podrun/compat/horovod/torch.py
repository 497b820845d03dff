"""``import horovod.torch as hvd`` for PopTorch programs: `podrun.poptorch.horovod_torch`."""

from podrun.poptorch.horovod_torch import *  # noqa: F403
