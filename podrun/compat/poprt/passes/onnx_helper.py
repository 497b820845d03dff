"""Helpers for passes."""

from podrun.serving.convert.tools import clean_info, get_constant, get_dtype, topological_sort

__all__ = ["clean_info", "get_constant", "get_dtype", "topological_sort"]
