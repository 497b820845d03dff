"""A terminal's other screen, on which each text takes the place of the one before, as of ``gc-monitor --watch``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from podrun.core.environment import environment

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"


def fills_a_screen(stream: TextIO) -> bool:
    """Whether a stream is a terminal whose cursor can be moved."""
    return stream.isatty() and environment().get("TERM", "dumb") != "dumb"


class FullScreen:
    """The other screen of a terminal, from `__enter__` to `__exit__`; what was on the terminal before is there again
    afterwards. A terminal that changes its size is drawn anew. ``foot``: what the last line says after the time;
    ``now``: seconds since 1970."""

    def __init__(
        self,
        stream: TextIO,
        foot: str = "Ctrl-C ends it",
        now: Callable[[], float] = time.time,
    ) -> None:
        self._stream, self._foot, self._now = stream, foot, now
        self._text = ""
        self._before: object = None

    def __enter__(self) -> FullScreen:
        """Change to the other screen."""
        self._write(_ENTER)
        self._before = signal.signal(signal.SIGWINCH, self._resized)
        return self

    def __exit__(self, *_: object) -> None:
        """Change back."""
        signal.signal(signal.SIGWINCH, self._before)  # type: ignore[arg-type]
        self._write(_LEAVE)

    def _resized(self, number: int, frame: FrameType | None) -> None:
        self.show(self._text)

    def show(self, text: str) -> None:
        """Show a text in place of the one before: as much of it as fits, and how much does not."""
        self._text = text
        columns, rows = os.get_terminal_size(self._stream.fileno())
        lines = text.splitlines()
        left = max(0, len(lines) - (rows - 1))
        clock = time.strftime("%H:%M:%S UTC", time.gmtime(self._now()))
        more = f" {left} more lines: podrun top." if left else ""
        foot = f"{clock}. {self._foot}.{more}"
        drawn = [line[:columns] + _REST_OF_LINE for line in [*lines[: rows - 1], foot]]
        self._write(_HOME + "\r\n".join(drawn) + _REST)

    def _write(self, text: str) -> None:
        """Write at once: the stream's own buffer cannot be used again by a signal that comes meanwhile."""
        os.write(self._stream.fileno(), text.encode())


def watch_devices(
    client: VipuClient, once: Callable[[VipuClient], None], say: Callable[[str], object]
) -> None:
    """Call ``once`` when devices are known and after each change, until Ctrl-C or until nobody reads. That there is no
    partition is said once."""
    from podrun.core.errors import NotFoundError
    from podrun.partition.commands.context import follow

    last = ""

    def once_more(client: VipuClient) -> None:
        nonlocal last
        try:
            once(client)
            last = ""
        except NotFoundError as error:  # There may be one later. A partition that goes brings many changes.
            if error.message != last:
                say(error.message)
            last = error.message

    follow(client, ("partition", "machine", "incident"), once_more)
