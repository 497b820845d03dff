"""A fault as data: what is hit, when, and how; and its short form

    TARGET:WHERE@WHEN[,instruction=I][,for=B][,repeat=N[,every=M]]:KIND[,SETTING=VALUE...][:optional]

with WHEN one of ``batch=N``, ``batch=+N`` (from now on), ``time=S`` (modelled seconds), ``rate=P,seed=S`` (per batch)
and ``during=EVENT``. ``@step=N`` means ``@batch=N``.
"""

from __future__ import annotations

import difflib
import enum
import math
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

from podrun.core.cluster import IPUS_PER_MACHINE, LinkTopology, ladder_links
from podrun.core.errors import ErrorCause, UsageError
from podrun.faults.effects import (
    DISTURBANCES,
    EFFECTS,
    PROGRAM_EVENTS,
    WHERE,
    Setting,
    events_of,
    kinds_of,
    settings_of,
    strikes_in_batches,
)

Value = int | float | str


class FaultTarget(enum.Enum):
    """What a fault hits."""

    IPU = "ipu"
    """One IPU, by its index in the partition."""
    LINK = "link"
    """The IPU-Link between two IPUs, by their indices in the partition."""
    GW_LINK = "gw-link"
    """The GW-Link between the gateways of two machines in different IPU-Link domains."""
    NETWORK = "network"
    """The network between the hosts' sides of two machines."""
    INSTANCE_NETWORK = "instance-network"
    """The network between the hosts' sides of two instances: between their machines in a batch, and between their
    processes in a collective."""
    MACHINE = "machine"
    """One IPU-M2000, by its index in the partition."""
    HOST = "host"
    """One host that machines of the partition run on, by its index in the order of machines."""
    INSTANCE = "instance"
    """One host process of the program, by its index."""
    DISK = "disk"
    """The disk of checkpoints as one instance sees it, by the instance's index."""
    SERVICE = "service"
    """The partition service, at a request."""


