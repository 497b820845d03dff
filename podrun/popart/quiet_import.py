"""Importing JAX leaves traces in the program that it is imported into; podrun imports it, so podrun removes them.

It draws from NumPy's global generator, often between a program's ``np.random.seed`` and its data, since a builder or a
session imports it when one is first needed: the generator is put back to where it was. And it warns of every fork from
then on; those of ``multiprocessing`` and of loaders of data are harmless, since what they start computes nothing with
JAX.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import numpy as np


class _FirstImport(MetaPathFinder):
    """Finds ``jax`` as the other finders do, once, and has what its import leaves undone."""

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
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def keep_the_programs_draws() -> None:
    """See the module docstring. Does nothing where JAX has been imported already."""
    if "jax" not in sys.modules and not any(isinstance(finder, _FirstImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FirstImport())
