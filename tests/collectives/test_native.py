"""The C module beside the Python that it stands in for: same bits, in one group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import native_rank
import pytest

from podrun.collectives import create, native


def test_source_and_python_are_of_one_version() -> None:
    source = Path(native.__file__).with_name("_meeting.c").read_text(encoding="utf-8")
    assert f"#define PROTOCOL {native.PROTOCOL} " in source


@pytest.mark.system
@pytest.mark.skipif(native.module is None, reason="podrun was installed without its C module")
def test_processes_with_and_without_it_get_the_same_bits() -> None:
    """Processes look for one another, as threads never do; one of them has no module at all."""
    paths = ("c", "c", "python", "c")
    group, token = create(len(paths), timeout=30)
    peers = [
        subprocess.Popen(
            [sys.executable, native_rank.__file__, json.dumps(token), str(rank), path],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, path in enumerate(paths)
        if rank
    ]
    mine = native_rank.results(group)
    said = [peer.communicate(timeout=60)[0].strip() for peer in peers]
    group.close()
    assert [mine, *said] == [native_rank.expected(len(paths))] * len(paths)
