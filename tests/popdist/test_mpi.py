"""mpi4py and horovod.popart as one process has them, and objects as bytes. Several: tests/system/test_instances.py."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from podrun.compat import COMPAT_PATH
from podrun.compat.horovod import popart as hvd
from podrun.core.errors import UnsupportedError
from podrun.popart.values.exceptions import popart_unsupported
from podrun.popdist import horovod_instances, mpi
from podrun.popdist.collectives import decode_object, encode_object
from tests.conftest import CHARACTERS

TEXTS = st.text(CHARACTERS)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | st.binary()
OBJECTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(TEXTS | st.integers() | st.tuples(st.integers()), inner)
        | st.sets(st.integers())
    ),
    max_leaves=12,
)


@given(OBJECTS)
def test_objects_come_back_as_they_were(value):
    assert decode_object(encode_object(value)) == value
    assert type(decode_object(encode_object(value))) is type(value)


@given(arrays.arrays(st.sampled_from([np.float16, np.int64, np.bool_, np.uint8]), st.integers(0, 5)))
def test_arrays_keep_their_bits(array):
    found = decode_object(encode_object(array))
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


def test_what_would_be_pickled_is_refused():
    with pytest.raises(UnsupportedError, match="type function"):
        encode_object([lambda: 0])


def test_alone_everything_is_ones_own():
    comm, into = mpi.COMM_WORLD, np.zeros((1, 2), np.float32)
    given_ = np.array([1, 2], np.float32)
    for call in (comm.Allgather, comm.Gather, comm.Allreduce, comm.Reduce, comm.Scatter):
        into[:] = 0
        call(given_, into)
        assert into.tolist() == [[1, 2]]
    comm.Allreduce(mpi.IN_PLACE, into, op=mpi.MAX)
    comm.Bcast(into)
    assert into.tolist() == [[1, 2]]
    assert (comm.Get_rank(), comm.Get_size()) == (0, 1)
    assert comm.allreduce(3, op=mpi.PROD) == comm.reduce(3) == comm.scatter([3]) == comm.bcast(3) == 3
    assert comm.gather((1, "a")) == [(1, "a")]
    with pytest.raises(UnsupportedError, match=r"MPI\.Comm\.Isend is not there"):
        comm.Isend(given_, dest=1)
    with pytest.raises(UnsupportedError, match=r"MPI\.Win"):
        mpi.Win  # noqa: B018


def test_an_installed_mpi4py_is_that_of_a_single_process(tmp_path, monkeypatch):
    real = tmp_path / "mpi4py"
    real.mkdir()
    (real / "__init__.py").write_text("__version__ = 'theirs'\n")
    (real / "MPI.py").write_text("WHOSE = 'theirs'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(COMPAT_PATH)
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert importlib.import_module("mpi4py.MPI").WHOSE == "theirs"
    assert sys.modules["mpi4py"].__version__ == "theirs"
    monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "2")
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, name)
    assert importlib.import_module("mpi4py.MPI").COMM_WORLD.Get_size() == 2
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, name)


def test_horovod_wants_to_be_started_and_does_not_reduce_on_the_host(monkeypatch):
    monkeypatch.setattr(horovod_instances._State, "up", False)
    with pytest.raises(ValueError, match=r"use hvd\.init\(\)"):
        hvd.rank()
    monkeypatch.setattr(horovod_instances._State, "up", True)
    assert (hvd.size(), hvd.rank(), hvd.local_size(), hvd.local_rank()) == (1, 0, 1, 0)
    with pytest.raises(popart_unsupported, match="on the host") as caught:
        hvd.DistributedOptimizer(None, None, None)
    assert "configureSessionOptions" in str(caught.value.hint)
