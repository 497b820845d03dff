"""gc-monitor's tables: devices, the processes attached to them, and errors.

The device and process tables have the widths of published output. The error table is podrun's own and comes last, so
that the published tables keep their shape. Tables are drawn with ``+ - |``, and cells are centred.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from podrun import __version__
from podrun.core.telemetry import AttachedProcess
from podrun.core.terminal import in_lines, narrowed
from podrun.monitor.devices import Device, View, diagnose_device
from podrun.partition.client.device_attributes import board_serial, reading

DEVICE_COLUMNS = (
    ("IPU-M", 13),
    ("Serial", 20),
    ("IPU-M SW", 8),
    ("Server version", 14),
    ("ICU FW", 10),
    ("Type", 7),
    ("ID", 4),
    ("IPU#", 6),
    ("Routing", 7),
)
TITLE_WIDTH = 15
PROCESS_COLUMNS = (
    ("PID", 8),
    ("Command", 41),
    ("Time", 8),
    ("User", 12),
    ("ID", 4),
    ("Clock", 10),
    ("Temp", 8),
    ("Temp", 8),
    ("Power", 8),
)
IDLE_WIDTH = 98
LEAST_COMMAND = 12
"""Characters of a command that the process table shows on the narrowest terminal."""


def device_table(view: View) -> str:
    """IPUs of a partition by device id; a rule after each IPU-Machine."""
    widths = [width for _, width in DEVICE_COLUMNS]
    title = (TITLE_WIDTH, span(widths) - TITLE_WIDTH - 1)
    lines = [rule(title), centred_row(("gc-monitor", partition_headline(view)), title), rule(widths)]
    lines += [centred_row([name for name, _ in DEVICE_COLUMNS], widths), rule(widths)]
    for group in machines(view.devices):
        lines += [centred_row(_device_cells(view, device), widths) for device in group]
        lines.append(rule(widths))
    return "\n".join(lines)


def partition_headline(view: View) -> str:
    """The partition's name and its number of IPUs."""
    info = view.info
    gcd = f" (gcd:{view.config.attributes.get('GCD Id', '0')})" if info.num_gcds > 1 else ""
    kind = "reconfigurable IPUs" if info.reconfigurable else "IPUs"
    return f"Partition: {info.name}{gcd}{partition_mark(view)} has {info.size} {kind}"


def partition_mark(view: View) -> str:
    """``[active]``, as in published output, at the partition that tools use; its state if it cannot be used."""
    from podrun.partition.state.values import PartitionState

    if view.info.state is not PartitionState.ACTIVE:
        return f" [{view.info.state.name.lower()}]"
    return " [active]" if view.active else ""


def machines(devices: Iterable[Device]) -> list[list[Device]]:
    """Devices grouped by the IPU-Machine that has them."""
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(device.machine.agent_id, []).append(device)
    return list(groups.values())


def _device_cells(view: View, device: Device) -> list[str]:
    versions = device.machine.versions
    return [
        device.host,
        board_serial(device.machine.serial, device.number),
        versions.get("IPU-M software", ""),
        versions.get("IPUoF server", __version__),
        versions.get("ICU firmware", ""),
        "M2000",
        str(device.id),
        str(device.number),
        view.info.ild_routing,
    ]


def process_table(view: View, now: float | None = None, width: int | None = None) -> str:
    """A row for each IPU that a process holds, grouped by process and machine; a box that says so if there is none.

    ``width``: of the terminal. On a narrow one columns are as wide as what they hold, and commands show their ends.
    """
    held = [(device, device.ipu.process) for device in view.devices if device.ipu.process is not None]
    busy = [device for device, _ in held]
    if not busy:
        return _box(f"No attached processes in partition {view.info.name}", width)
    moment = time.time() if now is None else now
    cells = [_process_cells(device, process, moment) for device, process in held]
    command = max([PROCESS_COLUMNS[1][1], *(len(line[1]) + 2 for line in cells)])
    widths = [command if name == "Command" else width for name, width in PROCESS_COLUMNS]
    if width is not None and span(widths) + 2 > width:
        whole_rows = [[*line, *_board_cells(device)] for device, line in zip(busy, cells, strict=True)]
        widths = _narrow_processes(whole_rows, width)
    top = [span(widths[:4]), span(widths[4:7]), span(widths[7:])]
    lines = [
        rule(top),
        centred_row([f"Attached processes in partition {view.info.name}", "IPU", "Board"], top),
    ]
    lines += [rule(widths), centred_row([name for name, _ in PROCESS_COLUMNS], widths), rule(widths)]
    previous = None
    for device, line in zip(busy, cells, strict=True):
        group = (line[0], device.machine.agent_id)
        if previous not in (None, group):
            lines.append(rule(widths))
        board = ["", ""] if group == previous else _board_cells(device)
        lines.append(centred_row([*line, *board], widths))
        previous = group
    lines.append(rule(widths))
    return "\n".join(lines)


