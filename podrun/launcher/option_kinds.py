"""What an option of ``podrun`` is: its name and the kind of its value."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ValueKind(enum.Enum):
    """The kind of value that an option takes on the command line."""

    FLAG = "flag"
    """Nothing: ``--dry-run``. (``--dry-run=no`` is understood.)"""
    BOOLEAN = "boolean"
    """yes, no, on, off, 1, 0, true or false."""
    COUNT = "count"
    """A whole number, 1 or more."""
    INDEX = "index"
    """A whole number, 0 or more."""
    PORT = "port"
    """1 to 65535."""
    SECONDS = "seconds"
    """A positive number."""
    TEXT = "text"
    """Any text; may start with a dash (it holds other options)."""
    NAME = "name"
    """Text that does not start with a dash."""
    VERBOSITY = "verbosity"
    """Nothing; counts up."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``default`` is the value of an absent option; None: podrun decides at run time, as ``help`` says.

    ``repeatable`` options gather a tuple. ``choices`` lists the only values. ``config``: whether it may stand in a
    configuration file. ``ignored`` is the warning given once when the option is used: why it has no effect here.
    """

    name: str
    kind: ValueKind
    help: str
    default: object = None
    metavar: str = ""
    short: str = ""
    repeatable: bool = False
    choices: tuple[str, ...] = ()
    config: bool = True
    ignored: str = ""

    @property
    def takes_value(self) -> bool:
        """True iff the next word belongs to it."""
        return self.kind not in (ValueKind.FLAG, ValueKind.VERBOSITY)
