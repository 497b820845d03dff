"""The short form of faults, read into `FaultSpec` values:

    TARGET:WHERE@WHEN[,instruction=I][,for=B][,repeat=N[,every=M]]:KIND[,SETTING=VALUE...][:optional]

with WHEN one of ``batch=N``, ``batch=+N`` (from now on), ``time=S`` (modelled seconds), ``rate=P,seed=S`` (per batch)
and ``during=EVENT``. ``@step=N`` means ``@batch=N``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from urllib.parse import unquote

from podrun.core.errors import UsageError
from podrun.core.fault_effects import EFFECTS, kinds_of
from podrun.core.fault_kinds import DISTURBANCES, Setting, events_of, settings_of_kind, strikes_in_batches
from podrun.core.fault_spec import MOST_REPEATS, PAIRS, FaultSpec, FaultTarget, SettingValue

_FORM = re.compile(
    r"(?P<target>[a-z-]+):(?P<where>\d{1,9}(?:-\d{1,9})?|vipu)@(?P<when>[^:\s]{1,400})"
    r":(?P<how>[a-z0-9-]+(?:,[^:\s]{1,400})?)"
    r"(?P<optional>:optional)?(?::launch=(?P<launch>[0-9A-Za-z-]{1,80}))?",
    re.ASCII,
)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


def parse_fault(text: str) -> FaultSpec:
    """The fault that a short form describes. Raises UsageError that shows the form or lists the kinds."""
    match = _FORM.fullmatch(text.strip())
    if match is None or "=" not in match["when"]:
        raise UsageError(
            f"fault {text!r} is not of the form TARGET@batch=N:KIND, such as ipu:5@batch=17:tile-parity",
            hint=_kinds(),
        )
    kind, _, settings_text = match["how"].partition(",")
    settings = {name: unquote(value) for name, value in _pairs(text, settings_text).items()}
    when: dict[str, str] = _pairs(text, match["when"])
    return make_fault(
        text,
        match["target"],
        match["where"],
        when,
        kind,
        settings,
        optional=match["optional"] is not None,
        launch=match["launch"] or "",
    )


def make_fault(
    text: str,
    target: str,
    where: str,
    when: Mapping[str, str],
    kind: str,
    settings: Mapping[str, SettingValue],
    *,
    optional: bool = False,
    launch: str = "",
) -> FaultSpec:
    """A fault from its parts, which are checked here. ``text``: the fault in messages. Raises UsageError."""
    try:
        what = FaultTarget(target)
    except ValueError:
        names = [target.value for target in FaultTarget]
        raise UsageError(
            f"fault {text!r}: there is no target {target!r}; targets are {', '.join(names[:-1])} and {names[-1]}",
            hint=_kinds(),
        ) from None
    if (target, kind) not in EFFECTS and (target, kind) not in DISTURBANCES:
        raise UsageError(f"fault {text!r}: {_unknown_kind(what, kind)}", hint=_kinds())
    moment = _Moment(text, what, kind, when)
    return FaultSpec(
        target=what,
        indices=_indices(text, what, where),
        batch=moment.batch,
        kind=kind,
        instruction=moment.number("instruction"),
        optional=optional,
        launch=launch,
        settings=_settings(text, what, kind, settings),
        during=when.get("during", ""),
        seconds=moment.seconds,
        relative=when.get("batch", "").startswith("+"),
        rate=moment.rate,
        seed=moment.number("seed") or 0,
        repeat=moment.number("repeat") or 1,
        every=moment.number("every") or 0,
        lasts=moment.number("for") or 0,
    )


def parse_faults(text: str) -> tuple[FaultSpec, ...]:
    """Faults separated by semicolons or white space; empty for empty text."""
    return tuple(parse_fault(part) for part in re.split(r"[;\s]+", text) if part)


_WITH_WHEN = ("instruction", "for", "repeat", "every")
"""What may stand beside the moment at which a fault strikes."""


class _Moment:
    """Reads and checks the parts of WHEN."""

    def __init__(self, text: str, target: FaultTarget, kind: str, when: Mapping[str, str]) -> None:
        self._text = text
        self._when = when
        starts = [name for name in ("batch", "time", "rate", "during") if name in when]
        if len(starts) != 1:
            starts_text = " and ".join(starts) or "none"
            self._refuse(f"one of batch=, time=, rate= and during= says when it strikes, not {starts_text}")
        known = {starts[0], *_WITH_WHEN, *(["seed"] if starts == ["rate"] else [])}
        unknown = sorted(set(when) - known)
        if unknown:
            self._refuse(f"{unknown[0]}= is not understood with {starts[0]}=")
        self._check_event(target, kind, starts[0])
        disturbance = DISTURBANCES.get((target.value, kind))
        if "for" in when and not (disturbance is not None and disturbance.lasts):
            self._refuse(f"{kind} does not last, so that for= means nothing")
        if "every" in when and "repeat" not in when:
            self._refuse("every= needs repeat=: how often in all")
        if "every" in when and starts[0] != "batch":
            self._refuse(f"every= counts batches; it is not understood with {starts[0]}=")
        if (self.number("repeat") or 1) > MOST_REPEATS:
            self._refuse(f"repeat={MOST_REPEATS} is the most")

    def _check_event(self, target: FaultTarget, kind: str, start: str) -> None:
        events = events_of(target.value, kind)
        if start != "during" and not strikes_in_batches(target.value, kind):
            what = {
                "service": "faults of the service strike at a request",
                "disk": "faults of a disk strike at a write",
            }
            self._refuse(f"{what.get(target.value, f'{kind} strikes at an event')}: during={events[0]}")
        if start == "during":
            event = self._when["during"]
            if event not in events:
                self._refuse(f"there is no event {event!r}, only {', '.join(events)}")
            if "instruction" in self._when:
                self._refuse(f"during={event} is no batch and has no instruction")

    def number(self, name: str) -> int | None:
        """A whole number, if it is given."""
        text = self._when.get(name)
        if text is None:
            return None
        if not _NUMBER.fullmatch(text):
            self._refuse(f"{name}={text} is no whole number")
        if name in ("for", "repeat", "every") and int(text) == 0:
            self._refuse(f"{name}= is at least 1")
        return int(text)

    @property
    def batch(self) -> int:
        """The given batch; 0 if another key says when."""
        text = self._when.get("batch")
        if text is None:
            return 0
        digits = text.removeprefix("+")
        if not _NUMBER.fullmatch(digits):
            raise UsageError(
                f"fault {self._text!r} is not of the form TARGET@batch=N:KIND, such as ipu:5@batch=17:tile-parity",
                hint=_kinds(),
            )
        return int(digits)

    @property
    def seconds(self) -> float | None:
        """The modelled time of the strike, in seconds (``time=``); None where it is a batch or an event."""
        return self._fraction("time", 0.0, 1e9)

    @property
    def rate(self) -> float | None:
        """Probability per batch."""
        return self._fraction("rate", 1e-9, 1.0)

    def _fraction(self, name: str, least: float, most: float) -> float | None:
        text = self._when.get(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            self._refuse(f"{name}={text} is no number from {least:g} to {most:g}")
        return value

    def _refuse(self, why: str) -> None:
        raise UsageError(f"fault {self._text!r}: {why}", hint="podrun help reference/faults has the forms.")


def _pairs(text: str, settings_text: str) -> dict[str, str]:
    """``a=1,b=2`` as a mapping; ``step`` is ``batch``."""
    pairs: dict[str, str] = {}
    for part in settings_text.split(",") if settings_text else ():
        name, equals, value = part.partition("=")
        name = "batch" if name == "step" else name
        if not equals or not name or not value:
            raise UsageError(f"fault {text!r}: {part!r} is not of the form NAME=VALUE", hint=_kinds())
        if name in pairs:
            raise UsageError(f"fault {text!r}: {name} is given twice")
        pairs[name] = value
    return pairs


def _settings(
    text: str, target: FaultTarget, kind: str, pairs: Mapping[str, SettingValue]
) -> tuple[tuple[str, SettingValue], ...]:
    """The settings of a kind, checked, in the order of their names."""
    known = dict(settings_of_kind(target.value, kind))
    if target is FaultTarget.IPU and (target.value, kind) in EFFECTS:
        known["tile"] = Setting(int, 0, 0, 1471)
    settings: dict[str, SettingValue] = {}
    for name, value in sorted(pairs.items()):
        if name not in known:
            names = ", ".join(known) or "none"
            place = f"{name}= says when: it stands before the kind, as in @batch=3,{name}={value}:{kind}"
            raise UsageError(
                f"fault {text!r}: {kind} has no setting {name!r}; it has: {names}",
                hint=place if name in _WITH_WHEN else None,
            )
        settings[name] = _setting(text, name, known[name], value)
    missing = [name for name, setting in known.items() if setting.default is None and name not in settings]
    if missing:
        raise UsageError(f"fault {text!r}: {kind} needs {missing[0]}=", hint=f"As in {kind},{missing[0]}=...")
    return tuple(settings.items())


def _setting(text: str, name: str, setting: Setting, value: SettingValue) -> SettingValue:
    if setting.type is str:
        return str(value)
    try:
        number = setting.type(value)
    except ValueError:
        number = math.nan
    if not setting.least <= float(number) <= setting.most:
        raise UsageError(
            f"fault {text!r}: {name}={value} is no number from {setting.least:g} to {setting.most:g}"
        )
    return number


def _indices(text: str, target: FaultTarget, where: str) -> tuple[int, ...]:
    if target is FaultTarget.SERVICE:
        if where != "vipu":
            raise UsageError(f"fault {text!r}: the service is service:vipu")
        return ()
    first, _, second = where.partition("-")
    if target not in PAIRS:
        if second or not first.isdecimal():
            raise UsageError(
                f"fault {text!r}: {target.value} takes one index; only link takes two, as link:2-3"
            )
        return (int(first),)
    ends = {FaultTarget.LINK: "IPUs", FaultTarget.INSTANCE_NETWORK: "instances"}.get(target, "machines")
    if not second or int(second) == int(first):
        raise UsageError(
            f"fault {text!r}: {target.value} takes the two {ends} it joins, as {target.value}:2-3"
        )
    return (min(int(first), int(second)), max(int(first), int(second)))


def _unknown_kind(target: FaultTarget, kind: str) -> str:
    near = difflib.get_close_matches(kind, kinds_of(target.value), n=1)
    guess = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{target.value} has no fault {kind!r}{guess}"


def _kinds() -> str:
    return "podrun faults kinds lists targets and kinds; the form is TARGET:WHERE@batch=N:KIND."
