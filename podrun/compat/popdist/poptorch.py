"""``import popdist.poptorch``: `podrun.poptorch.launched`."""

from podrun.poptorch.launched import InstanceOptions as Options

__all__ = ["Options"]
