"""The problems of a state file, and the part that a repair would keep: `vipu-server check` and `vipu-server repair`.

`diagnose` is pure: from the rows of a file it makes the largest consistent part, older partitions first, and
says what it leaves out and why. `repair` writes that part into a new file; the old one stays beside it.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from podrun.core.cluster import Allocation, Cluster
from podrun.core.errors import ConfigError, InternalError, PodrunError
from podrun.vipu.allocator import Allocator, Plans
from podrun.vipu.events import Partition
from podrun.vipu.machine_pool import Lease
from podrun.vipu.state_lock import StateFileLock, real_path
from podrun.vipu.store import (
    PLAN_KINDS,
    SCHEMA_VERSION,
    Store,
    StoredState,
    entry_of,
    fingerprint_of,
    layout_of,
    partition_of,
)
from podrun.vipu.types import PartitionState

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class StateRows:
    """The content of a state file: the rows that could be read, and problems with the others. ``pod``: the row about
    the POD.
    """

    version: int
    pod: Mapping[str, Any] | None
    partitions: tuple[Row, ...] = ()
    allocations: tuple[Row, ...] | None = None
    lost: tuple[str, ...] = ()
    plans: tuple[Row, ...] = ()
    users: tuple[Row, ...] = ()
    layout: tuple[Row, ...] | None = None
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, and what a repair does about it."""

    what: str
    action: str


@dataclass(frozen=True, slots=True)
class StateDiagnosis:
    """All problems, and the state that a repair keeps."""

    problems: tuple[Problem, ...]
    kept: StoredState
    lease: Lease
    """The file's lease, so that machines that a server left still belong to it."""


# --- the pure part ----------------------------------------------------------------------------------------------


def diagnose(cluster: Cluster, rows: StateRows) -> StateDiagnosis:
    """The problems of the rows, and their consistent part. Raises ConfigError for a file of another POD or of a newer
    podrun, which are no problems to repair.
    """
    if rows.version > SCHEMA_VERSION:
        raise ConfigError(
            f"the file is of a newer podrun (schema {rows.version}; this one reads {SCHEMA_VERSION})",
            hint="Use that podrun, or name another file with --state-file.",
        )
    if rows.pod is not None and rows.pod["name"] != cluster.name:
        raise ConfigError(
            f"the file holds the state of {rows.pod['name']}, not of {cluster.name}",
            hint=f"Say so: --cluster {rows.pod['name']}",
        )
    problems = [Problem(what, "what could be read is kept") for what in rows.unreadable]
    if rows.pod is None:
        problems.append(Problem("it names no POD", f"it becomes a file of {cluster.name}"))
    elif rows.pod.get("fingerprint", "") not in ("", fingerprint_of(cluster)):
        what = f"it was written for another description of {cluster.name}"
        problems.append(Problem(what, "partitions that fit the present one are kept"))
    layout = _layout(cluster, rows, problems)
    pod_now = layout or cluster
    core = Allocator(pod_now, allocations=_allocations(pod_now, rows, problems))
    for agent in rows.lost:
        if agent in pod_now.agents_by_id:
            core.lost.add(agent)
        else:
            problems.append(Problem(f"lost agent {agent} is unknown", "it is forgotten"))
    for partition in sorted(_readable(rows, problems), key=lambda p: (p.created, p.name)):
        _keep_partition(core, partition, problems)
    _keep_plans(core, rows, problems)
    allocations = None if rows.allocations is None else tuple(core.allocations.values())
    plans = Plans(
        tuple(core.maintenance.values()), tuple(core.queue.values()), tuple(core.reservations.values())
    )
    users = {str(name): str(data) for name, data in rows.users}
    kept = StoredState(
        tuple(core.partitions.values()), allocations, frozenset(core.lost), plans, users, layout
    )
    pod = rows.pod or {}
    return StateDiagnosis(tuple(problems), kept, Lease(str(pod.get("uid", "")), int(pod.get("epoch", 0))))


def _layout(cluster: Cluster, rows: StateRows, problems: list[Problem]) -> Cluster | None:
    """The POD with its agents and clusters as they were changed; None if they are those of its description."""
    if rows.layout is None:
        return None
    try:
        return layout_of(cluster, rows.layout)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"its agents and clusters, which were changed, cannot be read: {error}"
        problems.append(Problem(what, f"those of {cluster.name}'s description are taken"))
        return None


def _allocations(cluster: Cluster, rows: StateRows, problems: list[Problem]) -> tuple[Allocation, ...]:
    clusters = cluster.clusters_by_agent
    if rows.allocations is None:
        return tuple(a for a in cluster.allocations if all(agent in clusters for agent in a.agents))
    kept: list[Allocation] = []
    seen: set[str] = set()
    for name, agents in rows.allocations:
        try:
            listed = tuple(str(agent) for agent in json.loads(agents))
        except (ValueError, TypeError) as error:
            problems.append(Problem(f"allocation {name} cannot be read: {error}", "it is left out"))
            continue
        inside = next((clusters[agent] for agent in listed if agent in clusters), None)
        good = tuple(a for a in listed if inside and clusters.get(a) is inside and a not in seen)
        if good != listed:
            bad = ", ".join(sorted(set(listed) - set(good)))
            problems.append(
                Problem(f"allocation {name} has agents that it cannot have: {bad}", "without these")
            )
        seen.update(good)
        if good:
            kept.append(Allocation(str(name), good))
    return tuple(kept)


