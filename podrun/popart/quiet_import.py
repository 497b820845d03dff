"""Importing JAX draws from NumPy's global generator; a program's own draws must not depend on when that happens.

JAX is imported when a builder or a session first needs it, often between a program's ``np.random.seed`` and its data.
So whoever imports it first, the generator is put back to where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import numpy as np


class _FirstImport(MetaPathFinder):
    """Finds ``jax`` as the other finders do, once, and has the state of NumPy's generator kept while it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "jax":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, state = spec.loader, np.random.get_state()
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                load(module)
            finally:
                np.random.set_state(state)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def keep_the_programs_draws() -> None:
    """See the module docstring. Does nothing where JAX has been imported already."""
    if "jax" not in sys.modules and not any(isinstance(finder, _FirstImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FirstImport())
