"""``mpi4py.MPI``: `podrun.popdist.mpi`."""

from typing import Any

from podrun.popdist import mpi as _mpi
from podrun.popdist.mpi import *  # noqa: F403
from podrun.popdist.mpi import COMM_WORLD as COMM_WORLD


def __getattr__(name: str) -> Any:
    return getattr(_mpi, name)
