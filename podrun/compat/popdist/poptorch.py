"""``import popdist.poptorch``: `podrun.poptorch.popdist_options`."""

from podrun.poptorch.popdist_options import InstanceOptions as Options

__all__ = ["Options"]
