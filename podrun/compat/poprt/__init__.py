"""``import poprt`` for programs written for PopRT: podrun's converter, compiler and runtime."""

from . import runtime

__all__ = ["runtime"]
