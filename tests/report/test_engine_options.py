"""POPLAR_ENGINE_OPTIONS: requested reports are written, unknown options are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from podrun.core.errors import InvalidOptionError
from podrun.report.engine_options import KNOWN, EngineOptions, engine_options


def _environ(**options: Any) -> dict[str, str]:
    return {
        "POPLAR_ENGINE_OPTIONS": json.dumps({key.replace("_", "."): value for key, value in options.items()})
    }


def test_nothing_is_asked_for_by_default() -> None:
    assert engine_options({}, {}) == EngineOptions()
    assert not engine_options({}, {"POPLAR_ENGINE_OPTIONS": "  "}).reports


def test_all_means_all_but_what_is_switched_off() -> None:
    found = engine_options({}, _environ(autoReport_all="true", autoReport_outputExecutionProfile="false"))
    assert found.reports
    assert found.graph_profile
    assert not found.execution_profile
    assert engine_options(
        {}, _environ(autoReport_all=True, debug_allowOutOfMemory="true")
    ).allow_out_of_memory


def test_the_environment_comes_before_the_program() -> None:
    program = {"autoReport.directory": "mine", "autoReport.outputGraphProfile": "true"}
    found = engine_options(program, _environ(autoReport_directory="theirs"))
    assert found.directory == Path("theirs")
    assert found.graph_profile


@pytest.mark.parametrize(
    ("directory", "expected"),
    [("out/report", "out/report__instance_3"), (".", "__instance_3"), ("report/", "report__instance_3")],
)
def test_instances_have_directories_of_their_own(directory: str, expected: str) -> None:
    under = {"POPDIST_NUM_TOTAL_REPLICAS": "8", "OMPI_COMM_WORLD_RANK": "3"}
    assert engine_options({"autoReport.directory": directory}, under).directory == Path(expected)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "JSON"),
        ("[1]", "object"),
        ('{"autoReport.al": "true"}', "autoReport.al"),
        ('{"autoReport.all": "perhaps"}', "perhaps"),
        ('{"autoReport.all": null}', "string"),
        ('{"debug.instrument": {}}', "string"),
        ('{"autoReport.executionProfileProgramRunCount": "0"}', "above 0"),
    ],
)
def test_bad_options_are_refused(text: str, word: str) -> None:
    with pytest.raises(InvalidOptionError, match=word):
        engine_options({}, {"POPLAR_ENGINE_OPTIONS": text})


def test_a_misspelt_option_names_the_real_one_and_all_of_its_family() -> None:
    with pytest.raises(InvalidOptionError, match=r"Unrecognised option 'autoReport.directry'$") as caught:
        engine_options({"autoReport.directry": "x"}, {})
    assert str(caught.value.hint).startswith("Did you mean 'autoReport.directory'?")
    assert all(name in str(caught.value.hint) for name in KNOWN if name.startswith("autoReport."))


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_option_is_taken(name: str) -> None:
    value = "2" if name.endswith("RunCount") else "true"
    assert isinstance(engine_options({name: value}, {}), EngineOptions)
