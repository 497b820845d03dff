"""The page in a real browser, without a display: everything is drawn, nothing is fetched, and every control is clicked.

Needs Chromium (``apt-get install chromium``); ``make test-all`` runs it. Where no browser is installed these tests
are skipped, and `tests/report/test_report.py` checks the page's text.
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

from podrun.report.html import page, side_by_side
from podrun.report.notebook import frame
from podrun.report.text import byte_size
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
function say(chart){return chart.querySelector('output').textContent;}
function press(chart,label){chart.querySelector('[aria-label="'+label+'"]').click();}
function at(svg,share,kind){var b=svg.getBoundingClientRect();
 svg.dispatchEvent(new MouseEvent(kind,{clientX:b.left+share*b.width,clientY:b.top+b.height-2,bubbles:true}));}
var bsp=document.querySelector('.chart.timeline'),used={};
if(bsp){
 used.whole=say(bsp);press(bsp,'zoom in');used.half=say(bsp);press(bsp,'later');used.later=say(bsp);
 press(bsp,'zoom out');used.out=say(bsp);
 var find=bsp.querySelector('input');find.value='MATMUL';find.dispatchEvent(new Event('input'));
 used.found=say(bsp);used.hits=bsp.querySelectorAll('rect.hit').length;
 used.dim=bsp.querySelector('svg').classList.contains('dim');
 find.value='';find.dispatchEvent(new Event('input'));used.cleared=bsp.querySelectorAll('rect.hit').length;
 bsp.querySelector('rect').dispatchEvent(new MouseEvent('click',{bubbles:true}));used.tapped=say(bsp);
}
var tiles=document.querySelector('.chart.tiles');
if(tiles){
 var drawn=tiles.querySelector('svg');used.note=say(tiles);
 at(drawn,0.5,'pointermove');used.tile=say(tiles);
 at(drawn,0.5,'pointerleave');used.left=say(tiles);
 at(drawn,0.25,'click');used.pinned=say(tiles);at(drawn,0.75,'pointermove');used.kept=say(tiles);
 var held=document.getElementById(tiles.dataset.layers);used.open=held&&held.open;
 at(drawn,0.25,'click');used.closed=held&&!held.open;
}
function column(table,n){return [...table.tBodies[0].rows].map(function(r){return r.cells[n].textContent;});}
var sorted=document.querySelector('#layer-table,#s0-layer-table');
if(sorted){
 var heads=[...sorted.querySelectorAll('th button')];
 heads[0].click();heads[0].click();used.names=column(sorted,0);
 heads[1].click();used.cycles=column(sorted,1);used.sort=heads[1].parentNode.getAttribute('aria-sort');
}
var boxes=[...document.querySelectorAll('svg')].map(function(s){return s.getBoundingClientRect();});
var input=document.querySelector('input[data-for]');
if(input){document.querySelector('details').open=true;
input.value='LAYER 7';input.dispatchEvent(new Event('input'));}
var rows=[...document.querySelectorAll('#layer-table tbody tr')];
var found={
 used:used,
 problems:window.problems,
 fetched:performance.getEntriesByType('resource').map(function(e){return e.name;}),
 charts:boxes.length,
 drawn:boxes.filter(function(b){return b.width>innerWidth*0.4&&b.height>15;}).length,
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


def _browser() -> str:
    """The browser to look with; the test is skipped if there is none."""
    if not BROWSERS:
        pytest.skip("no browser is installed: apt-get install chromium")
    return BROWSERS[0]


def _seen(browser: str, text: str, folder: Path, width: int = 1000, ask: str = ASK) -> dict[str, Any]:
    """What the browser says about the page in a window of that width."""
    file = folder / "page.html"
    file.write_text(
        text.replace("<head>", "<head>" + PROBE).replace("</body>", ask + "</body>"), encoding="utf-8"
    )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += ["--enable-logging=stderr", "--v=0"]
    command += [
        f"--user-data-dir={folder / 'user'}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        file.as_uri(),
    ]
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
    browser = _browser()
    for width in (1000, 500):  # The narrowest window that a headless Chromium opens.
        found = _seen(browser, text, tmp_path, width)
        assert found["problems"] == []
        assert found["fetched"] == []
        assert found["charts"] == found["drawn"] == text.count("<svg")
        assert found["outside"] == 0
        assert not found["wide"]
        assert found["rows"] == ["layer 7"]
        assert found["all"] > 40


@pytest.mark.slow
@pytest.mark.system
def test_every_control_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    profile = pipeline_profile()
    stage, memory = profile.stages[0], profile.held()[0].memory
    used = _seen(_browser(), page(profile), tmp_path)["used"]
    total = sum(step.total_cycles for step in stage.timeline)
    begin, middle, end = "0", f"{total / 2:,.0f}", f"{total:,}"
    assert used["whole"] == f"cycles {begin} to {end} of {end}"
    zoomed = [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", used["half"])]
    assert zoomed[1] - zoomed[0] in (total // 2, total // 2 + 1)
    assert used["later"] == f"cycles {middle} to {end} of {end}"
    assert used["out"] == used["whole"]
    taken = sum(step.total_cycles for step in stage.timeline if step.operator == "matmul")
    assert f" {taken:,} cycles" in used["found"]
    assert used["hits"] > 0
    assert used["dim"]
    assert used["cleared"] == 0
    assert re.fullmatch(r".*: [\d,]+ cycles of (sync|exchange|compute)", used["tapped"])
    capacity = byte_size(memory.tile_capacity_bytes)
    tile = int(used["tile"].split(":")[0].removeprefix("tile "))
    assert abs(tile - memory.by_tile[-1].end_tile // 2) <= 1  # A pixel is more than one tile wide.
    (held,) = (i for i in memory.by_tile if i.first_tile <= tile < i.end_tile)
    assert used["tile"].startswith(f"tile {tile}: {byte_size(held.total_bytes)} of {capacity} (")
    assert (
        used["left"]
        == used["note"]
        == f"At most {byte_size(max(i.total_bytes for i in memory.by_tile))} here; a tile has {capacity}."
    )
    assert used["pinned"] == used["kept"]
    assert used["open"]
    assert used["closed"]
    assert used["names"] == sorted(used["names"])
    assert [int(n.replace(",", "")) for n in used["cycles"]] == sorted(
        profile.layers().values(), reverse=True
    )
    assert used["sort"] == "descending"


@pytest.mark.slow
@pytest.mark.system
def test_names_of_a_program_are_shown_as_they_are(tmp_path: Path) -> None:
    names = [
        "<script>problems.push('ran')</script>",
        "</script></style><!-- ",
        'it\'s "quoted" & <b>bold</b>',
        "größe/中文",
        "a" * 500,
    ]
    profile = pipeline_profile()
    layers = tuple(dataclasses.replace(profile.stages[0].layers[0], name=name) for name in names)
    stages = tuple(dataclasses.replace(stage, layers=layers) for stage in profile.stages)
    text = page(dataclasses.replace(profile, stages=stages, name=names[0]))
    for width in (1000, 500):
        found = _seen(_browser(), text, tmp_path, width)
        assert found["problems"] == []
        assert sorted(found["used"]["names"]) == sorted(names)
        assert not found["wide"]


@pytest.mark.slow
@pytest.mark.system
def test_links_in_a_notebook_stay_in_the_report(tmp_path: Path) -> None:
    ask = """<script>addEventListener('load',function(){
     var frame=document.querySelector('iframe');
     frame.contentDocument.querySelector('nav a[href="#layers"]').click();
     setTimeout(function(){
      var out=document.createElement('pre');out.id='found';
      out.textContent=JSON.stringify({at:frame.contentWindow.location.href,down:frame.contentWindow.scrollY});
      document.body.append(out);},200);
    });</script>"""
    text = f"<!doctype html><html><head></head><body>{frame(pipeline_profile(), height=200)}</body></html>"
    found = _seen(_browser(), text, tmp_path, ask=ask)
    assert found["at"] == "about:srcdoc#layers"
    assert found["down"] > 100


@pytest.mark.slow
@pytest.mark.system
def test_two_reports_beside_each_other_fit_the_window(tmp_path: Path) -> None:
    profile = pipeline_profile()
    text = side_by_side(profile, dataclasses.replace(profile, name="later"))
    for width in (1400, 500):
        found = _seen(_browser(), text, tmp_path, width)
        assert found["problems"] == []
        assert found["charts"] == text.count("<svg")
        assert not found["wide"]
        assert found["used"]["open"]


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
    for browser in (_browser(),):
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
