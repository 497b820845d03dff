"""The full-screen view, on Textual: tabs for machines, jobs, the queue and what happens; details of one machine.

It only looks. A `SightingSource` says what there is: a service that is asked again and again, or a recording.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar, Protocol

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, RichLog, Sparkline, Static, TabbedContent, TabPane

from podrun.core.errors import PodrunError
from podrun.monitor.live.arrangement import (
    JOB_COLUMNS,
    NARROW,
    SortKey,
    batch_rates,
    changes_between,
    clock_time,
    fitted_names,
    headline,
    job_rows,
    machine_row,
    shown_machines,
)
from podrun.monitor.live.details import ipu_lines, job_lines, launch_lines
from podrun.monitor.live.sighting import JobSight, MachineSight, PodSighting

KEPT_LINES = 500
HISTORY = 120
"""Sightings that the history of an IPU holds."""
MACHINE_COLUMNS = ("Machine", "Partition", "State", "IPU0", "IPU1", "IPU2", "IPU3", "Power", "Batches")
NARROW_COLUMNS = ("Machine", "IPU0", "IPU1", "IPU2", "IPU3")
TABS = ("machines", "jobs", "queue", "incidents")
"""What the tabs show; the keys 1 to 4 open them."""
MOST_SPARE = 4
"""Characters that a column keeps beyond its cells, so that it does not move with each figure."""
STYLES = {"ERROR": "bold red", "free": "dim"}


class SightingSource(Protocol):
    """Where sightings come from."""

    def look(self) -> PodSighting | None:
        """The present sighting; None: nothing new. Called in a thread. Raises PodrunError."""

    def jump(self, seconds: float) -> None:
        """Move in time; only recordings can."""

    def notes(self, after_s: float, until_s: float) -> list[str]:
        """What a launch's record tells of the time between two sightings, as lines."""

    def launch_folders(self, partition: str) -> tuple[str, ...]:
        """The folders of this user's launch in a partition on this host; empty if there is none."""

    @property
    def position(self) -> str:
        """Where in time it is, for the head line; empty for the present."""


class MachineDetails(ModalScreen[None]):
    """All that is known of one machine's IPUs, with how busy they were."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "back")]
    CSS = """
    MachineDetails { align: center middle; }
    #details { width: 90%; height: 90%; border: round $primary; padding: 0 1; }
    """

    def __init__(self, machine: MachineSight, history: dict[int, deque[float]]) -> None:
        super().__init__()
        self._machine, self._history = machine, history

    def compose(self) -> ComposeResult:
        """See `textual.app.App.compose`."""
        machine = self._machine
        with VerticalScroll(id="details"):
            work = f"{machine.batches} batches"
            if machine.samples is not None:
                work += f", {machine.samples} samples"
            if machine.modelled_s is not None:
                work += f", {machine.modelled_s:.3g} s modelled on IPUs"
            yield Static(
                f"{machine.agent}, partition {machine.partition or 'none'}: {machine.state}, {machine.health}"
            )
            yield Static(work)
            for ipu in machine.ipus:
                yield Static("\n".join(ipu_lines(ipu)), markup=False)
                yield Sparkline(list(self._history.get(ipu.partition_ipu, ())) or [0.0])

    async def action_dismiss(self, result: None = None) -> None:
        """Leave the details and show the POD again."""
        self.dismiss(result)


class JobDetails(ModalScreen[None]):
    """All that is known of one job: who holds it, its machines, its rate so far, and what happened to it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "back")]
    CSS = """
    JobDetails { align: center middle; }
    #job-details { width: 90%; height: 90%; border: round $primary; padding: 0 1; }
    """

    def __init__(self, lines: list[str], rates: list[float]) -> None:
        super().__init__()
        self._lines, self._rates = lines, rates

    def compose(self) -> ComposeResult:
        """See `textual.app.App.compose`."""
        with VerticalScroll(id="job-details"):
            yield Static(self._lines[0], markup=False)
            yield Sparkline(self._rates or [0.0])
            yield Static("\n".join(self._lines[1:]), markup=False)

    async def action_dismiss(self, result: None = None) -> None:
        """Leave the details and show the POD again."""
        self.dismiss(result)


