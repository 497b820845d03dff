"""``import popdist.poptorch``: `podrun.poptorch.instances.launched`."""

from podrun.poptorch.instances.launched import InstanceOptions as Options

__all__ = ["Options"]
