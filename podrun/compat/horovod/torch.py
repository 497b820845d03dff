"""``import horovod.torch as hvd`` for PopTorch programs: `podrun.poptorch.instances.launched`."""

from podrun.poptorch.instances.launched import *  # noqa: F403
