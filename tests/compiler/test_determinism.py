"""The same program gives the same bytes: in another process, from another folder, with names in another
order."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from podrun.compiler.compile import CompileOptions, compile_program
from podrun.core import executable_file

from .programs import Momentum, convolution, inputs_for, mlp, weights_for
from .reference_interpreter import Pod

SCRIPT = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from compiler.programs import Momentum, convolution
from podrun.core import executable_file
from podrun.compiler.compile import compile_program
program = convolution(replicas=8, accumulation_factor=2, update=Momentum())
print(hashlib.sha256(executable_file.dumps(compile_program(program))).hexdigest())
"""


@pytest.mark.slow
def test_bytes_do_not_depend_on_process_folder_or_hash_seed(tmp_path: Path) -> None:
    """The script lies in another folder in each run; its line numbers differ too."""
    tests = str(Path(__file__).resolve().parent.parent)
    found = set()
    for seed, folder in (("1", "a"), ("2", "b/c")):
        path = tmp_path / folder / "train.py"
        path.parent.mkdir(parents=True)
        path.write_text("\n" * int(seed) + SCRIPT.format(tests=tests))
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, path], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        found.add(run.stdout.strip())
    program = convolution(replicas=8, accumulation_factor=2, update=Momentum())
    found.add(hashlib.sha256(executable_file.dumps(compile_program(program))).hexdigest())
    assert len(found) == 1


@pytest.mark.slow
def test_bytes_of_a_small_program_do_not_depend_on_the_process() -> None:
    root = Path(__file__).resolve().parents[2]
    script = (
        "from tests.compiler.test_determinism import *\n"
        "print(hashlib.sha256(executable_file.dumps(compile_program(mlp(replicas=2)))).hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "3"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    here = hashlib.sha256(executable_file.dumps(compile_program(mlp(replicas=2)))).hexdigest()
    assert run.stdout.strip() == here


def test_no_path_enters_the_file() -> None:
    data = executable_file.dumps(compile_program(convolution()))
    here = str(Path(__file__).resolve().parent)
    for needle in (here, os.getcwd(), ".py", "site-packages"):
        assert needle.encode() not in data


def test_order_of_names_does_not_matter() -> None:
    program = mlp(replicas=2)
    turned = replace(
        program,
        parameters=dict(reversed(program.parameters.items())),
        inputs=dict(reversed(program.inputs.items())),
        metadata={"b": 1, "a": 2},
    )
    ordered = replace(program, metadata={"a": 2, "b": 1})
    assert executable_file.dumps(compile_program(turned)) == executable_file.dumps(compile_program(ordered))


def test_host_settings_of_jax_do_not_matter() -> None:
    import jax

    expected = executable_file.dumps(compile_program(mlp()))
    with jax.enable_x64(True), jax.default_matmul_precision("bfloat16"), jax.numpy_dtype_promotion("strict"):
        assert executable_file.dumps(compile_program(mlp())) == expected


def test_repeated_runs_are_bit_identical() -> None:
    program = mlp(sizes=(20, 30, 3), batch=8, replicas=8, accumulation_factor=3, update=Momentum())
    results = []
    for _ in range(2):
        pod = Pod(compile_program(program, options=CompileOptions(chunk_bytes=30_000)))
        pod.write_variables(weights_for(program))
        anchors = pod.run(3, inputs_for(program, 3))
        results.append([anchors["loss"], *(pod.read_variable(n) for n in sorted(program.parameters))])
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)
