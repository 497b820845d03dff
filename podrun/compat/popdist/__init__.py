"""``import popdist`` for scripts written for the SDK: all of `podrun.popdist`, under PopDist's name."""

from podrun.compat._error_reports import install as _install
from podrun.popdist import *  # noqa: F403
from podrun.popdist import __all__ as __all__

_install()
