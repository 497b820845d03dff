"""Gangs on counted servers, as published simulations have them: no links, no queue, podrun's recovery left out.

For comparison with others' figures: `replay_gang` replays a log of faults (InfiniteHBD's), `ServerPool` follows the
conventions of AIReSim (arXiv 2603.07041): standbys, a working pool, a spare pool that is preempted, automatic and
manual repairs, bad servers that a repair may turn good. `podrun chaos` is the simulation of PODs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from podrun.core.quick_dataclass import dataclass
from podrun.simulate.streams import RandomStreams

DAY_H = 24.0


@dataclass(frozen=True, slots=True)
class ServerFault:
    """A fault of a server: from when to when it is down, in days."""

    server: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class GangShares:
    """Where a gang's time went, as shares, and how often it was ended."""

    useful: float
    lost: float
    restart: float
    waiting: float
    failures: int


def replay_gang(
    faults: Sequence[ServerFault],
    servers: int,
    gang: int,
    *,
    checkpoint_days: float,
    restart_days: float,
    days: float,
) -> GangShares:
    """A gang of servers through a log of faults. A fault of a member ends it: work since the last checkpoint is lost,
    the lowest server that works joins, a restart passes; without one the gang waits for the first repair. A fault in a
    restart begins it again. At the end whole intervals count."""
    down_until = [0.0] * servers
    members = set(range(gang))
    useful = lost = restart = waiting = 0.0
    failures, run_from, ready = 0, 0.0, 0.0

    def settle(until: float) -> None:
        nonlocal useful, lost
        length = max(0.0, until - run_from)
        whole = int(length / checkpoint_days + 1e-12) * checkpoint_days
        useful += whole
        lost += length - whole

    for fault in sorted(faults, key=lambda f: (f.begin, f.server)):
        down_until[fault.server] = max(down_until[fault.server], fault.end)
        if fault.server not in members:
            continue
        failures += 1
        now = fault.begin
        if now >= ready:
            settle(now)
        else:
            restart -= ready - max(now, ready - restart_days)
            waiting -= max(0.0, ready - restart_days - now)
        members.discard(fault.server)
        joins = _joining(members, down_until, now)
        begin = max(now, down_until[joins])
        members.add(joins)
        waiting += begin - now
        restart += restart_days
        ready = run_from = begin + restart_days
    if ready < days:
        settle(days)
    else:
        restart -= min(restart_days, ready - days)
    return GangShares(useful / days, lost / days, restart / days, waiting / days, failures)


def _joining(members: set[int], down_until: Sequence[float], now: float) -> int:
    """The lowest server that works and is no member; if none works, the one that is repaired first."""
    others = [server for server in range(len(down_until)) if server not in members]
    return min(others, key=lambda server: (max(down_until[server], now), server))


@dataclass(frozen=True, slots=True)
class PoolParameters:
    """AIReSim's defaults. Rates per server and day, times in minutes; of the repairs they are means."""

    servers: int = 4096
    work_days: float = 256.0
    rate: float = 0.01
    bad_share: float = 0.15
    bad_rate: float = 0.05
    standbys: int = 16
    pool: int = 4160
    spare_pool: int = 200
    recovery_min: float = 20.0
    selection_min: float = 3.0
    preemption_min: float = 20.0
    automatic_min: float = 120.0
    manual_min: float = 2880.0
    manual_share: float = 0.8
    automatic_fails: float = 0.4
    manual_fails: float = 0.2


@dataclass(frozen=True, slots=True)
class PoolOutcome:
    """What became of the job. ``etr``: work per wall time."""

    hours: float
    failures: int
    manual_repairs: int
    etr: float


