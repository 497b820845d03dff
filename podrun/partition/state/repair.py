"""The problems of a state file, and the part that a repair would keep: `vipu-server check` and `vipu-server repair`.

`diagnose_rows` is pure: from the rows of a file it makes the largest consistent part, older partitions first, and
says what it leaves out and why. `repair` writes that part into a new file; the old one stays beside it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from podrun.core.cluster import Allocation, Cluster
from podrun.core.errors import ConfigError, InternalError
from podrun.core.quick_dataclass import dataclass
from podrun.partition.state.accounts import account_of_row
from podrun.partition.state.allocator import Allocator, Plans
from podrun.partition.state.file_lock import StateFileLock, real_path
from podrun.partition.state.records import Lease, Partition
from podrun.partition.state.store import Store, fingerprint_of
from podrun.partition.state.stored_rows import SCHEMA_VERSION, StateRows, check_pod, other_schema, rows_of
from podrun.partition.state.stored_state import (
    PLAN_KINDS,
    StoredState,
    allocation_of,
    entry_of,
    partition_of,
    state_from_rows,
    stored_layout,
)
from podrun.partition.state.values import PartitionState


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


def diagnose_rows(cluster: Cluster, rows: StateRows) -> StateDiagnosis:
    """The problems of the rows, and their consistent part. Raises ConfigError for a file of another POD, which is no
    problem to repair.
    """
    if rows.pod is not None and isinstance(rows.pod["name"], str) and rows.pod["name"] != cluster.name:
        raise ConfigError(
            f"the file holds the state of {rows.pod['name']}, not of {cluster.name}",
            hint=f"Say so: --cluster {rows.pod['name']}",
        )
    try:
        state = state_from_rows(cluster, rows) if _fits(cluster, rows) else None
    except ValueError as error:
        whole, state = str(error), None
    else:
        whole = ""
    if state is not None:
        users: dict[str, str] = dict(rows.users)
        return StateDiagnosis((), replace(state, users=users), _lease(rows))
    diagnosis = _piece_by_piece(cluster, rows)
    if diagnosis.problems or not whole:
        return diagnosis
    return replace(diagnosis, problems=(Problem(whole, "what holds together is kept"),))


def _fits(cluster: Cluster, rows: StateRows) -> bool:
    """Whether the rows are of the POD's present description."""
    return rows.pod is not None and rows.pod.get("fingerprint", "") in ("", fingerprint_of(cluster))


def _lease(rows: StateRows) -> Lease:
    """The file's lease; none if its row is damaged, so that the file gets a new id."""
    try:
        check_pod(rows.pod or {})
    except ValueError:
        return Lease()
    pod = rows.pod or {}
    return Lease(pod.get("uid", ""), pod.get("epoch", 0))


def _piece_by_piece(cluster: Cluster, rows: StateRows) -> StateDiagnosis:
    problems = [Problem(what, "what could be read is kept") for what in rows.unreadable]
    if rows.pod is not None:
        try:
            check_pod(rows.pod)
        except ValueError as error:
            problems.append(Problem(str(error), "the file gets a new id, and takes no machines over"))
    if rows.pod is None:
        problems.append(Problem("it names no POD", f"it becomes a file of {cluster.name}"))
    elif rows.pod.get("fingerprint", "") not in ("", fingerprint_of(cluster)):
        what = f"it was written for another description of {cluster.name}"
        problems.append(Problem(what, "partitions that fit the present one are kept"))
    layout = _layout(cluster, rows, problems)
    pod_now = layout or cluster
    core = Allocator(pod_now, allocations=_allocations(pod_now, rows, problems))
    for agent in rows.lost:
        if isinstance(agent, str) and agent in pod_now.agents_by_id:
            core.lost.add(agent)
        else:
            problems.append(Problem(f"lost agent {agent} is unknown", "it is forgotten"))
    for partition in sorted(_readable(rows, problems), key=lambda p: (p.created, p.name)):
        _keep_partition(core, partition, problems)
    _keep_plans(core, rows, problems)
    allocations: tuple[Allocation, ...] | None = tuple(core.allocations.values())
    if rows.allocations is None and allocations == pod_now.allocations:
        allocations = None
    plans = Plans(
        tuple(core.maintenance.values()), tuple(core.queue.values()), tuple(core.reservations.values())
    )
    users = dict(_users(rows, problems))
    kept = StoredState(
        tuple(core.partitions.values()), allocations, frozenset(core.lost), plans, users, layout
    )
    return StateDiagnosis(tuple(problems), kept, _lease(rows))


def _users(rows: StateRows, problems: list[Problem]) -> Iterator[tuple[str, str]]:
    for name, data in rows.users:
        try:
            account_of_row(name, data)
        except ValueError as error:
            what = "it is left out; make it again: vipu-admin create user NAME"
            problems.append(Problem(f"user {name} cannot be read: {error}", what))
        else:
            yield name, data


def _layout(cluster: Cluster, rows: StateRows, problems: list[Problem]) -> Cluster | None:
    """The POD with its agents and clusters as they were changed; None if they are those of its description."""
    if rows.layout is None:
        return None
    try:
        return stored_layout(cluster, rows.layout)
    except ValueError as error:
        what = f"its agents and clusters, which were changed, cannot be read: {error}"
        problems.append(Problem(what, f"those of {cluster.name}'s description are taken"))
        return None


def _in_one(agents: tuple[str, ...], clusters: Mapping[str, Cluster]) -> bool:
    """Whether all agents are in one V-IPU cluster. ``clusters``: that of each agent."""
    return set(agents) <= clusters.keys() and len({clusters[agent].name for agent in agents}) == 1


def _allocations(cluster: Cluster, rows: StateRows, problems: list[Problem]) -> tuple[Allocation, ...]:
    clusters = cluster.clusters_by_agent
    if rows.allocations is None:
        return tuple(a for a in cluster.allocations if _in_one(a.agents, clusters))
    kept: list[Allocation] = []
    seen: set[str] = set()
    for name, agents in rows.allocations:
        try:
            listed = allocation_of(name, agents).agents
        except ValueError as error:
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
            yield partition_of(name, data)
        except ValueError as error:
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
    problems += [
        Problem(f"{kind} {name}: there are no plans of that kind", "it is left out")
        for kind, name, _ in rows.plans
        if kind not in order
    ]
    known = [row for row in rows.plans if row[0] in order]
    for kind, name, data in sorted(known, key=lambda row: (order.index(row[0]), str(row[1]))):
        try:
            entry = entry_of(dict(PLAN_KINDS)[kind], name, data)
        except ValueError as error:
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
    none, or it is of another schema."""
    if not path.exists():
        raise ConfigError(f"there is no state file {path}", hint="Name it: --state-file FILE")
    if not path.is_file():
        raise ConfigError(f"{path} is no file", hint="Name a state file: --state-file FILE")
    if path.stat().st_size == 0:
        return StateRows(None, unreadable=("the file is empty: what it held is lost, or it never was one",))
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        try:
            number = int(db.execute("PRAGMA user_version").fetchone()[0])
        except sqlite3.DatabaseError as error:
            return StateRows(None, unreadable=(f"PRAGMA: {error}",))
        if number == 0:
            return StateRows(None, unreadable=("it has no version: it is no state file",))
        if number != SCHEMA_VERSION:
            raise other_schema(path, number)
        return rows_of(db)


def repair(path: Path, cluster: Cluster, diagnosis: StateDiagnosis) -> Path:
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
            store.write(diagnosis.kept, cluster, diagnosis.lease)
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