PAIRS = (FaultTarget.LINK, FaultTarget.GW_LINK, FaultTarget.NETWORK, FaultTarget.INSTANCE_NETWORK)
OF_INSTANCES = (FaultTarget.INSTANCE, FaultTarget.INSTANCE_NETWORK)
"""Targets on the machines that serve instances, which are known when a program is loaded."""
PACKET_BYTES = 1448
"""Bytes that a packet carries."""
SENT_AGAIN_AFTER_S = 0.2
"""Seconds until a lost packet is sent again: the shortest wait of TCP on Linux."""
MOST_REPEATS = 1_000_000


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """One planned fault. It strikes ``repeat`` times.

    ``indices``: one IPU, machine or instance, or the two ends of a link, lower first; empty for the service. ``batch``:
    the number of batches that the program has completed since it was loaded when the fault strikes (0: during the
    first batch); ``relative``: from the moment it is planned. ``instruction``: the index, within that batch's part of
    the IPU's instruction list, of the instruction before which the fault strikes (None: the first). ``kind``: a key of
    `EFFECTS` or `DISTURBANCES`. ``optional``: the launch may succeed without the fault. ``launch``: the launch whose
    programs the fault may hit; empty: the next job that attaches. ``settings``: of the kind. ``during``: an event
    instead of a batch. ``seconds``: modelled time since the program was loaded, instead of a batch. ``rate`` and
    ``seed``: probability per batch; the batch is drawn from them. ``every``: batches from one strike to the next
    (0: at the same batch of the program that is loaded next). ``lasts``: batches (0: until the program is
    loaded again).
    """

    target: FaultTarget
    indices: tuple[int, ...]
    batch: int
    kind: str
    instruction: int | None = None
    optional: bool = False
    launch: str = ""
    settings: tuple[tuple[str, Value], ...] = ()
    during: str = ""
    seconds: float | None = None
    relative: bool = False
    rate: float | None = None
    seed: int = 0
    repeat: int = 1
    every: int = 0
    lasts: int = 0

    def setting(self, name: str, default: Value | None) -> Value | None:
        """A setting as it was given, else its kind's default, else ``default``."""
        given = dict(self.settings).get(name)
        if given is None:
            known = settings_of(self.target.value, self.kind).get(name)
            given = known.default if known is not None else None
        return default if given is None else given

    def number(self, name: str) -> float:
        """A setting that is a number."""
        return float(self.setting(name, 0.0) or 0.0)

    def delay(self, nbytes: int) -> float:
        """Seconds by which a network delays an exchange of so many bytes. A network that loses packets: until less than
        half a packet is still missing, on average.
        """
        if self.kind == "delayed":
            return self.number("seconds")
        loss, packets = self.number("loss"), max(-(-nbytes // PACKET_BYTES), 1)
        if self.kind != "lossy" or 2 * packets * loss < 1:
            return 0.0
        return SENT_AGAIN_AFTER_S * max(math.ceil(math.log(2 * packets) / -math.log(loss)) - 1, 1)

    @property
    def raises(self) -> bool:
        """True iff the fault raises an error by itself."""
        return (self.target.value, self.kind) in EFFECTS

    @property
    def in_program(self) -> bool:
        """True iff the fault strikes in the process of an instance, not on a machine."""
        return self.during in PROGRAM_EVENTS

    def moment(self, strikes: int) -> int:
        """The batch in which the fault strikes after ``strikes`` strikes."""
        if self.rate is not None:
            return drawn_batch(self.rate, f"{self.seed} {self.place} {self.kind}", strikes)
        return self.batch + strikes * self.every

    @property
    def experiment(self) -> FaultSpec:
        """The part of a fault that stays the same while it strikes again and again."""
        return replace(self, repeat=1, every=0, batch=0 if self.every else self.batch, relative=False)

    @property
    def place(self) -> str:
        """The target and its indices, as in the short form."""
        where = "-".join(map(str, self.indices)) or WHERE[self.target.value]
        return f"{self.target.value}:{where}"

    @property
    def text(self) -> str:
        """The fault as users write it, without the launch."""
        if self.during:
            when = [f"during={self.during}"]
        elif self.seconds is not None:
            when = [f"time={self.seconds!r}"]
        elif self.rate is not None:
            when = [f"rate={self.rate!r}", f"seed={self.seed}"]
        else:
            when = [f"batch={'+' if self.relative else ''}{self.batch}"]
        if self.instruction is not None:
            when.append(f"instruction={self.instruction}")
        for name, number, usual in (
            ("for", self.lasts, 0),
            ("repeat", self.repeat, 1),
            ("every", self.every, 0),
        ):
            if number != usual:
                when.append(f"{name}={number}")
        how = [self.kind, *(f"{name}={_quoted(value)}" for name, value in self.settings)]
        return f"{self.place}@{','.join(when)}:{','.join(how)}{':optional' if self.optional else ''}"

    def __str__(self) -> str:
        """The fault in the form that processes exchange: `parse_fault` returns an equal value."""
        return self.text + (f":launch={self.launch}" if self.launch else "")


def drawn_batch(rate: float, key: str, strikes: int) -> int:
    """The batch of a fault that strikes in each batch with probability ``rate``, the same for the same key."""
    source, batch = random.Random(f"podrun {key}"), -1
    for _ in range(strikes + 1):
        batch += 1 if rate >= 1 else 1 + int(math.log(1.0 - source.random()) / math.log(1.0 - rate))
    return batch


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
    kind, _, given = match["how"].partition(",")
    settings = {name: unquote(value) for name, value in _pairs(text, given).items()}
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
    settings: Mapping[str, Value],
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


def is_strike_of(spec: FaultSpec, cause: ErrorCause) -> bool:
    """True iff an error's cause is a strike of this fault, in whichever launch and however often it strikes."""
    if not cause.fault:
        return False
    try:
        struck = parse_fault(cause.fault)
    except UsageError:  # The cause came from another process, which may run another release.
        return False
    return replace(struck, launch="").experiment == replace(spec, launch="").experiment


def validate(
    specs: Iterable[FaultSpec],
    *,
    ipus: int,
    links: Iterable[tuple[int, int]] | None = None,
    ilds: int = 1,
    instances: int | None = None,
) -> None:
    """Raise UsageError for a fault that cannot happen on a partition of ``ipus`` IPUs on ``ilds`` IPU-Link domains.

    ``links``: pairs of IPUs joined by IPU-Links, in partition indices (None: those of a torus). ``instances``: number
    of instances of the program (None: unknown).
    """
    machines = -(-ipus // IPUS_PER_MACHINE)
    joined = set(ladder_links(ipus, LinkTopology.TORUS) if links is None else links)
    counts = {"ipu": ipus, "link": ipus, "machine": machines, "gw-link": machines, "network": machines}
    of_launch = ("instance", "disk", "instance-network")
    counts |= {} if instances is None else dict.fromkeys(of_launch, instances)
    nouns = {"link": "IPU", "ipu": "IPU"} | dict.fromkeys(of_launch, "instance")
    for spec in specs:
        count, noun = counts.get(spec.target.value), nouns.get(spec.target.value, "machine")
        for index in spec.indices:
            if count is not None and index >= count:
                whose = "launch" if noun == "instance" else "partition"
                raise UsageError(
                    f"fault {spec.text}: the {whose} has no {noun} {index}, only 0 to {count - 1}",
                    hint=f"Indices count from 0 within the {whose}.",
                )
        if spec.target is FaultTarget.LINK and spec.indices not in joined:
            lower = spec.indices[0]
            peers = sorted({a + b - lower for a, b in joined if lower in (a, b)})
            raise UsageError(
                f"fault {spec.text}: no IPU-Link joins IPUs {lower} and {spec.indices[1]}",
                hint=f"IPU {lower} has links to: {', '.join(map(str, peers)) or 'no IPU of this partition'}.",
            )
        if spec.target is FaultTarget.GW_LINK:
            a, b = (machine * ilds // machines for machine in spec.indices)
            if a == b:
                raise UsageError(
                    f"fault {spec.text}: machines {spec.indices[0]} and {spec.indices[1]} are in one IPU-Link domain",
                    hint="GW-Links join IPU-Link domains; within one, name an IPU-Link: link:2-3.",
                )


def partition_links(ipus: int, ilds: int, topology: LinkTopology) -> list[tuple[int, int]]:
    """Pairs of IPUs that IPU-Links join in a partition whose IPUs lie on ``ilds`` IPU-Link domains."""
    share = ipus // ilds
    return [link for domain in range(ilds) for link in ladder_links(share, topology, domain * share)]


class _Moment:
    """Reads and checks the parts of WHEN."""

    def __init__(self, text: str, target: FaultTarget, kind: str, when: Mapping[str, str]) -> None:
        self._text = text
        self._when = when
        starts = [name for name in ("batch", "time", "rate", "during") if name in when]
        if len(starts) != 1:
            found = " and ".join(starts) or "none"
            self._refuse(f"one of batch=, time=, rate= and during= says when it strikes, not {found}")
        known = {
            starts[0],
            "instruction",
            "for",
            "repeat",
            "every",
            *(["seed"] if starts == ["rate"] else []),
        }
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
        """Modelled time."""
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


def _pairs(text: str, given: str) -> dict[str, str]:
    """``a=1,b=2`` as a mapping; ``step`` is ``batch``."""
    found: dict[str, str] = {}
    for part in given.split(",") if given else ():
        name, equals, value = part.partition("=")
        name = "batch" if name == "step" else name
        if not equals or not name or not value:
            raise UsageError(f"fault {text!r}: {part!r} is not of the form NAME=VALUE", hint=_kinds())
        if name in found:
            raise UsageError(f"fault {text!r}: {name} is given twice")
        found[name] = value
    return found


def _settings(
    text: str, target: FaultTarget, kind: str, given: Mapping[str, Value]
) -> tuple[tuple[str, Value], ...]:
    """The settings of a kind, checked, in the order of their names."""
    known = dict(settings_of(target.value, kind))
    if target is FaultTarget.IPU and (target.value, kind) in EFFECTS:
        known["tile"] = Setting(int, 0, 0, 1471)
    found: dict[str, Value] = {}
    for name, value in sorted(given.items()):
        if name not in known:
            names = ", ".join(known) or "none"
            raise UsageError(f"fault {text!r}: {kind} has no setting {name!r}; it has: {names}")
        found[name] = _setting(text, name, known[name], value)
    missing = [name for name, setting in known.items() if setting.default is None and name not in found]
    if missing:
        raise UsageError(f"fault {text!r}: {kind} needs {missing[0]}=", hint=f"As in {kind},{missing[0]}=...")
    return tuple(found.items())


def _setting(text: str, name: str, setting: Setting, value: Value) -> Value:
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


def _quoted(value: Value) -> str:
    return quote(value, safe="/._-") if isinstance(value, str) else repr(value)


def _kinds() -> str:
    return "podrun faults kinds lists targets and kinds; the form is TARGET:WHERE@batch=N:KIND."
