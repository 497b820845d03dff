"""POPLAR_ENGINE_OPTIONS: what is asked for is written, what does not exist is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from podrun.device.tiles.cost import cost_jaxpr
from podrun.errors import InvalidOptionError
from podrun.report.engine_options import report_options
from podrun.report.write import write_reports


def _environ(**options: Any) -> dict[str, str]:
    return {
        "POPLAR_ENGINE_OPTIONS": json.dumps({key.replace("_", "."): value for key, value in options.items()})
    }


def test_nothing_is_asked_for_by_default() -> None:
    assert not report_options({}).wanted
    assert not report_options({"POPLAR_ENGINE_OPTIONS": "  "}).wanted


def test_all_means_all_but_what_is_switched_off() -> None:
    found = report_options(_environ(autoReport_all="true", autoReport_outputExecutionProfile="false"))
    assert "trace" not in found.reports
    assert {"profile", "memory"} <= found.reports
    assert report_options(_environ(autoReport_all=True, debug_allowOutOfMemory="true")).out_of_memory


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "JSON"),
        ("[1]", "object"),
        ('{"autoReport.al": "true"}', "autoReport.al"),
        ('{"autoReport.all": "perhaps"}', "perhaps"),
    ],
)
def test_bad_options_are_refused(text: str, word: str) -> None:
    with pytest.raises(InvalidOptionError, match=word):
        report_options({"POPLAR_ENGINE_OPTIONS": text})


def test_a_misspelt_option_names_the_real_one() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        report_options({"POPLAR_ENGINE_OPTIONS": '{"autoReport.directry": "x"}'})
    assert "autoReport.directory" in str(caught.value.hint)


def test_reports_are_written_where_asked(tmp_path: Path) -> None:
    half = jax.ShapeDtypeStruct((64, 64), jnp.float16)
    report = cost_jaxpr(jax.make_jaxpr(lambda x: x @ x)(half), "bow")
    where = tmp_path / "deep" / "down"
    options = report_options(_environ(autoReport_all="true", autoReport_directory=str(where)))
    written = write_reports(report, options)
    assert [path.name for path in written] == ["profile.json", "summary.txt", "profile.html", "trace.json"]
    assert json.loads(written[0].read_text(encoding="utf-8"))["target"] == "bow"
    assert write_reports(report, report_options({})) == ()
