"""Patterns of operators in a graph."""

from podrun.serving.convert.patterns import PatternMatcher

__all__ = ["PatternMatcher"]
