"""Memory that a large piece frees stays in the process until the program is unloaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import threading
from podrun.device.xla import clients

def faults():
    block = 80 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        b"x" * block
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() >> 20

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

clients.return_freed_memory()
before = faults()
kept = clients.keep_freed_memory()
clients.use_one_heap()
faults()
found = []
for run in (lambda: found.append(faults()),) * 2:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
held = resident()
clients.return_freed_memory()
print(before, int(kept), *found, held - resident())
"""


def test_blocks_are_taken_from_what_was_freed_also_by_threads_and_given_back():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, kept, *found, returned = map(int, done.stdout.split())
    if not kept:
        pytest.skip("this C library keeps no freed memory")
    assert max(found) <= 16  # MB
    assert before >= 320
    assert returned >= 64
