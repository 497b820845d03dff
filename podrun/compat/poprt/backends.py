"""Models ready to run."""

from podrun.serving.convert.reference_runs import ORTBackend
from podrun.serving.sessions import Backend

__all__ = ["Backend", "ORTBackend"]