def _readable(rows: StateRows, problems: list[Problem]) -> Iterator[Partition]:
    for name, data in rows.partitions:
        try:
            yield partition_of(str(name), json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError, PodrunError) as error:
            problems.append(Problem(f"partition {name} cannot be read: {error}", "it is left out"))


def _keep_partition(core: Allocator, partition: Partition, problems: list[Problem]) -> None:
    """Add a partition if everything still holds together; in state ERROR if only its state does not."""
    gone = {part.agent_id for part in partition.slices} & core.lost
    usable = partition.state not in (PartitionState.ERROR, PartitionState.REMOVING)
    if (gone and usable) or (partition.state is PartitionState.ERROR) != bool(partition.error):
        problems.append(
            Problem(
                f"partition {partition.name} is {partition.state.name} as it cannot be", "it is set to ERROR"
            )
        )
        error = partition.error or "its record was repaired. Reset it (vipu reset partition NAME)."
        partition = replace(
            partition, state=PartitionState.ERROR, error=error.replace("NAME", partition.name)
        )
    wrong = _wrong(core, partial(core.put_stored, partition))
    if wrong:
        core.put_back(partition.name)
        problems.append(Problem(f"partition {partition.name}: {wrong}", "it is left out"))


def _keep_plans(core: Allocator, rows: StateRows, problems: list[Problem]) -> None:
    order = (
        "reservations",
        "maintenance",
        "queue",
    )  # Queued requests name reservations, so reservations come first.
    for kind, name, data in sorted(rows.plans, key=lambda row: (order.index(row[0]), row[1])):
        try:
            entry = entry_of(dict(PLAN_KINDS)[kind], json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError, PodrunError) as error:
            problems.append(Problem(f"{kind} {name} cannot be read: {error}", "it is left out"))
            continue
        wrong = _wrong(core, partial(core.note, kind, name, entry))
        if wrong:
            core.note(kind, name, None)
            problems.append(Problem(f"{kind} {name}: {wrong}", "it is left out"))


def _wrong(core: Allocator, change: Callable[[], object]) -> str:
    """Make a change. Returns the invariant that it breaks, or an empty text."""
    try:
        change()
        core.validate_state()
    except InternalError as error:
        return error.message.removeprefix("the allocator's state does not hold together: ")
    except (KeyError, IndexError) as error:
        return f"it names {error}, which the POD does not have"
    return ""


# --- files ------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> StateRows:
    """The rows of a state file, as far as they can be read; the file is not changed. Raises ConfigError if there is
    none."""
    if not path.exists():
        raise ConfigError(f"there is no state file {path}", hint="Name it: --state-file FILE")
    if not path.is_file():
        raise ConfigError(f"{path} is no file", hint="Name a state file: --state-file FILE")
    unreadable: list[str] = []
    if path.stat().st_size == 0:
        return StateRows(
            0, None, unreadable=("the file is empty: what it held is lost, or it never was one",)
        )
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:

        def ask(statement: str) -> list[Row]:
            found: list[Row] = []
            try:
                found.extend(db.execute(statement))
            except sqlite3.DatabaseError as error:
                unreadable.append(
                    f"{statement.rsplit(' FROM ', maxsplit=1)[-1].split(maxsplit=1)[0]}: {error}"
                )
            return found

        version = ask("PRAGMA user_version")
        number = int(version[0][0]) if version else 0
        if not version or number == 0 or number > SCHEMA_VERSION:
            return StateRows(number, None, unreadable=tuple(unreadable) or _no_version(number))
        db.row_factory = sqlite3.Row
        pod = [dict(row) for row in ask("SELECT * FROM pod")]
        db.row_factory = None
        own = bool(pod and pod[0]["own_allocations"])
        return StateRows(
            number,
            pod[0] if pod else None,
            tuple(ask("SELECT name, data FROM partitions")),
            tuple(ask("SELECT name, agents FROM allocations ORDER BY position")) if own else None,
            tuple(str(row[0]) for row in ask("SELECT agent FROM lost")),
            tuple(ask("SELECT kind, name, data FROM plans")) if number > 3 else (),
            tuple(ask("SELECT name, data FROM users")) if number > 4 else (),
            _layout_rows(pod, ask) if number > 5 else None,
            tuple(unreadable),
        )


def _layout_rows(pod: list[dict[str, Any]], ask: Callable[[str], list[Row]]) -> tuple[Row, ...] | None:
    return tuple(ask("SELECT kind, position, data FROM layout")) if pod and pod[0]["own_layout"] else None


def _no_version(number: int) -> tuple[str, ...]:
    return () if number else ("it has no version: it is no state file",)


def repair(path: Path, cluster: Cluster, found: StateDiagnosis) -> Path:
    """Put the kept part into a new file in the place of the old one; returns the name under which the old one stays
    beside it. Raises ConflictError if a server uses the file.
    """
    lock, path = StateFileLock(path), real_path(path)
    try:
        lock.lock_content()
        fresh = path.with_name(f"{path.name}.repaired")
        fresh.unlink(missing_ok=True)
        store = Store(fresh, cluster.name)
        try:
            store.write(found.kept, cluster, found.lease)
        finally:
            store.close()
        number = 1
        while (backup := path.with_name(f"{path.name}.before-repair-{number}")).exists():
            number += 1
        for suffix in ("", "-wal", "-shm"):
            old = path.with_name(path.name + suffix)
            if old.exists():
                old.rename(backup.with_name(backup.name + suffix))
        fresh.rename(path)
        for rest in (f"{fresh.name}.lock", f"{fresh.name}-wal", f"{fresh.name}-shm"):
            path.with_name(rest).unlink(missing_ok=True)
    finally:
        lock.release()
    return backup
