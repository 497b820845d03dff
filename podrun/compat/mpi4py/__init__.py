"""``from mpi4py import MPI`` for PopDist programs: `podrun.popdist.mpi` among the instances that ``podrun`` launches.

A program that is one process gets the mpi4py that is installed, if there is one.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from podrun.popdist.core import getNumInstances

_HERE = str(Path(__file__).resolve().parents[1])


def _installed() -> bool:
    """Become the mpi4py of site-packages, if one is installed."""
    spec = PathFinder.find_spec(__name__, [entry for entry in sys.path if entry != _HERE])
    if spec is None or spec.loader is None or spec.submodule_search_locations is None:
        return False
    module = sys.modules[__name__]
    module.__path__ = list(spec.submodule_search_locations)
    module.__file__, module.__spec__ = spec.origin, spec
    spec.loader.exec_module(module)
    return True


if getNumInstances() > 1 or not _installed():
    __version__ = "4.0"