class PodTop(App[None]):
    """``podrun top``. ``interval_s``: seconds between two looks; ``first``: what is shown from the beginning."""

    TITLE = "podrun top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { overflow: hidden; }
    TabbedContent { height: 1fr; }
    #headline { height: 1; background: $boost; }
    #notice { height: auto; color: $error; }
    #filter { display: none; height: 3; }
    DataTable { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("s", "sort", "sort"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("enter", "details", "details", show=False),
        Binding("space", "pause", "pause"),
        Binding("left_square_bracket", "jump(-10)", "-10 s", key_display="["),
        Binding("right_square_bracket", "jump(10)", "+10 s", key_display="]"),
        Binding("escape", "unfilter", "", show=False),
        *(Binding(str(key), f"tab('{name}')", show=False) for key, name in enumerate(TABS, 1)),
    ]

    def __init__(self, source: SightingSource, interval_s: float, first: PodSighting | None = None) -> None:
        super().__init__()
        self._first = first
        self._source, self._interval_s = source, interval_s
        self._seen: PodSighting | None = None
        self._order, self._words, self._paused = SortKey.NAME, "", False
        self._history: dict[tuple[str, int], deque[float]] = {}
        self._shown: list[MachineSight] = []
        self._job_rows: list[tuple[JobSight, tuple[str, ...]]] = []
        self._rates: dict[str, float] = {}
        self._rate_history: dict[str, deque[float]] = {}
        self._lines: list[str] = []

    def compose(self) -> ComposeResult:
        """See `textual.app.App.compose`."""
        yield Static("asking the partition service ...", id="headline", markup=False)
        yield Static("", id="notice", markup=False)
        yield Input(placeholder="machine, partition, state, user or command", id="filter")
        with TabbedContent():
            with TabPane("Machines", id="machines-tab"):
                yield DataTable(id="machines", cursor_type="row")
            with TabPane("Jobs", id="jobs-tab"):
                yield DataTable(id="jobs", cursor_type="row")
            with TabPane("Queue", id="queue-tab"):
                yield DataTable(id="queue", cursor_type="row")
            with TabPane("Incidents", id="incidents-tab"):
                yield RichLog(id="incidents", wrap=True, markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Set up the tables, and look at the POD at the chosen interval."""
        self._set_columns()
        self._table("jobs").add_columns(*JOB_COLUMNS)
        self._table("queue").add_columns("Place", "Request", "IPUs", "Owner", "Since", "Waits for")
        self.query_one("#machines").focus()
        self.set_interval(self._interval_s, self._look_again)
        if self._first is None:
            self._look_again()
        else:
            self._take(self._first)

    def on_resize(self) -> None:
        """Show what fits, when the new size is in force."""
        self.call_after_refresh(self._fit)

    def _fit(self) -> None:
        self._set_columns()
        self._show()

    def _table(self, name: str) -> DataTable[str]:
        table: DataTable[str] = self.query_one(f"#{name}", DataTable)
        return table

    def _columns(self) -> tuple[str, ...]:
        return MACHINE_COLUMNS if self.size.width >= NARROW else NARROW_COLUMNS

    def _set_columns(self) -> None:
        table = self._table("machines")
        if [str(column.label) for column in table.ordered_columns] != list(self._columns()):
            table.clear(columns=True)
            table.add_columns(*((name, name) for name in self._columns()))

    def _look_again(self) -> None:
        if not self._paused:
            self.run_worker(self._look, thread=True, exclusive=True, group="look")

    def _look(self) -> None:
        """In a thread: a service that is slow never stops the screen."""
        try:
            seen = self._source.look()
        except PodrunError as error:
            self.call_from_thread(self._notice, f"{error.message}. {error.hint or ''}")
            return
        if seen is not None:
            self.call_from_thread(self._take, seen)

    def _notice(self, text: str) -> None:
        """Say why nothing new is shown; what was seen last stays."""
        if self._is_over():
            return
        if self._seen is None:
            self.query_one("#headline", Static).update("no POD seen yet")
        age = "" if self._seen is None else f" Shown: {clock_time(self._seen.time_s)} UTC."
        self.query_one("#notice", Static).update(text + age)

    def _is_over(self) -> bool:
        """Whether the screen has been taken down: a look that was under way then has nothing to show."""
        return not self.query("#notice")

    def _take(self, seen: PodSighting) -> None:
        if self._is_over():
            return
        log = self.query_one("#incidents", RichLog)
        lines = changes_between(self._seen, seen)
        if self._seen is not None:
            lines += self._source.notes(self._seen.time_s, seen.time_s)
        self._lines = (self._lines + sorted(lines))[-KEPT_LINES:]
        for line in sorted(lines):
            log.write(line)
        self._rates = batch_rates(self._seen, seen) or self._rates
        for name, rate in self._rates.items():
            self._rate_history.setdefault(name, deque(maxlen=HISTORY)).append(rate)
        self._seen = seen
        for machine in seen.machines:
            for ipu in machine.ipus:
                key = (machine.partition, ipu.partition_ipu)
                self._history.setdefault(key, deque(maxlen=HISTORY)).append(ipu.busy_percent or 0.0)
        self.query_one("#notice", Static).update("")
        self._show()

    def _show(self) -> None:
        seen = self._seen
        if seen is None:
            return
        position = self._source.position
        state = f"  {position}" if position else ""
        state += "  PAUSED" if self._paused else ""
        self.query_one("#headline", Static).update(headline(seen, self.size.width - len(state)) + state)
        self._shown = shown_machines(seen, self._order, self._words)
        width = len(self._columns())
        picked = (0, 3, 4, 5, 6) if width == len(NARROW_COLUMNS) else range(width)
        replace_rows(
            self._table("machines"),
            [tuple(row[column] for column in picked) for row in map(machine_row, self._shown)],
        )
        self._job_rows = job_rows(seen, self._rates)
        replace_rows(self._table("jobs"), fitted_names([row for _, row in self._job_rows], self.size.width))
        replace_rows(
            self._table("queue"),
            [
                (
                    str(request.position),
                    request.name,
                    str(request.size),
                    request.owner,
                    clock_time(request.since_s),
                    ", ".join(request.blockers),
                )
                for request in seen.waiting
            ],
        )

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Only a recording can be moved: without one the keys are not shown. See `textual.dom.DOMNode.check_action`."""
        return action != "jump" or bool(self._source.position)

    def action_tab(self, name: str) -> None:
        """Open a tab, with its rows in focus."""
        self.set_focus(None)  # What has the focus keeps its tab open.
        self.query_one(TabbedContent).active = f"{name}-tab"
        self.call_after_refresh(self.query_one(f"#{name}").focus)

    def action_sort(self) -> None:
        """The next order of machines."""
        self._order = self._order.after()
        self.notify(f"sorted by {self._order.value}", timeout=1)
        self._show()

    def action_pause(self) -> None:
        """Stop to look, or go on."""
        self._paused = not self._paused
        self._show()

    def action_jump(self, seconds: int) -> None:
        """Move by so many seconds in a recording."""
        self._source.jump(seconds)
        self.run_worker(self._look, thread=True, exclusive=True, group="look")

    def action_filter(self) -> None:
        """Ask for words that rows must contain."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_unfilter(self) -> None:
        """Show all machines again."""
        field = self.query_one("#filter", Input)
        field.value, field.display = "", False
        self._words = ""
        self._table("machines").focus()
        self._show()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the words are typed."""
        self._words = event.value
        self._show()

    def on_input_submitted(self) -> None:
        """Back to the table with the words in force."""
        self._table("machines").focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the details of the machine or job on whose row Enter was pressed."""
        if event.data_table.id == "machines" and event.cursor_row < len(self._shown):
            machine = self._shown[event.cursor_row]
            history = {
                ipu.partition_ipu: self._history[machine.partition, ipu.partition_ipu] for ipu in machine.ipus
            }
            self.push_screen(MachineDetails(machine, history))
        elif event.data_table.id == "jobs" and self._seen and event.cursor_row < len(self._job_rows):
            job, _ = self._job_rows[event.cursor_row]
            rates = self._rate_history.get(job.partition, ())
            folders = self._source.launch_folders(job.partition)
            lines = job_lines(self._seen, job, self._lines, launch_lines(folders))
            self.push_screen(JobDetails(lines, list(rates)))


def replace_rows(table: DataTable[str], rows: list[tuple[str, ...]]) -> None:
    """Make a table hold these rows: cells that changed alone are drawn again, so that a still POD costs nothing.
    Columns grow with their cells, and shrink after long ones."""
    from rich.text import Text

    def cell(text: str) -> Text:
        return Text(text, style=STYLES.get(text, ""), no_wrap=True)

    if table.row_count != len(rows):
        cursor = table.cursor_coordinate
        table.clear()
        for row in rows:
            table.add_row(*map(cell, row))  # type: ignore[arg-type]
        if rows:
            table.move_cursor(row=min(cursor.row, len(rows) - 1))
        return
    for number, row in enumerate(rows):
        old = table.get_row_at(number)
        for column, text in enumerate(row):
            if (before := str(old[column])) != text:
                fitting = len(text) > len(before) or len(before) - len(text) > MOST_SPARE
                table.update_cell_at((number, column), cell(text), update_width=fitting)  # type: ignore[arg-type]
