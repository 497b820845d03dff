"""A small fixed part of the stress of networks: `make stress` goes on for as long as one likes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from podrun.device.xla import convolutions, network_steps
from tests.conftest import ROOT
from tests.stress import networks

pytestmark = pytest.mark.skipif(not convolutions.available(), reason="no oneDNN here")


@pytest.mark.parametrize(
    ("cases", "instructions"),
    [(15, "AVX2"), *(pytest.param(60, some, marks=pytest.mark.slow) for some in ("", "AVX2"))],
)
def test_random_networks_are_right_and_stay_inside_of_their_buffers(cases: int, instructions: str) -> None:
    environment = {**os.environ, **({"ONEDNN_MAX_CPU_ISA": instructions} if instructions else {})}
    command = [sys.executable, "-m", "tests.stress.networks", "--cases", str(cases)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{cases} networks, 0 wrong\n"


def test_images_that_lie_on_one_another_are_noticed() -> None:
    """All images of an arena at one place: some network here is wrong, and the stress says so."""
    words = """if True:
        from podrun.device.xla import convolutions, network_steps
        from tests.stress import networks
        network_steps.LayerNetwork._arena = lambda network, roots: ({root: 0 for root in roots}, 1 << 20)
        print(sum(bool(networks.wrong(networks.native(), 1, number)) for number in range(8)))
    """
    done = subprocess.run(
        [sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert int(done.stdout) > 0, done.stderr


def test_a_network_is_the_same_whenever_it_is_asked() -> None:
    class Unpacked:
        PLANES = 0

        def pack(self, *_: object) -> None:
            raise ValueError

    one, two = (networks.random_network(Unpacked(), 5, 2) for _ in range(2))
    assert one.network.steps == two.network.steps
    assert all((a == b).all() for a, b in zip(one.operands, two.operands, strict=True))
    assert network_steps.StepKind.CONVOLVE in {step.kind for step in one.network.steps}
