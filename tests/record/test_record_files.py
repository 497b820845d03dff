"""Records: written and read to the byte, refused when damaged, compared, and shrunk."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.errors import NotFoundError
from podrun.faults import parse_fault
from podrun.record.compare import first_difference, header_differences, smallest
from podrun.record.events import (
    Event,
    LaunchHeader,
    Record,
    RecordError,
    causal_order,
    normalised,
    parse_record,
    read_record,
    to_lines,
)
from tests.conftest import CHARACTERS

HEADER = LaunchHeader(("--num-replicas=4", "train.py"), "home", (parse_fault("ipu:0@batch=1:overflow"),))


def some_record(batches: int = 3) -> Record:
    events = [Event("launch", 0, 0, "start")]
    for batch in range(batches):
        for instance in (0, 1):
            data = {"batch": batch, "inputs": {"x": f"{batch}{instance}"}}
            events.append(Event(f"instance {instance}", 0, batch, "run", data))
    return Record(HEADER, tuple(events))


def text_of(record: Record) -> str:
    return "\n".join(to_lines(record)) + "\n"


def test_a_record_comes_back_as_it_was_written() -> None:
    record = some_record()
    assert parse_record(text_of(record), "f") == record
    assert text_of(parse_record(text_of(record), "f")) == text_of(record)


def test_every_cut_and_every_changed_line_is_refused_by_name(tmp_path: Path) -> None:
    text = text_of(some_record(1))
    for end in range(len(text)):
        with pytest.raises(RecordError, match="the record a-record"):
            parse_record(text[:end], "a-record")
    generator = random.Random(0)
    for place, character in enumerate(text):
        other = chr(ord(" ") + generator.randrange(95))
        if other != character:
            with pytest.raises(RecordError, match="a-record"):
                parse_record(text[:place] + other + text[place + 1 :], "a-record")
    with pytest.raises(NotFoundError, match="there is no record"):
        read_record(tmp_path / "none")


@given(st.text(CHARACTERS))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(RecordError):
        parse_record(text, "f")


@pytest.mark.parametrize(
    "line",
    [
        *('{"actor":"x"}', "[]", "[" * 5000, '{"actor":"launch","life":"0","clock":0,"kind":"a","data":{}}'),
        '{"actor":"launch","life":0,"clock":0,"kind":"fault","data":{"fault":"ipu:0@batch=1:melted"}}',
    ],
)
def test_lines_that_are_no_events_are_named(line: str) -> None:
    import hashlib

    lines = [to_lines(some_record())[0], line]
    whole = hashlib.sha256("".join(f"{each}\n" for each in lines).encode()).hexdigest()
    lines.append(json.dumps({"events": 1, "sha256": whole}))
    with pytest.raises(RecordError, match="line 2"):
        parse_record("\n".join(lines) + "\n", "f")


def test_a_file_of_another_kind_is_no_record() -> None:
    with pytest.raises(RecordError, match=r"notes\.md is no record of a launch: its first line is no JSON"):
        parse_record("# Notes\n\nof yesterday\n", "notes.md")


def test_a_fault_that_is_none_is_named_with_its_record() -> None:
    """It was written by another release, or by hand."""
    import hashlib

    head = to_lines(some_record())[0].replace("overflow", "melted")
    whole = hashlib.sha256(f"{head}\n".encode()).hexdigest()
    with pytest.raises(RecordError, match=r"the record f, line 1: .*melted"):
        parse_record("\n".join([head, json.dumps({"events": 0, "sha256": whole})]) + "\n", "f")


def test_causal_order_does_not_depend_on_who_wrote_first() -> None:
    events = list(some_record(12).events)
    events += [
        Event("instance 10", 0, 3, "run"),
        Event("instance 2", 1, 0, "run"),
        Event("launch", 1, 0, "start"),
    ]
    wanted = causal_order(events)
    for seed in range(20):
        # Each process's own events stay in order, as its file has them.
        lanes = {e.actor: [o for o in events if o.actor == e.actor] for e in events}
        generator, mixed = random.Random(seed), list[Event]()
        while lanes:
            lane = generator.choice(sorted(lanes))
            mixed.append(lanes[lane].pop(0))
            if not lanes[lane]:
                del lanes[lane]
        assert causal_order(mixed) == wanted
    assert [e.life for e in wanted] == sorted(e.life for e in wanted)


def test_the_first_event_that_differs_is_named_with_its_fields() -> None:
    ours = some_record()
    assert first_difference(ours, some_record()) is None
    changed = list(ours.events)
    changed[4] = Event("instance 1", 0, 1, "run", {"batch": 1, "inputs": {"x": "other"}})
    found = first_difference(ours, Record(HEADER, tuple(changed)))
    assert found is not None
    assert (found.number, found.fields) == (5, ("data.inputs.x",))
    assert "event 5 differs in data.inputs.x" in found.text
    assert 'inputs={"x": "other"}' in found.text
    shorter = first_difference(ours, Record(HEADER, ours.events[:-1]))
    assert shorter is not None
    assert shorter.theirs is None
    assert "B: (the record ends)" in shorter.text
    other = Record(LaunchHeader(HEADER.words, "away", ()), ours.events)
    assert header_differences(ours, other) == [
        "faults: ipu:0@batch=1:overflow / none",
        "directory: home / away",
    ]


def test_messages_lose_what_differs_from_launch_to_launch() -> None:
    text = "machine 1 at 127.0.0.1:45123 was lost; process 4711 of podrun-99 (generation 3) in batch 17"
    text += ", unreachable since 2026-11-23T04:27:51.642536+00:00"
    text += " (process 12), IPU-M [::1]:8081 (machine 1); it gave 10.0.0.1:77 on 2026-11-23T04:27:51Z"
    wanted = "machine 1 was lost; a process of podrun-PID (generation N) in batch 17"
    wanted += ", unreachable (a process), IPU-M (machine 1); it gave an address on a time"
    assert normalised(text) == wanted
    earlier = (
        "machine 1 at ADDRESS was lost; process PID of podrun-PID, IPU-M ADDRESS, unreachable since TIME"
    )
    assert normalised(earlier) == "machine 1 was lost; a process of podrun-PID, IPU-M, unreachable"


@given(st.integers(1, 24), st.data())
def test_the_smallest_failing_subset_is_found(count: int, data: st.DataObject) -> None:
    culprits = data.draw(st.sets(st.integers(0, count - 1), min_size=0, max_size=4))
    tried: list[tuple[int, ...]] = []

    def fails(chosen: Sequence[int]) -> bool:
        tried.append(tuple(chosen))
        return culprits <= set(chosen)

    assert smallest(range(count), fails) == sorted(culprits)
    assert len(tried) == len(set(tried))


def test_a_failure_that_needs_any_two_of_many_keeps_two() -> None:
    assert len(smallest(range(9), lambda chosen: len(chosen) >= 2)) == 2


def test_what_is_no_record_says_how_to_write_one(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\n")
    for path, said in (
        (tmp_path, "Is a directory"),
        (binary, "not UTF-8"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(RecordError, match=said) as caught:
            read_record(path)
        assert caught.value.hint == "podrun --record FILE ... writes one."