class ServerPool:
    """One job on a pool of servers of which some are bad, by AIReSim's rules.

    A server that fails is repaired automatically, and then with probability ``manual_share`` by people; both times are
    exponential. If the last repair helps, a bad server turns good. Repaired servers fill up the standbys, else they
    wait in the pool. After each failure the job recovers, and a standby joins. Without a standby the hosts are selected
    anew, at random from the pool; a pool smaller than the job first takes servers from the spare pool, one after
    another, until the job *and all standbys* have one.
    """

    def __init__(self, parameters: PoolParameters, seed: int) -> None:
        self.p = p = parameters
        self._streams = RandomStreams(seed)
        self._failures = self._streams.of("pool", "failures")
        self._choices = self._streams.of("pool", "servers")
        self._repairs = self._streams.of("pool", "repairs")
        total = p.pool + p.spare_pool
        self._bad = [False] * total
        for server in self._streams.of("pool", "bad").permutation(total)[: int(p.bad_share * total)]:
            self._bad[int(server)] = True
        self._good_in: list[int] = []
        self._bad_in: list[int] = []
        self._standby: list[int] = []
        self._working = list(range(p.pool))
        self._spare = list(range(p.pool, total))
        self._back: list[tuple[float, int, bool]] = []
        self._now, self._manual = 0.0, 0

    def run(self) -> PoolOutcome:
        """Run the job to its end."""
        p, done, failures = self.p, 0.0, 0
        self._select_hosts()
        while True:
            rate = len(self._good_in) * p.rate + len(self._bad_in) * (p.rate + p.bad_rate)
            run = float(self._failures.exponential(1 / rate))
            if done + run >= p.work_days:
                self._now += p.work_days - done
                break
            done, failures = done + run, failures + 1
            self._pass(run)
            self._repair(self._struck(rate))
            self._pass(minutes_in_days(p.recovery_min))
            if self._standby:
                self._join(self._standby.pop(0))
            else:
                self._select_hosts()
        return PoolOutcome(self._now * DAY_H, failures, self._manual, p.work_days / self._now)

    def _struck(self, rate: float) -> int:
        p = self.p
        of_bad = len(self._bad_in) * (p.rate + p.bad_rate) / rate
        members = self._bad_in if float(self._choices.random()) < of_bad else self._good_in
        place = int(self._choices.integers(len(members)))
        members[place], members[-1] = members[-1], members[place]
        return members.pop()

    def _repair(self, server: int) -> None:
        """Send a server to the repairs; when it comes back, and whether good, is drawn."""
        p = self.p
        took = float(self._repairs.exponential(p.automatic_min))
        by_people = float(self._repairs.random()) < p.manual_share
        if by_people:
            self._manual += 1
            took += float(self._repairs.exponential(p.manual_min))
        mends = float(self._repairs.random()) >= (p.manual_fails if by_people else p.automatic_fails)
        heapq.heappush(self._back, (self._now + minutes_in_days(took), server, mends))

    def _pass(self, days: float) -> None:
        """Time passes, and repaired servers come back."""
        self._now += days
        while self._back and self._back[0][0] <= self._now:
            self._return_one()

    def _return_one(self) -> None:
        _, server, mends = heapq.heappop(self._back)
        self._bad[server] = self._bad[server] and not mends
        (self._standby if len(self._standby) < self.p.standbys else self._working).append(server)

    def _select_hosts(self) -> None:
        """Choose the job's servers and its standbys anew from all that work."""
        p = self.p
        if self._available() < p.servers:
            self._preempt()
        pool = [*self._good_in, *self._bad_in, *self._standby, *self._working]
        order = [pool[int(place)] for place in self._choices.permutation(len(pool))]
        self._good_in, self._bad_in = [], []
        for server in order[: p.servers]:
            self._join(server)
        self._standby = order[p.servers : p.servers + p.standbys]
        self._working = order[p.servers + p.standbys :]
        self._pass(minutes_in_days(p.selection_min))

    def _available(self) -> int:
        return len(self._good_in) + len(self._bad_in) + len(self._standby) + len(self._working)

    def _preempt(self) -> None:
        """Take servers from the spare pool, or wait for repairs, until the job and all standbys have one."""
        while self._available() < self.p.servers + self.p.standbys:
            if self._spare:
                self._pass(minutes_in_days(self.p.preemption_min))
                self._working.append(self._spare.pop(0))
            else:
                self._pass(max(0.0, self._back[0][0] - self._now))

    def _join(self, server: int) -> None:
        (self._bad_in if self._bad[server] else self._good_in).append(server)


def minutes_in_days(minutes: float) -> float:
    """Minutes as a text in days."""
    return minutes / 1440.0
