"""Tags, whole lines, and the traceback that comes last."""

from __future__ import annotations

import traceback
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from podrun.launcher.output import HOLD_SECONDS, LineAssembler, OutputChannel, OutputMixer, last_traceback

OUT, ERR = OutputChannel.STDOUT, OutputChannel.STDERR


class Screen:
    def __init__(self) -> None:
        self.writes: list[tuple[OutputChannel, bytes]] = []

    def __call__(self, channel: OutputChannel, data: bytes) -> None:
        self.writes.append((channel, data))

    @property
    def text(self) -> str:
        return b"".join(data for _, data in self.writes).decode()


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"d\n\n", b"\r\n"]), max_size=30))
def test_lines_do_not_depend_on_how_they_arrive(chunks: list[bytes]) -> None:
    piecewise = LineAssembler()
    lines = [line for chunk in chunks for line in piecewise.feed(chunk)] + piecewise.finish()
    whole = b"".join(chunks).replace(b"\r\n", b"\n")
    expected = whole.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert lines == [line.rsplit(b"\r", 1)[-1] for line in expected]


def test_progress_bars_show_their_last_state_and_long_lines_come_in_pieces() -> None:
    assert LineAssembler().feed(b"10%\r50%\r100%\n") == [b"100%"]
    assert LineAssembler(4).feed(b"abcdefghij\n") == [b"abcdefghij"]
    pieces = LineAssembler(4)
    assert pieces.feed(b"abcdefghij") == [b"abcd", b"efgh"]
    assert pieces.finish() == [b"ij"]


def test_tags_and_whole_lines() -> None:
    screen = Screen()
    mixer = OutputMixer(2, screen)
    mixer.feed(0, OUT, b"hel")
    mixer.feed(1, ERR, b"oops\n")
    mixer.feed(0, OUT, b"lo\nno end")
    mixer.finish(0)
    assert screen.text == "[1,1]<stderr>:oops\n[1,0]<stdout>:hello\n[1,0]<stdout>:no end\n"
    assert [channel for channel, _ in screen.writes] == [ERR, OUT, OUT]


def test_only_one_instance_is_shown_but_a_failing_one_still_is() -> None:
    screen = Screen()
    mixer = OutputMixer(2, screen, only=0)
    mixer.feed(1, OUT, b"hidden\n")
    mixer.feed(1, ERR, b"Traceback (most recent call last):\n  File\nValueError: x\n")
    mixer.feed(0, OUT, b"shown\n")
    assert screen.text == "[1,0]<stdout>:shown\n"
    assert mixer.show_failure(1)
    assert screen.text.endswith("[1,1]<stderr>:ValueError: x\n")


TRACE = b"Traceback (most recent call last):\nValueError: x\n"
TAGGED = "[1,1]<stderr>:Traceback (most recent call last):\n[1,1]<stderr>:ValueError: x\n"


def test_the_traceback_that_decides_comes_once_and_last() -> None:
    screen = Screen()
    mixer = OutputMixer(2, screen)
    mixer.feed(1, ERR, b"before\n" + TRACE)
    mixer.feed(0, OUT, b"meanwhile\n")
    mixer.keep(1)
    mixer.release_all(but=1)
    assert mixer.show_failure(1)
    assert screen.text == "[1,1]<stderr>:before\n[1,0]<stdout>:meanwhile\n" + TAGGED
    assert mixer.show_failure(1)
    assert screen.text.count("ValueError") == 1
    mixer.feed(0, OUT, b"later\n")
    assert mixer.show_failure(1)
    assert screen.text.endswith("later\n"), "it stands where it was shown"
    assert screen.text.count("ValueError") == 1
    assert not mixer.show_failure(0)


def test_a_traceback_of_an_instance_that_goes_on_is_written_soon() -> None:
    now = [0.0]
    screen = Screen()
    mixer = OutputMixer(2, screen, clock=lambda: now[0])
    mixer.feed(1, ERR, TRACE)
    mixer.release_due()
    assert screen.text == ""
    assert mixer.holding
    now[0] = HOLD_SECONDS
    mixer.release_due()
    assert screen.text == TAGGED
    assert not mixer.holding
    mixer.feed(1, ERR, TRACE)
    mixer.keep(1)
    now[0] = 100.0
    mixer.release_due()
    assert screen.text == TAGGED
    mixer.close()
    assert screen.text == TAGGED * 2


