"""Patterns: the names of PopART's graph rewrites, their levels and their checks.

podrun computes the same numbers whichever are on, so they are accepted, checked and otherwise left alone.
Source of names, levels and errors: graphcore/popart, willow/src/patterns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from podrun.popart.values.enums import PatternsLevel
from podrun.popart.values.exceptions import popart_exception
from podrun.runtime.rewrites import MANDATORY, NAMES, OPT_IN, known_rewrite, similar_rewrite
from podrun.runtime.rewrites import register_rewrite as register_pattern

__all__ = ["Patterns", "register_pattern"]


def _of_level(level: PatternsLevel) -> set[str]:
    if level is PatternsLevel.All:
        return set(NAMES)
    if level is PatternsLevel.Default:
        return set(NAMES) - set(OPT_IN)
    return set(MANDATORY) if level is PatternsLevel.Minimal else set()


class Patterns:
    """Which rewrites are on: ``Patterns()``, ``Patterns(PatternsLevel.All)`` or ``Patterns(["PreUniRepl"])``.

    Every pattern is an attribute too (``patterns.InPlace = False``). popart_exception for unknown names,
    and for switching off a mandatory one unless ``enableRuntimeAsserts(False)`` came before.
    """

    def __init__(
        self,
        level: PatternsLevel | Iterable[str] | None = None,
        *,
        patterns: Iterable[str] | None = None,
    ) -> None:
        chosen = patterns if level is None else level
        object.__setattr__(self, "_asserts", True)
        if chosen is None or isinstance(chosen, PatternsLevel):
            enabled = _of_level(chosen or PatternsLevel.Default)
        else:
            enabled = set(MANDATORY)
            for name in chosen:
                enabled.add(_known(name))
        object.__setattr__(self, "_enabled", enabled)

    def enablePattern(self, name: str, enable: bool) -> Patterns:
        """Switch a pattern on or off."""
        _known(name)
        if not enable and name in MANDATORY and self._asserts:
            raise popart_exception(
                f"Pattern {name!r} is mandatory: PopART has no implementation of what it rewrites. To disable it all "
                "the same, call enableRuntimeAsserts(False) first."
            )
        if enable:
            self._enabled.add(name)
        else:
            self._enabled.discard(name)
        return self

    def enableRuntimeAsserts(self, enable: bool) -> Patterns:
        """Switch the check on mandatory patterns on or off."""
        object.__setattr__(self, "_asserts", enable)
        return self

    def isPatternEnabled(self, name: str) -> bool:
        """True iff the pattern is on."""
        return _known(name) in self._enabled

    def __getattr__(self, name: str) -> Any:
        if name in NAMES:
            return name in self._enabled
        raise AttributeError(f"Patterns has no attribute {name!r}.{_guess(name)}")

    def __setattr__(self, name: str, value: bool) -> None:
        if name not in NAMES:
            raise AttributeError(f"Patterns has no attribute {name!r}.{_guess(name)}")
        self.enablePattern(name, value)

    def __repr__(self) -> str:
        return "\n".join(name for name in NAMES if name in self._enabled)

    @staticmethod
    def create(strings: Iterable[str]) -> Patterns:
        """Patterns from a list of names."""
        return Patterns(strings)


def _known(name: str) -> str:
    known = known_rewrite(name)
    if known is not None:
        return known
    raise popart_exception(
        f"Invalid pattern name {name!r}.{_guess(name)}",
        hint="A rewrite that a compiled library of the program's own would bring is made known by "
        f"podrun.popart.register_pattern({name!r}), in a file that PODRUN_CUSTOM_OPS names.",
    )


def _guess(name: str) -> str:
    near = similar_rewrite(name)
    return "" if near is None else f" Did you mean {near!r}?"
