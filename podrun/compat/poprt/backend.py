"""Sessions of several engines."""

from podrun.serving.sessions import ModelSession, get_session

__all__ = ["ModelSession", "get_session"]
