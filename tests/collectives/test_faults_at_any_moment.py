"""A rank that is killed, stopped, or out of files or memory, at any moment: every other rank ends in time, done or with
an error that says why, and the next group works. The moments are generated.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from collective_ranks import PATIENCE
from faulty_ranks import ENDS, FATES, Strike, outcomes
from hypothesis import given, settings
from hypothesis import strategies as st

from podrun.collectives import RankMissingError, create

TIMEOUT = 0.5

strikes = st.builds(
    Strike,
    st.integers(0, 3),
    st.sampled_from(FATES),
    st.one_of(st.integers(1, 60), st.integers(60, 600), st.integers(600, 2000)),
)
LAYOUTS = ["AAA", "AAAA", "AB", "AAB", "ABC", "AABB", "ABAB"]
"""All on one host; over several, by TCP."""


def _strike(names: str, strike: Strike, seed: int) -> None:
    strike = Strike(strike.rank % len(names), strike.fate, strike.calls)
    found = outcomes(names, TIMEOUT, seed, strike)
    made = len(found) > 1 or strike.rank != 0
    others = [rank for rank in range(len(names)) if rank != strike.rank]
    assert not made or set(others) <= set(found), found
    if strike.fate not in ENDS:
        assert strike.rank in found
    for rank, outcome in found.items():
        # Out of memory, Python itself may fail, as in importing; so may whoever calls collectives.
        assert outcome.named or (rank == strike.rank and strike.fate == "out of memory"), (rank, outcome)
        assert outcome.seconds < PATIENCE, (rank, outcome)


@pytest.mark.system
@settings(max_examples=3)
@given(st.sampled_from(LAYOUTS), strikes, st.integers(0, 1000))
def test_a_rank_struck_at_any_moment(names: str, strike: Strike, seed: int) -> None:
    _strike(names, strike, seed)


@pytest.mark.slow
@pytest.mark.system
@settings(max_examples=200, derandomize=False)
@given(st.sampled_from(LAYOUTS), strikes, st.integers(0, 1000))
def test_a_rank_struck_at_any_of_many_moments(names: str, strike: Strike, seed: int) -> None:
    _strike(names, strike, seed)


_STOPPED = """
import json, os, signal, sys
from podrun.collectives import join_group
group = join_group(json.loads(sys.argv[1]), 1)
with group._board._locked():
    print("stopped", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
group.close()
"""


@contextlib.contextmanager
def _killed_at_the_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process when the block ends, so that a failed assertion does not wait for a stopped process."""
    try:
        yield
    finally:
        process.kill()


@pytest.mark.system
def test_who_is_stopped_with_the_board_locked_is_named_and_may_go_on() -> None:
    group, token = create(2, timeout=0.2)
    with contextlib.closing(group):
        words = [sys.executable, "-c", _STOPPED, json.dumps(token)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other, _killed_at_the_end(other):
            assert other.stdout is not None
            assert other.stdout.readline() == "stopped\n"
            os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
            began = time.monotonic()
            with pytest.raises(RankMissingError, match=rf"rank 1 \(process {other.pid}\) has held") as late:
                group.allocate("x", "float32", 3)
            assert late.value.ranks == (1,)
            assert time.monotonic() - began < PATIENCE
            other.send_signal(signal.SIGCONT)
            assert other.wait(PATIENCE) == 0
        assert group.allocate("x", "float32", 3).size == 3
