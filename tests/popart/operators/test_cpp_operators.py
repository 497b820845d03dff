"""A program that compiles C++ for the SDK is told what to replace."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
from pathlib import Path

import pytest

from podrun.popart.operators.cpp_operators import explain_compilers, operators_in, sdk_sources
from podrun.popart.operators.custom import explain_libraries
from podrun.popart.values.exceptions import popart_exception

SOURCE = """
#include <popart/op.hpp>
namespace { const popart::OperatorIdentifier Cube = {"custom.ops", "Cube", 1}; }
static OperatorIdentifier CubeGrad{"custom.ops", "CubeGrad", 1};
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cube.cpp").write_text(SOURCE)
    (tmp_path / "plain.cpp").write_text("#include <vector>\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PODRUN_CUSTOM_OPS", raising=False)
    monkeypatch.setattr(subprocess.Popen, "__init__", subprocess.Popen.__init__)
    monkeypatch.setattr(os, "system", os.system)
    explain_compilers()
    return tmp_path


def test_operators_are_found_in_the_source() -> None:
    assert operators_in(SOURCE) == [("custom.ops", "Cube", 1), ("custom.ops", "CubeGrad", 1)]


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (["g++", "-shared", "cube.cpp", "-o", "cube.so"], ["cube.cpp"]),
        (["/usr/bin/x86_64-linux-gnu-g++-12", "cube.cpp"], ["cube.cpp"]),
        (["make", "-j", "2"], ["cube.cpp"]),
        (["make", "-C", "elsewhere"], []),
        (["g++", "plain.cpp"], []),
        (["python", "cube.cpp"], []),
        ([], []),
    ],
)
def test_only_sources_for_the_sdk_count(sources: Path, command: list[str], names: list[str]) -> None:
    assert [path.name for path in sdk_sources(command, sources)] == names


def test_the_program_is_told_file_operator_and_call(sources: Path) -> None:
    for start in (lambda: subprocess.run(["make"], check=True), lambda: os.system("make custom_ops")):  # noqa: S605
        with pytest.raises(popart_exception, match=r"cube\.cpp.*custom\.ops\.Cube version 1") as caught:
            start()
        assert 'register_op("custom.ops", "Cube", 1, function)' in str(caught.value.hint)


def test_a_function_that_is_looked_at_is_pickled_by_its_name(sources: Path) -> None:
    assert pickle.dumps(os.system).endswith(b"system\x94\x93\x94.")


def test_sources_that_a_build_file_names_count(sources: Path) -> None:
    (sources / "build").mkdir()
    (sources / "build" / "build.ninja").write_text(f"build cube.o: compile {sources / 'cube.cpp'}\n")
    assert sdk_sources(["ninja", "-v"], sources / "build") == [sources / "cube.cpp"]


@pytest.mark.parametrize("library", ["cube.so", "build/cube.so"])
def test_a_library_that_is_not_built_is_explained_by_its_source(
    sources: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setattr(ctypes.CDLL, "__init__", ctypes.CDLL.__init__)
    explain_libraries()
    with pytest.raises(OSError, match="cannot open shared object file") as caught:
        ctypes.cdll.LoadLibrary(str(sources / library))
    (note,) = caught.value.__notes__
    assert "cube.cpp near it defines custom.ops.Cube version 1. Write" in note
    assert "CubeGrad" not in note


def test_nothing_is_compiled_where_a_file_stands_for_the_operators(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PODRUN_CUSTOM_OPS", "ops.py")
    assert subprocess.run(["make"], check=True).returncode == 0
    assert os.system("make") == 0  # noqa: S605
    assert subprocess.run(["echo", "x"], capture_output=True, text=True, check=True).stdout == "x\n"
