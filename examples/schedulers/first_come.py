"""A scheduler of one's own on a virtual POD: first come, first served.

    podrun simulate --conformance "python examples/schedulers/first_come.py"
    podrun simulate jobs.swf --pod pod64 --serve 8095      # and in another terminal:
    PODRUN_VIRTUAL_POD=127.0.0.1:8095 python examples/schedulers/first_come.py

It makes and removes partitions as on a real POD, and calls `advance` when it has decided.
"""

from __future__ import annotations

import os

from podrun.partition.state.values import PartitionState, Requirements
from podrun.simulate.stepped_server import virtual_pod_at


def main() -> None:
    """Schedule until nothing happens any more."""
    waiting = []
    with virtual_pod_at(os.environ["PODRUN_VIRTUAL_POD"]) as pod:
        while not (step := pod.advance()).done:
            for name in step.ended:
                pod.remove_partition(name)
                pod.wait_for_state(name, {PartitionState.REMOVED}, 30)
            waiting += step.submitted
            while waiting:
                needs = Requirements(waiting[0].name, waiting[0].size, num_gcds=max(1, waiting[0].size // 64))
                if not pod.plan_partition(needs).starts:
                    break
                pod.create_partition(needs)
                waiting.pop(0)


if __name__ == "__main__":
    main()
