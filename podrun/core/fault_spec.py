"""A fault as data: what is hit, when, and how. `podrun.core.fault_forms` reads the texts that it writes."""

from __future__ import annotations

import enum
import math
import random
from dataclasses import replace
from urllib.parse import quote

from podrun.core.fault_kinds import DISTURBANCES, PROGRAM_EVENTS, WHERE, settings_of_kind
from podrun.core.quick_dataclass import dataclass

SettingValue = int | float | str


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
    the number of batches that the program has completed since it was loaded when the fault strikes (0: during the first
    batch); ``relative``: from the moment it is planned. ``instruction``: the index, within that batch's part of the
    IPU's instruction list, of the instruction before which the fault strikes (None: the first). ``kind``: a key of
    `EFFECTS` or `DISTURBANCES`. ``optional``: the launch may succeed without the fault. ``launch``: the launch whose
    programs the fault may hit; empty: the next job that attaches. ``settings``: of the kind. ``during``: an event
    instead of a batch. ``seconds``: modelled time since the program was loaded, instead of a batch. ``rate`` and
    ``seed``: probability per batch; the batch is drawn from them. ``every``: batches from one strike to the next (0: at
    the same batch of the program that is loaded next). ``lasts``: batches (0: until the program is loaded again).
    """

    target: FaultTarget
    indices: tuple[int, ...]
    batch: int
    kind: str
    instruction: int | None = None
    optional: bool = False
    launch: str = ""
    settings: tuple[tuple[str, SettingValue], ...] = ()
    during: str = ""
    seconds: float | None = None
    relative: bool = False
    rate: float | None = None
    seed: int = 0
    repeat: int = 1
    every: int = 0
    lasts: int = 0

    def setting(self, name: str, default: SettingValue | None) -> SettingValue | None:
        """A setting as it was given, else its kind's default, else ``default``."""
        value = dict(self.settings).get(name)
        if value is None:
            known = settings_of_kind(self.target.value, self.kind).get(name)
            value = known.default if known is not None else None
        return default if value is None else value

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
        return (self.target.value, self.kind) not in DISTURBANCES

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

    def is_same_fault(self, other: FaultSpec) -> bool:
        """True iff both are one fault, in whichever launch and however often it strikes."""
        return replace(self, launch="").experiment == replace(other, launch="").experiment

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


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that struck, its job (a launch or a process), the batch, and seconds since 1970. Of a fault of the
    partition service: no batch, and the partition whose request it struck.
    """

    fault: FaultSpec
    job: str
    batch: int | None
    time_s: float
    partition: str = ""


def drawn_batch(rate: float, key: str, strikes: int) -> int:
    """The batch of a fault that strikes in each batch with probability ``rate``, the same for the same key."""
    source, batch = random.Random(f"podrun {key}"), -1
    for _ in range(strikes + 1):
        batch += 1 if rate >= 1 else 1 + int(math.log(1.0 - source.random()) / math.log(1.0 - rate))
    return batch


def _quoted(value: SettingValue) -> str:
    return quote(value, safe="/._-") if isinstance(value, str) else repr(value)
