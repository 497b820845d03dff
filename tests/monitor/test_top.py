"""``podrun top`` and ``podrun record``: what is seen, kept, arranged and shown, without a terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from textual.app import App
from textual.widgets import DataTable, Input, Static

from podrun.core.errors import ServiceError
from podrun.monitor.commands.top import top_verb
from podrun.monitor.devices import connect_monitor
from podrun.monitor.live.arrangement import (
    SortKey,
    as_lines,
    bar,
    batch_rates,
    changes_between,
    headline,
    job_rows,
    shown_machines,
    totals_of,
)
from podrun.monitor.live.details import ipu_lines, job_lines, launch_lines
from podrun.monitor.live.screen import JobDetails, MachineDetails, PodTop, replace_rows
from podrun.monitor.live.sighting import PodSighting, sighting_from_plain
from podrun.monitor.live.sources import ServiceSource
from podrun.partition.host.discovery import LAUNCHER, Registry, ServiceEntry, own_process_id
from podrun.record.running_launch import OutputTail
from tests.partition.conftest import Pod

DEADLINE_S = 60


def test_a_sighting_has_machines_jobs_and_problems(seen: PodSighting) -> None:
    assert [job.partition for job in seen.jobs] == ["p", "q"]
    assert seen.jobs[0].processes == ("4711 python (justina)",)
    assert [problem.agent for problem in seen.problems] == ["ipum2"]
    totals = totals_of(seen)
    assert (totals.machines, totals.ipus, totals.ipus_held, totals.ipus_in_error) == (3, 12, 4, 1)
    assert totals.busy_percent == 50.0


def test_the_json_form_gives_the_same_sighting(seen: PodSighting) -> None:
    assert sighting_from_plain(json.loads(json.dumps(seen.plain()))) == seen


def test_machines_are_sorted_and_filtered(seen: PodSighting) -> None:
    names = [machine.agent for machine in shown_machines(seen, SortKey.ERRORS, "")]
    assert set(names[:2]) == {"ipum2", "ipum4"}  # One with an error, one that is not up.
    assert shown_machines(seen, SortKey.BUSY, "")[0].agent == "ipum1"
    assert [machine.agent for machine in shown_machines(seen, SortKey.NAME, "justina P")] == ["ipum1"]
    assert shown_machines(seen, SortKey.NAME, "nobody-has-this") == []


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_head_line_fits_narrow_terminals(seen: PodSighting, width: int) -> None:
    line = headline(seen, width)
    assert "1 broken" in line
    assert len(line) <= width
    assert seen.server in headline(seen, 200)


def test_lines_of_a_narrow_terminal_show_machines_and_ipus_alone(seen: PodSighting) -> None:
    lines = list(as_lines(seen, SortKey.NAME, "", 40))
    assert lines[1].split() == ["Machine", "IPU0", "IPU1", "IPU2", "IPU3"]
    assert "ERROR" in "\n".join(lines)


def test_a_bar_grows_with_the_share() -> None:
    heights = [bar(percent) for percent in range(0, 101, 10)]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1], bar(None)) == (" ", "█", "?")


def test_changes_name_what_began_and_what_is_over(seen: PodSighting) -> None:
    well = replace(seen, problems=())
    assert [line for line in changes_between(well, seen) if "broken: p ipum2" in line]
    assert [line for line in changes_between(seen, well) if "over: p ipum2" in line]
    gone = replace(well, jobs=well.jobs[:1])
    assert [line[10:] for line in changes_between(well, gone)] == ["partition q is removed"]
    assert changes_between(seen, seen) == []


def test_rates_are_batches_over_seconds_and_left_out_after_a_restart(seen: PodSighting) -> None:
    def after(seconds: float, batches: int) -> PodSighting:
        return replace(seen, time_s=seen.time_s + seconds, jobs=(replace(seen.jobs[0], batches=batches),))

    before = after(0, 10)
    assert batch_rates(before, after(2, 30)) == {"p": 10.0}
    assert batch_rates(before, after(2, 3)) == {}
    assert batch_rates(None, before) == {}


class Fixed:
    """A source of one sighting, or of an error."""

    position = ""
    folders: tuple[str, ...] = ()

    def launch_folders(self, partition: str) -> tuple[str, ...]:
        return self.folders

    def notes(self, after_s: float, until_s: float) -> list[str]:
        return []

    def __init__(self, answer: PodSighting | ServiceError) -> None:
        self.answer = answer

    def look(self) -> PodSighting:
        if isinstance(self.answer, ServiceError):
            raise self.answer
        return self.answer

    def jump(self, seconds: float) -> None:
        raise AssertionError("the present cannot be moved")


async def wait_until(app: PodTop, holds: object) -> None:
    assert callable(holds)
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.01)


def test_the_screen_shows_sorts_filters_and_drills(seen: PodSighting) -> None:
    async def drive() -> None:
        app = PodTop(Fixed(seen), 60)
        async with app.run_test(size=(120, 30)) as pilot:
            table = app.query_one("#machines", DataTable)
            await wait_until(app, lambda: table.row_count == 4)
            assert str(table.get_row_at(0)[0]) == "ipum1"
            await pilot.press("s", "s")  # By errors.
            assert str(table.get_row_at(0)[0]) in ("ipum2", "ipum4")
            await pilot.press("slash", *"justina")
            assert table.row_count == 1
            await pilot.press("enter", "enter")
            await wait_until(app, lambda: isinstance(app.screen, MachineDetails))
            await pilot.press("escape")
            await pilot.press("escape")
            assert app.query_one("#filter", Input).value == ""
            assert table.row_count == 4
            assert "1 broken" in str(app.query_one("#headline", Static).content)

    asyncio.run(drive())


def test_a_column_grows_with_what_it_shows() -> None:
    class Shown(App[None]):
        def compose(self) -> Iterator[DataTable[str]]:
            yield DataTable()

    async def drive() -> None:
        async with Shown().run_test() as pilot:
            table = pilot.app.query_one(DataTable)
            table.add_columns("IPU0", "IPU1")
            replace_rows(table, [("▄ 54%", "▄ 54%")])
            await pilot.pause()
            replace_rows(table, [("█ 100%", "▄ 50%")])
            await pilot.pause()
            assert [column.content_width for column in table.ordered_columns] == [6, 5]
            replace_rows(table, [("no answer 13s", "▄ 50%")])
            await pilot.pause()
            replace_rows(table, [("free", "▄ 50%")])
            await pilot.pause()
            assert [column.content_width for column in table.ordered_columns] == [4, 5]

    asyncio.run(drive())


def test_a_long_command_leaves_room_for_the_rate(seen: PodSighting) -> None:
    long = replace(seen.jobs[0], processes=("4711 python train.py --epochs 4000 --dataset /data (justina)",))
    many = replace(seen, jobs=(long, seen.jobs[1]))

    async def drive() -> None:
        app = PodTop(Fixed(many), 60)
        async with app.run_test(size=(80, 20)) as pilot:
            table = app.query_one("#jobs", DataTable)
            await wait_until(app, lambda: table.row_count == 4)
            await pilot.press("2")
            await pilot.pause()
            command = str(table.get_row_at(1)[0])
            assert command.startswith("└ 4711 python train.py")
            assert command.endswith("...")
            assert table.virtual_size.width <= 80

    asyncio.run(drive())


def test_keys_that_move_in_time_are_shown_for_recordings_alone(seen: PodSighting) -> None:
    async def drive(source: Fixed) -> bool:
        app = PodTop(source, 60)
        async with app.run_test(size=(120, 30)):
            return "left_square_bracket" in app.screen.active_bindings

    recording = Fixed(seen)
    recording.position = "replay 10:00:00 of 10:00:30 at 1x"
    assert [asyncio.run(drive(source)) for source in (Fixed(seen), recording)] == [False, True]


def test_a_narrow_screen_shows_fewer_columns(seen: PodSighting) -> None:
    async def drive() -> None:
        app = PodTop(Fixed(seen), 60)
        async with app.run_test(size=(40, 20)) as pilot:
            table = app.query_one("#machines", DataTable)
            await wait_until(app, lambda: table.row_count == 4)
            assert len(table.ordered_columns) == 5
            await pilot.resize_terminal(120, 30)
            await wait_until(app, lambda: len(table.ordered_columns) == 9)

    asyncio.run(drive())


def test_a_service_that_is_gone_leaves_the_last_sighting_and_says_why(seen: PodSighting) -> None:
    async def drive() -> None:
        source = Fixed(seen)
        app = PodTop(source, 60)
        async with app.run_test(size=(120, 30)):
            table = app.query_one("#machines", DataTable)
            await wait_until(app, lambda: table.row_count == 4)
            source.answer = ServiceError("nothing listens", hint="vipu-server")
            app._look_again()
            notice = app.query_one("#notice", Static)
            await wait_until(app, lambda: "nothing listens" in str(notice.content))
            assert table.row_count == 4

    asyncio.run(drive())


def test_top_prints_text_without_a_terminal(pod: Pod) -> None:
    pod.active("p", 8)
    done = CliRunner().invoke(top_verb, ["--once"], standalone_mode=False)
    assert done.exception is None
    lines = done.stdout.splitlines()
    assert lines[1].split()[:3] == ["Machine", "Partition", "State"]
    assert [line.split()[:2] for line in lines[2:4]] == [["ipum1", "p"], ["ipum2", "p"]]
    assert lines[-1] == "p: 8 IPUs, ACTIVE, held by nobody"


def test_details_of_a_job_name_its_machines_speed_and_its_story(seen: PodSighting) -> None:
    slow = replace(seen.machines[1], modelled_s=2.0, batches=100)
    whole = replace(seen, machines=(seen.machines[0], slow, *seen.machines[2:]))
    lines = job_lines(
        whole, whole.jobs[0], ["09:00:00  partition p is ACTIVE", "09:00:00  partition q is ACTIVE"]
    )
    text = "\n".join(lines)
    assert "  ipum2 up: 20.000, 100 batches" in text
    assert "broken: tile parity" in text
    assert "partition p is ACTIVE" in text
    assert "partition q" not in text
    assert "4711 python (justina)" in text


def test_details_of_an_ipu_have_counters_and_say_what_is_unknown(seen: PodSighting) -> None:
    ipu = replace(
        seen.machines[0].ipus[0], shares={"compute": 60.0, "link": 40.0}, die_c=33.4, tile_bytes=300 * 1024,
        tile_capacity_bytes=624 * 1024, link_bytes=3 << 30, link_errors=7,
    )  # fmt: skip
    text = "\n".join(ipu_lines(ipu))
    assert "compute 60 %, link 40 %" in text
    assert "fullest tile 300.0 KiB of 624.0 KiB" in text
    assert "3.0 GiB sent, 7 packets again; host: unknown" in text
    assert "die 33 C" in text


def test_enter_on_a_job_opens_its_details(seen: PodSighting, tmp_path: Path) -> None:
    OutputTail(tmp_path).add(b"[1,0]<stdout>:loss 0.25\n")

    async def drive() -> None:
        source = Fixed(seen)
        source.folders = (str(tmp_path),)
        app = PodTop(source, 0.05)
        async with app.run_test(size=(100, 30)) as pilot:
            table = app.query_one("#jobs", DataTable)
            await wait_until(app, lambda: table.row_count > 0)
            app.query_one("TabbedContent").active = "jobs-tab"  # type: ignore[attr-defined]
            table.focus()
            await pilot.press("enter")
            await wait_until(app, lambda: isinstance(app.screen, JobDetails))
            said = "\n".join(str(part.content) for part in app.screen.query(Static))
            assert "last output:\n  [1,0]<stdout>:loss 0.25" in said
            assert "this launch is not recorded" in said
            await pilot.press("escape")
            await wait_until(app, lambda: not isinstance(app.screen, JobDetails))

    asyncio.run(asyncio.wait_for(drive(), DEADLINE_S))


def test_jobs_are_a_tree_and_go_with_their_partition(seen: PodSighting) -> None:
    held = replace(seen.jobs[0], processes=("4711 python (justina)", "4712 python (justina)"))
    many = replace(seen, jobs=(held, seen.jobs[1]))
    names = [row[0] for _, row in job_rows(many, {"p": 2.0})]
    assert names == ["p", "├ 4711 python (justina)", "└ 4712 python (justina)", "q", "└ held by nobody"]

    async def drive() -> None:
        source = Fixed(many)
        app = PodTop(source, 60)
        async with app.run_test(size=(100, 30)) as pilot:
            table = app.query_one("#jobs", DataTable)
            await wait_until(app, lambda: table.row_count == 5)
            await pilot.press("2")
            await wait_until(app, lambda: app.focused is table)
            await pilot.press("down", "down", "down", "enter")
            await wait_until(app, lambda: isinstance(app.screen, JobDetails))
            source.answer = replace(many, jobs=many.jobs[:1], machines=many.machines[:2])  # q is removed.
            app._look_again()
            await wait_until(app, lambda: table.row_count == 3)
            assert isinstance(app.screen, JobDetails)
            await pilot.press("escape", "enter")
            await wait_until(app, lambda: isinstance(app.screen, JobDetails))
            await pilot.press("escape")
            assert any("partition q is removed" in line for line in app._lines)

    asyncio.run(asyncio.wait_for(drive(), DEADLINE_S))


def test_the_folders_of_a_launch_are_those_that_it_publishes(pod: Pod, tmp_path: Path) -> None:
    entry = ServiceEntry(LAUNCHER, "", 0, own_process_id(), partition="p", directories=(str(tmp_path),))
    publication = Registry().publish(entry)
    source = ServiceSource(connect_monitor, lambda: 0.0)
    assert source.launch_folders("p") == (str(tmp_path),)
    assert source.launch_folders("q") == ()
    assert launch_lines(()) == ["its output is seen by the user, and on the host, that started podrun"]
    publication.withdraw()
