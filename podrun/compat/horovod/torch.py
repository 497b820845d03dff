"""``import horovod.torch as hvd`` for PopTorch programs: `podrun.poptorch.launched`."""

from podrun.poptorch.launched import *  # noqa: F403
