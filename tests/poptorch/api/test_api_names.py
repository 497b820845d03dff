"""Every public name of PopTorch is there with its parameters and defaults, or refused by name with a reason."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from podrun.poptorch.api import options  # noqa: E402
from podrun.poptorch.executor import wrappers  # noqa: E402

NAMES = json.loads((Path(__file__).parent / "api_names.json").read_text())
PARTS = ("Training", "Precision", "TensorLocations", "Distributed", "Jit", "_Popart")
ELSEWHERE = {
    "poptorch_core": "a module of the compat folder, tested below",
    "testing.allclose": "a module of the compat folder, tested below",
}
DIFFERENT = {
    "CPU.execute": "called by the capture, not by the SDK's runtime",
    "CPU.registerPersistentData": "called by the capture, not by the SDK's runtime",
    "PoplarExecutor.rng_state": "a property",
    "optim.LAMB.step": "torch's own base class wraps it",
}


def resolved(name: str) -> Any:
    found: Any = poptorch
    for part in name.split("."):
        if found is poptorch.Options and part in PARTS:
            found = getattr(poptorch.Options(), part)
        elif part == "print":
            found = wrappers.print
        else:
            found = getattr(found, part)
    return found


def parameters_of(signature: str) -> list[tuple[str, Any]]:
    """Names and literal defaults of a signature in words; ``...`` where a default is no literal."""
    definition = ast.parse(f"def f{signature}: pass").body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    made = []
    for argument, default in zip(arguments.args, defaults, strict=True):
        try:
            value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        except ValueError:
            value = ...
        made.append((argument.arg, value))
    return made


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ELSEWHERE])
def test_a_name_is_there_or_refused_with_a_reason(name: str) -> None:
    if name in poptorch.REFUSED:
        with pytest.raises(AttributeError, match=poptorch.REFUSED[name]):
            resolved(name)
        return
    found = resolved(name)
    if "values" in NAMES[name]:
        assert {member.name: member.value for member in found} == NAMES[name]["values"]
    if "signature" not in NAMES[name] or name in DIFFERENT or not callable(found):
        return
    given = inspect.signature(found).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in given.values())
    names = [n for n in given if n != "self"]
    expected = parameters_of(NAMES[name]["signature"])
    if not open_ended:
        assert names[: len(expected)] == [n for n, _ in expected]
    for parameter, default in expected:
        if parameter in given and default is not ...:
            assert given[parameter].default == default or default is inspect.Parameter.empty, parameter


def test_all_names_were_walked() -> None:
    assert len(NAMES) == 270
    assert set(poptorch.REFUSED) | set(ELSEWHERE) | set(DIFFERENT) <= set(NAMES)
    assert len(poptorch.REFUSED) == 4


@pytest.mark.system
@pytest.mark.slow
def test_programs_find_the_sdks_modules(tmp_path: Path) -> None:
    text = (
        "import poptorch, poptorch.testing, poptorch.options, poptorch.enums, torch\n"
        "from poptorch import poptorch_core\n"
        "from poptorch.optim import AdamW\n"
        "import popdist.poptorch, horovod.torch as hvd\n"
        "assert poptorch_core.Error is poptorch.Error\n"
        "assert poptorch.options.ConfigFileError is poptorch.ConfigFileError\n"
        "assert poptorch.testing.allclose([torch.ones(1)], [torch.ones(1)])\n"
        "opts = poptorch.Options().outputMode(poptorch.OutputMode.All)\n"
        "poptorch_core._validateOptions(opts.toDict())\n"
        "opts._Popart.set('absent', 1)\n"
        "for call in (lambda: poptorch_core._validateOptions(opts.toDict()),\n"
        "             lambda: poptorch_core._throwTestError(poptorch_core.TestErrorType.PoplarRecoverableFullReset)):\n"
        "    try:\n"
        "        call()\n"
        "    except poptorch.RecoverableError as error:\n"
        "        print(error.recovery_action, error.type)\n"
        "    except poptorch.Error as error:\n"
        "        print(error.message)\n"
        "hvd.init()\n"
        "print(hvd.size(), hvd.allreduce(torch.ones(2)).tolist(), popdist.poptorch.Options(1).replication_factor)\n"
        "poptorch.print(poptorch.BeginBlock(torch.nn.Linear(1, 1), user_id='x', ipu_id=0))\n"
        "poptorch.logger.warning('seen')\n"
        "poptorch.setLogLevel('ERR')\n"
        "poptorch.logger.warning('unseen')\n"
        "raise poptorch.Error('what happened')\n"
    )
    (tmp_path / "program.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "podrun.compat", str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "Unknown PopART option 'absent'",
        "FULL_RESET poplar_recoverable_runtime_error",
        "1 [1.0, 1.0] 1",
    ], done.stderr
    assert "BeginBlock(user_id=x, ipu_id=0)" in lines[3]
    assert "WARNING: seen" in done.stderr
    assert "unseen" not in done.stderr
    assert done.stderr.rstrip().endswith("what happened")
    assert "host_tools" not in done.stderr
    assert done.returncode == 1


def test_the_reasons_of_errors_reach_the_program(tmp_path: Path, monkeypatch: Any) -> None:
    error = poptorch.createPoptorchError("this")
    assert (str(error), error.type, error.message, error.location) == (
        "'poptorch_py_error': this",
        "poptorch_py_error",
        "this",
        "",
    )
    monkeypatch.chdir(tmp_path)
    long = poptorch.Error("\n".join(str(n) for n in range(100)))
    assert "poptorch_error.log" in long.message
    assert (tmp_path / "poptorch_error.log").read_text().count("\n") == 99
    reset = poptorch.RecoverableError("lost", recovery_action="PARTITION_RESET")
    assert "PARTITION_RESET" in str(reset)
    assert isinstance(reset, poptorch.Error)
    assert options.ConfigFileError is poptorch.ConfigFileError
