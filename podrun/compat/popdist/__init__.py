"""``import popdist`` for scripts written for the SDK: all of `podrun.popdist`, under PopDist's name."""

from podrun.popdist import *  # noqa: F403
from podrun.popdist import __all__ as __all__
