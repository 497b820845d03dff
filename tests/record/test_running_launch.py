"""What a running launch leaves for monitors: its last lines, and its goodput so far."""

from __future__ import annotations

from pathlib import Path

from podrun.record.recorder import EventRecorder
from podrun.record.running_launch import SHOWN_LINES, TAIL_BYTES, OutputTail, goodput_so_far, output_tail


def test_the_last_lines_of_a_launch_are_kept_and_cleaned(tmp_path: Path) -> None:
    tail = OutputTail(tmp_path)
    for number in range(4000):
        assert tail.add(b"[1,0]<stdout>:\x1b[31mline\x1b[0m %d \x07%s\n" % (number, b"." * 20)) == ""
    tail.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * TAIL_BYTES
    lines = output_tail([str(tmp_path / "none"), str(tmp_path)])
    assert len(lines) == SHOWN_LINES
    assert lines[-1] == f"[1,0]<stdout>:line 3999  {'.' * 20}"
    assert lines[0].startswith(f"[1,0]<stdout>:line {4000 - SHOWN_LINES}")
    assert output_tail([]) == []


def test_a_full_disk_ends_the_last_lines_and_says_so_once(tmp_path: Path) -> None:
    tail = OutputTail(tmp_path)
    tail._file.close()
    tail._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
    assert tail.add(b"line\n") == "podrun top shows no more output of this launch: No space left on device"
    assert tail.add(b"line\n") == ""


def test_goodput_of_a_launch_that_runs(tmp_path: Path) -> None:
    assert goodput_so_far([str(tmp_path)]) == ""
    launch, instance = (
        EventRecorder(tmp_path / name, actor, 0)
        for name, actor in (("launch.0.1.jsonl", "launch"), ("instance-0.0.2.jsonl", "instance 0"))
    )
    launch.note_at(0, "start", {})
    assert goodput_so_far(["/nowhere", str(tmp_path)]) == ""
    instance.note_at(0, "run", {"batch": 0})
    instance.note_at(1, "ran", {"batch": 0, "batches": 3})
    assert "(3 batches)" in goodput_so_far(["/nowhere", str(tmp_path)])
