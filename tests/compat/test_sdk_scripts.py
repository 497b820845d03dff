"""``python -m podrun.compat script.py``: the SDK's names, quick imports, and how errors end a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from podrun.compat.__main__ import main
from tests.copies import COMPAT, run_copied


def run(tmp_path: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "podrun.compat", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )


def copied(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    """The same in a copy of a process that has imported the SDK's modules."""
    script = tmp_path / "script.py"
    script.write_text(text)
    return run_copied(COMPAT, [str(script)])


def test_scripts_see_the_sdk_s_names_and_their_arguments(tmp_path):
    (tmp_path / "beside.py").write_text("value = 5")
    done = run(
        tmp_path,
        "import sys, popart, popart_core, popdist, popdist.popart, beside\n"
        "from popart import session\n"
        "assert __name__ == '__main__'\n"
        "assert 'jax' not in sys.modules and 'onnx' not in sys.modules\n"
        "assert popart.session.InferenceSession is popart.InferenceSession\n"
        "assert popart_core.ScatterReduction is popart.ScatterReduction\n"
        "try:\n"
        "    popart_core._throw_recoverable_runtime_error('it')\n"
        "except popart.poplar_recoverable_runtime_error as error:\n"
        "    assert error.recoveryAction == popart.RecoveryAction.IPU_RESET and error.args[0] == 'it'\n"
        "print(popart.versionString()[:3], beside.value, sys.argv[1:])\n",
        "--x",
        "1",
    )
    assert done.stdout == "3.4 5 ['--x', '1']\n", done.stderr


def test_popart_is_imported_without_looking_for_garbage(tmp_path):
    done = run(
        tmp_path,
        "import gc, numpy\n"
        "looks = []\n"
        "gc.collect()\n"
        "gc.callbacks.append(lambda phase, _: looks.append(phase))\n"
        "import popart\n"
        "gc.callbacks.clear()\n"
        "print(len(looks) < 6, gc.isenabled(), gc.get_threshold()[0], gc.get_freeze_count())\n",
    )
    assert done.stdout == "True True 700 0\n", done.stderr


def test_a_program_draws_the_same_numbers_and_forks_in_silence_when_a_session_imports_jax(tmp_path):
    text = (
        "import numpy as np, os, sys, popart\n"
        "np.random.seed(0)\n"
        "first = np.random.rand(3)\n"
        "np.random.seed(0)\n"
        "assert 'jax' not in sys.modules\n"
        "builder = popart.Builder()\n"
        "x = builder.addInputTensor(popart.TensorInfo('FLOAT', [2]))\n"
        "y = builder.aiOnnx.relu([x])\n"
        "flow = popart.DataFlow(1, {y: popart.AnchorReturnType('All')})\n"
        "device = popart.DeviceManager().createIpuModelDevice({'numIPUs': 1})\n"
        "session = popart.InferenceSession(builder.getModelProto(), flow, device)\n"
        "assert 'jax' in sys.modules\n"
        "assert np.array_equal(np.random.rand(3), first)\n"
        "session.prepareDevice()\n"
        "anchors = session.initAnchorArrays()\n"
        "session.run(popart.PyStepIO({x: np.ones(2, np.float32)}, anchors))\n"
        "print(anchors[y].sum(), flush=True)\n"
        "pid = os.fork() or os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    done = run(tmp_path, text)
    assert (done.stdout, done.stderr) == ("2.0\n", "")


@pytest.mark.parametrize(
    "text",
    [
        "import popart\n"
        "builder = popart.Builder()\n"
        "builder.aiOnnx.relu([builder.addInputTensor(popart.TensorInfo('FLOAT', [2]))])\n",
        # `tests/test_rooms.py` follows the import statements by default.
        pytest.param(
            "import poptorch, torch\n"
            "options = poptorch.Options().replicationFactor(2)\n"
            "model = torch.nn.Sequential(poptorch.BeginBlock(torch.nn.Linear(2, 2), ipu_id=0))\n"
            "poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))\n"
            "next(iter(poptorch.DataLoader(options, [torch.ones(2)] * 4)))\n",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["popart", "poptorch"],
)
def test_a_program_imports_jax_only_for_a_model_that_is_compiled(text, tmp_path):
    done = run(tmp_path, text + "import sys\nprint(sorted({'jax', 'jaxlib', 'ray'} & set(sys.modules)))\n")
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        ("popart.popart_exception('wrong', hint='do this')", 2, "hint: do this"),
        ("popart.poplar_unknown_runtime_error('lost')", 1, "lost"),
        ("ValueError('plain')", 1, "ValueError: plain"),
        ("SystemExit(7)", 7, ""),
    ],
)
@pytest.mark.sample(2)
def test_exit_codes_and_last_lines(tmp_path, error, code, last):
    done = copied(tmp_path, f"import popart\nraise {error}\n")
    assert done.returncode == code
    assert (done.stderr.strip().splitlines() or [""])[-1].endswith(last)


def test_tracebacks_show_the_script_and_not_what_is_below(tmp_path, monkeypatch):
    text = "import popart\ndef load():\n    popart.Builder(b'nothing')\nload()\n"
    shown = copied(tmp_path, text).stderr.splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert [line.strip() for line in shown if line.startswith("    ") and "^" not in line] == [
        "load()",
        "popart.Builder(b'nothing')",
    ]
    assert "popart_exception: Failed to load a ModelProto" in shown[-2]
    assert shown[-1].startswith("hint: Name a model")
    monkeypatch.setenv("PODRUN_TRACEBACK", "full")
    assert "model_loader.py" in copied(tmp_path, text).stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [(["missing.py"], "missing.py"), (["-m", "os.no"], "os.no"), (["-m"], "name of a module")],
)
def test_a_program_that_is_missing(capsys, words, named):
    assert main(words) == 2
    assert named in capsys.readouterr().err


def test_a_module_runs_as_python_runs_it(tmp_path):
    (tmp_path / "checks.py").write_text(
        "import sys, popdist\nprint(__name__, sys.argv[1:], popdist.getNumTotalReplicas())\nsys.exit(3)"
    )
    command = [sys.executable, "-m", "podrun.compat", "-m", "checks", "--fast"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("__main__ ['--fast'] 1\n", 3), done.stderr


@pytest.mark.parametrize(("words", "code"), [([], 2), (["--help"], 0)])
def test_the_command_says_what_it_is_for(capsys, words, code):
    assert main(words) == code
    out, err = capsys.readouterr()
    told = " ".join((out if code == 0 else err).split())
    assert "Run a program written for the SDK alone" in told