def _narrow_processes(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of the process table on a terminal of ``width``: what cells hold, and for commands what is left."""
    widths = [
        max(len(name), *(len(cells[column]) for cells in rows))
        for column, (name, _) in enumerate(PROCESS_COLUMNS)
    ]
    widths[1] = 0
    widths[1] = max(width - span(widths) - 2, LEAST_COMMAND)
    return widths


def _box(text: str, width: int | None = None) -> str:
    inner = IDLE_WIDTH if width is None else min(IDLE_WIDTH, max(width - 2, len(text)))
    return "\n".join([rule([inner]), centred_row([text], [inner]), rule([inner])])


def _process_cells(device: Device, process: AttachedProcess, now: float) -> list[str]:
    running = "" if process.start_time_s is None else duration(now - process.start_time_s)
    return [
        str(process.pid),
        process.command,
        running,
        process.user,
        str(device.id),
        reading(device.ipu.clock_mhz, "{:.0f}MHz"),
        reading(device.ipu.die_temperature_c, "{:.1f} C"),
    ]


def _board_cells(device: Device) -> list[str]:
    return [
        reading(device.machine.board_temperature_c, "{:.1f} C"),
        reading(device.machine.board_power_w, "{:.1f} W"),
    ]


def duration(seconds: float) -> str:
    """Time as gc-monitor shows it: ``10s``, ``1m3s``, ``2h0m5s``."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, last = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{last}s"
    return f"{minutes}m{last}s" if minutes else f"{last}s"


def error_table(view: View, width: int | None = None) -> str | None:
    """The IPUs that cannot be used, why, and the remedy; None if all are usable.

    A partition that is being brought up or taken back gets one line, since it needs no help. ``width``: of the
    terminal; on a narrow one cells go on in further lines.
    """
    if not view.info.state.is_terminal():
        return _box(
            f"Partition {view.info.name} is {view.info.state.name}: its IPUs cannot be used now", width
        )
    states = [(device.id, diagnose_device(view.info.name, device)) for device in view.devices]
    lines = [[str(number), diagnosis.state, diagnosis.remedy] for number, diagnosis in states if diagnosis]
    if view.info.error:
        lines.insert(0, ["-", f"partition {view.info.state.name}", view.info.error])
    if not lines:
        return None
    widths = [
        4,
        max(24, *(len(line[1]) + 2 for line in lines)),
        max(60, *(len(line[2]) + 2 for line in lines)),
    ]
    if width is not None:
        widths = narrowed(widths, width - len(widths) - 1)
    text = f"Errors in partition {view.info.name}"
    result = [rule([span(widths)]), centred_row([text], [span(widths)]), rule(widths)]
    result += [centred_row(["ID", "State", "What makes it usable again"], widths), rule(widths)]
    result += [centred_row(cells, widths) for line in lines for cells in in_lines(line, widths)]
    return "\n".join([*result, rule(widths)])


def all_tables(
    views: Sequence[View], *, cards: bool = True, now: float | None = None, width: int | None = None
) -> str:
    """All tables of gc-monitor for some partitions. ``width``: of the terminal, which the first table disregards: it
    stays as the real tool prints it.
    """
    parts = []
    for view in views:
        parts += [device_table(view)] if cards else []
        parts.append(process_table(view, now, width))
        errors = error_table(view, width)
        parts += [errors] if errors else []
    return "\n".join(parts)


# --- drawing ----------------------------------------------------------------------------------------------------


def fit(text: str, width: int) -> str:
    """Text centred in a cell; text that does not fit keeps its end after three dots."""
    if len(text) > width:
        return "..." + text[len(text) - (width - 3) :] if width > 3 else text[-width:]
    left = (width - len(text)) // 2
    return " " * left + text + " " * (width - len(text) - left)


def rule(widths: Sequence[int]) -> str:
    """A horizontal line with a plus where columns meet."""
    return "+" + "+".join("-" * width for width in widths) + "+"


def centred_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A row of centred cells."""
    return "|" + "|".join(fit(cell, width) for cell, width in zip(cells, widths, strict=True)) + "|"


def span(widths: Sequence[int]) -> int:
    """Width of one cell over several columns: their widths and the bars between them."""
    return sum(widths) + len(widths) - 1