def test_what_several_instances_say_in_the_same_words_is_told_once() -> None:
    screen = Screen()
    mixer = OutputMixer(3, screen)
    for instance in range(3):
        mixer.feed(instance, ERR, TRACE)
    mixer.keep(1)
    mixer.release_all(but=1)
    assert mixer.show_failure(1)
    same = "ValueError: x (the same as of instance 1)\n"
    assert screen.text == f"[1,0]<stderr>:{same}[1,2]<stderr>:{same}{TAGGED}"


def test_an_error_of_an_earlier_attempt_is_told_in_one_line() -> None:
    screen = Screen()
    mixer = OutputMixer(1, screen)
    mixer.feed(0, ERR, TRACE)
    mixer.keep(0)
    mixer.begin_attempt()
    first = screen.text
    assert first.count("Traceback") == 1
    for _ in range(2):
        mixer.feed(0, ERR, TRACE)
        mixer.keep(0)
        assert mixer.show_failure(0)
        mixer.begin_attempt()
    again = "[1,0]<stderr>:ValueError: x (the same error as before)\n"
    assert screen.text == first + again * 2
    mixer.feed(0, ERR, TRACE.replace(b"ValueError", b"KeyError"))
    mixer.keep(0)
    assert mixer.show_failure(0)
    assert screen.text.count("Traceback") == 2


def test_an_attempt_that_says_nothing_does_not_repeat_what_the_last_one_said() -> None:
    screen = Screen()
    mixer = OutputMixer(1, screen)
    mixer.feed(0, ERR, TRACE)
    mixer.begin_attempt()
    assert not mixer.explains_itself(0)
    assert not mixer.show_failure(0)


def test_what_was_shown_before_an_instance_failed_is_not_said_again_by_another() -> None:
    now = [0.0]
    screen = Screen()
    mixer = OutputMixer(2, screen, clock=lambda: now[0])
    mixer.feed(1, ERR, TRACE)
    now[0] = HOLD_SECONDS
    mixer.release_due()
    mixer.feed(0, ERR, TRACE)
    mixer.keep(0)
    mixer.release_all(but=0)
    assert mixer.show_failure(0)
    assert screen.text == TAGGED + "[1,0]<stderr>:ValueError: x (the same as of instance 1)\n"


def test_a_syntax_error_comes_last_too() -> None:
    screen = Screen()
    mixer = OutputMixer(2, screen)
    mixer.feed(1, ERR, b'  File "train.py", line 1\n    x = (\n        ^\nSyntaxError: never closed\n')
    mixer.feed(0, OUT, b"meanwhile\n")
    mixer.keep(1)
    mixer.release_all(but=1)
    assert mixer.show_failure(1)
    assert screen.text.endswith("[1,1]<stderr>:SyntaxError: never closed\n")
    assert screen.text.startswith("[1,0]<stdout>:meanwhile\n")


def test_an_endless_traceback_is_not_held_for_ever() -> None:
    screen = Screen()
    mixer = OutputMixer(1, screen)
    mixer.feed(0, ERR, TRACE)
    mixer.feed(0, ERR, b"more\n" * 500)
    assert screen.text.count("more") == 500


def test_chained_tracebacks_belong_together() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError:
        text = traceback.format_exc()
    lines = ["warning", "Traceback (most recent call last):", "Handled: earlier", "more", *text.splitlines()]
    kept = last_traceback([line.encode() for line in lines])
    assert [line.decode() for line in kept] == text.splitlines()
    assert last_traceback([b"no", b"trace"]) == []


def test_copies_in_files(tmp_path: Path) -> None:
    mixer = OutputMixer(12, Screen(), directory=tmp_path / "out")
    mixer.feed(3, OUT, b"10%\r20%\nx")
    mixer.feed(11, ERR, b"e\n")
    mixer.close()
    assert (tmp_path / "out/1/rank.03/stdout").read_bytes() == b"10%\r20%\nx"
    assert (tmp_path / "out/1/rank.11/stderr").read_bytes() == b"e\n"
    assert (tmp_path / "out/1/rank.00/stdout").read_bytes() == b""


def test_a_copy_that_cannot_be_written_is_given_up_and_the_rest_goes_on(tmp_path: Path) -> None:
    screen = Screen()
    folder = tmp_path / "1" / "rank.0"
    folder.mkdir(parents=True)
    (folder / "stdout").symlink_to("/dev/full")
    mixer = OutputMixer(1, screen, directory=tmp_path)
    mixer.feed(0, OUT, b"one\n")
    mixer.feed(0, OUT, b"two\n")
    mixer.feed(0, ERR, b"three\n")
    mixer.close()
    assert screen.text.count("is not complete: No space left on device") == 1
    assert "<stdout>:one" in screen.text
    assert "<stdout>:two" in screen.text
    assert (folder / "stderr").read_bytes() == b"three\n"
