"""Training over several instances: the same bits for any number of them; Horovod's calls; each loads its part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.conftest import Commands  # noqa: E402
from tests.poptorch.models import MODELS  # noqa: E402
from tests.poptorch.test_loss_curves import BATCH, STEPS, by_torch  # noqa: E402

PROGRAM = Path(__file__).parents[1] / "programs" / "popdist_train.py"
CURVES = Path(__file__).parents[1] / "programs" / "curves.py"
pytestmark = [pytest.mark.system, pytest.mark.slow]


def found_by(commands: Commands, *words: str) -> list[dict[str, Any]]:
    done = commands.run(*words, PROGRAM, timeout=240.0)
    assert done.returncode == 0, done.stderr
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"rank"' in line]
    return sorted((json.loads(line) for line in lines), key=lambda each: each["rank"])


def test_the_same_bits_for_any_number_of_instances(commands: Commands) -> None:
    (alone,) = found_by(commands, "python", "-m", "podrun.compat")
    for instances in (1, 2, 4):
        launched = found_by(commands, "podrun", "--num-replicas=4", f"--num-instances={instances}")
        assert len(launched) == instances
        for one in launched:
            assert one["refused"]
            assert one["weights"] == alone["weights"]
            assert one["losses"] == alone["losses"]
            assert one["equal"]
            assert one["note"] == {"epoch": 7}
            assert one["root"] == [instances - 1, 3]
            assert one["scalar"] == (instances - 1) / 2
            assert one["average"] == [(instances - 1) / 2]
            assert one["grouped"] == [[float(instances)] * 2, [sum(range(instances))]]
            assert one["ragged"] == [rank for rank in range(instances) for _ in range(rank + 1)]
        loaded = [label for one in launched for label in one["loaded"]]
        assert len(loaded) == len(set(loaded)) == 48


@pytest.mark.parametrize("first", range(3))
def test_losses_of_models_over_two_instances_are_torchs(commands: Commands, first: int) -> None:
    """Two instances of two replicas; the last replica's loss is that of torch's last micro-batch."""
    names = list(MODELS)[first::3]
    done = commands.run("podrun", "--num-replicas=4", "--num-instances=2", CURVES, *names, timeout=400.0)
    assert done.returncode == 0, done.stderr
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"rank"' in line]
    found = {each["rank"]: each["models"] for each in map(json.loads, lines)}
    assert set(found) == {0, 1}
    for name in names:
        torch.manual_seed(0)
        reference = MODELS[name].make().train()
        expected = by_torch(reference, MODELS[name].samples(BATCH * 4), 4, STEPS)
        assert found[1][name]["losses"] == pytest.approx(expected, rel=2e-4, abs=2e-5), name
        assert found[0][name]["total"] == found[1][name]["total"]
