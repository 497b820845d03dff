"""One IPU and one job in lines of text, for the details of the live view. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from podrun.monitor.live.arrangement import clock_time
from podrun.monitor.live.sighting import IpuSight, JobSight, PodSighting

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def octets(count: int | None) -> str:
    """``1.5 MiB``; "unknown" for None."""
    if count is None:
        return "unknown"
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def _figure(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.0f} {unit}"


def ipu_lines(ipu: IpuSight) -> list[str]:
    """The figures of one IPU. Shares, power, temperatures and bytes are modelled."""
    recent, session = _figure(ipu.busy_percent, "%"), _figure(ipu.session_percent, "%")
    parts = ", ".join(f"{name} {share:.0f} %" for name, share in ipu.shares.items()) or "unknown"
    again = "unknown" if ipu.link_errors is None else str(ipu.link_errors)
    parity = "unknown" if ipu.parity_errors is None else str(ipu.parity_errors)
    lines = [
        f"IPU {ipu.partition_ipu} (IPU#{ipu.number}): {ipu.error or 'no errors'}",
        f"  busy {recent} of the last second, {session} of the session",
        f"  of that: {parts}",
        f"  clock {_figure(ipu.clock_mhz, 'MHz')}, power {_figure(ipu.power_w, 'W (modelled)')}, "
        f"die {_figure(ipu.die_c, 'C')}, {ipu.batches} batches",
        f"  fullest tile {octets(ipu.tile_bytes)} of {octets(ipu.tile_capacity_bytes)}",
        f"  links: {octets(ipu.link_bytes)} sent, {again} packets again; host: {octets(ipu.host_bytes)}; "
        f"parity errors: {parity}",
        f"  held by {ipu.process or 'nobody'}",
    ]
    if ipu.links_down:
        lines.append(f"  link down to {', '.join(map(str, ipu.links_down))}")
    return lines


def launch_lines(folders: Sequence[str]) -> list[str]:
    """The goodput and the last output of a launch that runs, from its folders; of one on another host or of another
    user there are none."""
    from podrun.record.running_launch import goodput_so_far, output_tail  # Not needed for the first frame.

    if not folders:
        return ["its output is seen by the user, and on the host, that started podrun"]
    goodput = (
        goodput_so_far(folders) or "goodput: unknown, as this launch is not recorded (podrun --record FILE)"
    )
    return [goodput, "last output:", *(f"  {line}" for line in output_tail(folders) or ["nothing yet"])]


def job_lines(seen: PodSighting, job: JobSight, log: Sequence[str], launch: Sequence[str] = ()) -> list[str]:
    """A job with its machines, problems and what the log says of its partition. ``log``: lines of the incidents;
    ``launch``: see `launch_lines`."""
    lines = [f"{job.partition}: {job.ipus} IPUs, {job.state}, {job.owner}, batches a second:"]
    if job.since_s:
        lines.append(f"since {clock_time(job.since_s)} UTC, {job.batches} batches")
    lines += [f"  instance {process}" for process in job.processes] or ["  held by nobody"]
    lines.append("machines, modelled milliseconds a batch:")
    for machine in seen.machines:
        if machine.partition == job.partition:
            speed = (
                "unknown"
                if machine.modelled_s is None or not machine.batches
                else f"{1000 * machine.modelled_s / machine.batches:.3f}"
            )
            lines.append(f"  {machine.agent} {machine.state}: {speed}, {machine.batches} batches")
    lines += [f"{problem.severity.value}: {problem.what}. {problem.remedy}" for problem in seen.problems
              if problem.partition == job.partition]  # fmt: skip
    lines.append("what happened:")
    told = [f"  {line}" for line in log if f" {job.partition} " in f"{line} " or "instance" in line]
    return [*lines, *(told or ["  nothing"]), *launch]
