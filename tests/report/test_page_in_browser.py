"""The page in a real browser, without a display: everything is drawn, nothing is fetched, the filter works.

Needs Chromium (``apt-get install chromium``); ``make test-all`` runs it. Where no browser is installed there is
nothing to assert, and `tests/report/test_report.py` checks the page's text.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from podrun.report.html import page
from tests.report.profiles import pipeline_profile

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSERS = [path for path in map(shutil.which, NAMES) if path][:1]
PROBE = """
<script>window.problems=[];window.onerror=function(what){window.problems.push(String(what));};
['error','warn'].forEach(function(kind){var old=console[kind];
console[kind]=function(){window.problems.push(kind+': '+[...arguments].join(' '));old.apply(console,arguments);};});
window.addEventListener('unhandledrejection',function(e){window.problems.push(String(e.reason));});</script>
"""
ASK = """
<script>
var boxes=[...document.querySelectorAll('svg')].map(function(s){return s.getBoundingClientRect();});
var input=document.querySelector('input[data-for]');
if(input){document.querySelector('details').open=true;
input.value='LAYER 7';input.dispatchEvent(new Event('input'));}
var rows=[...document.querySelectorAll('#layer-table tbody tr')];
var found={
 problems:window.problems,
 fetched:performance.getEntriesByType('resource').map(function(e){return e.name;}),
 charts:boxes.length,
 drawn:boxes.filter(function(b){return b.width>500&&b.height>15;}).length,
 empty:[...document.querySelectorAll('svg')].filter(function(s){
  return !s.querySelector('rect,polygon,line');}).length,
 labels:[...document.querySelectorAll('svg')].map(function(s){return s.getAttribute('aria-label');}),
 headings:[...document.querySelectorAll('h2')].map(function(h){return h.textContent;}),
 outside:[...document.querySelectorAll('svg rect')].filter(function(r){
  var b=r.getBoundingClientRect(),s=r.ownerSVGElement.getBoundingClientRect();
  return b.left<s.left-1||b.right>s.right+1||b.top<s.top-1||b.bottom>s.bottom+1;}).length,
 wide:document.documentElement.scrollWidth>innerWidth,
 rows:rows.filter(function(r){return r.getBoundingClientRect().height>0;}).map(function(r){
  return r.cells[0].textContent;}),
 all:rows.length};
var out=document.createElement('pre');out.id='found';out.textContent=JSON.stringify(found);
document.body.append(out);
</script>
"""


def _seen(browser: str, text: str, folder: Path) -> dict[str, Any]:
    """What the browser says about the page."""
    file = folder / "page.html"
    file.write_text(
        text.replace("<head>", "<head>" + PROBE).replace("</body>", ASK + "</body>"), encoding="utf-8"
    )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,900"]
    command += ["--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={folder / 'user'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    # What the page itself says on the console, from before its first script on.
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stdout[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    return found


@pytest.mark.slow
@pytest.mark.system
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    profile = pipeline_profile()
    stage = profile.stages[0]
    layers = tuple(dataclasses.replace(stage.layers[0], name=f"layer {n}") for n in range(40))
    long = dataclasses.replace(stage, layers=layers)
    text = page(dataclasses.replace(profile, stages=(long, *profile.stages[1:])), other=profile)
    for browser in BROWSERS:
        found = _seen(browser, text, tmp_path)
        assert found["problems"] == []
        assert found["fetched"] == []
        assert found["charts"] == found["drawn"] == text.count("<svg")
        assert found["outside"] == 0
        assert not found["wide"]
        assert found["rows"] == ["layer 7"]
        assert found["all"] > 40


def _pipeline(**more: Any) -> Any:
    """What a session says of a pipeline over four IPUs, compiled for real."""
    import numpy as np

    import podrun.popart as popart

    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT16", [64, 256]))
    for ipu in range(4):
        with builder.virtualGraph(ipu), builder.pipelineStage(ipu):
            w = builder.addInitializedInputTensor(np.zeros((256, 256), np.float16))
            x = builder.aiOnnx.tanh([builder.aiOnnx.matmul([x, w])])
    with builder.virtualGraph(3), builder.pipelineStage(3):
        loss = builder.aiGraphcore.l1loss([x], 0.5)
    options = popart.SessionOptions()
    options.virtualGraphMode, options.enablePipelining = popart.VirtualGraphMode.Manual, True
    options.enableGradientAccumulation, options.accumulationFactor = True, 16
    for name, value in more.items():
        setattr(options, name, value)
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(1, {loss: popart.AnchorReturnType("Final")}),
        loss,
        popart.ConstSGD(0.1),
        popart.DeviceManager({}).createOfflineIPUDevice({"numIPUs": 4}),
        userOptions=options,
    )
    session.prepareDevice()
    return session.getReport()


@pytest.mark.slow
@pytest.mark.system
def test_a_browser_draws_the_page_of_a_compiled_pipeline(tmp_path: Path) -> None:
    import podrun.popart as popart

    profile = _pipeline()
    again = _pipeline(autoRecomputation=popart.RecomputationType.Pipeline)
    text = page(again, other=profile)
    for browser in BROWSERS:
        found = _seen(browser, text, tmp_path)
        assert found["problems"] == []
        assert found["fetched"] == []
        assert found["charts"] == found["drawn"] == text.count("<svg") > 15
        assert found["empty"] == found["outside"] == 0
        assert not found["wide"]
        for label in (
            "memory by tile",
            "pipeline",
            "BSP timeline",
            "not-always-live bytes over the schedule",
        ):
            assert label in found["labels"]
        for heading in ("Where a batch's time goes", "Compared", "Cycles by operator", "Cycles by layer"):
            assert heading in found["headings"]
        assert [h for h in found["headings"] if h.startswith("Memory of IPU")] == [
            f"Memory of IPU {ipu}" for ipu in range(4)
        ]
