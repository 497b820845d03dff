"""``import popdist.popart``: `podrun.popart.sessions.instances`."""

from podrun.popart.sessions.instances import configureSessionOptions, getDevice

__all__ = ["configureSessionOptions", "getDevice"]
