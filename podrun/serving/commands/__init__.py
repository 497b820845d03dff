"""Verbs of ``podrun`` that serve models, one a file."""
