"""What the V-IPU service keeps across restarts, in SQLite: partitions, allocations, lost agents, plans, users, and the
agents and clusters of the POD once they were changed.

A change of state is one transaction, committed before the change takes effect anywhere. A state file has one owner at a
time and belongs to one POD as its description was when the file was made. Content that cannot be read, or is not
consistent, is refused; nothing is emptied or repaired silently.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from podrun.core.cluster import (
    Cluster,
)
from podrun.core.environment import XDG_STATE_HOME, environment
from podrun.core.errors import ConfigError, ConflictError, ServiceError
from podrun.partition.state.events import StateChange
from podrun.partition.state.file_lock import StateFileLock, real_path
from podrun.partition.state.records import Lease
from podrun.partition.state.stored_rows import SCHEMA_VERSION, other_schema, plain_row, rows_of
from podrun.partition.state.stored_state import PLAN_KINDS, StoredState, layout_rows, state_from_rows

_PLANS = "CREATE TABLE plans (kind TEXT NOT NULL, name TEXT NOT NULL, data TEXT NOT NULL, PRIMARY KEY (kind, name))"
_USERS = "CREATE TABLE users (name TEXT PRIMARY KEY, data TEXT NOT NULL)"
_LAYOUT = (
    "CREATE TABLE layout (kind TEXT NOT NULL, position INTEGER NOT NULL, data TEXT NOT NULL, "
    "PRIMARY KEY (kind, position))"
)

_TABLES = """
CREATE TABLE pod (name TEXT NOT NULL, own_allocations INTEGER NOT NULL DEFAULT 0,
                  fingerprint TEXT NOT NULL DEFAULT '', uid TEXT NOT NULL DEFAULT '',
                  epoch INTEGER NOT NULL DEFAULT 0, own_layout INTEGER NOT NULL DEFAULT 0);
CREATE TABLE partitions (name TEXT PRIMARY KEY, data TEXT NOT NULL);
CREATE TABLE allocations (position INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, agents TEXT NOT NULL);
CREATE TABLE lost (agent TEXT PRIMARY KEY);
"""


class Superseded(ConflictError):
    """Another server has taken the state over; this one must not change it any more."""


class Store:
    """An open store. ``path`` None keeps everything in memory: for a service that lives only as long as its process.

    Raises ConflictError if another process uses the file, ConfigError if it cannot be used.
    """

    def __init__(self, path: Path | None, cluster: str) -> None:
        self.path, self._cluster = path, cluster
        self._guard = threading.Lock()
        self._owner: StateFileLock | None = None
        self._lease = Lease()
        try:
            if path is not None:
                real_path(path).parent.mkdir(parents=True, exist_ok=True)
                self._owner, real = StateFileLock(path), real_path(path)
                _create(real, cluster)
                self._owner.lock_content()
            # Statements run from several threads, one at a time: `_guard`.
            self._db = sqlite3.connect(
                real if path else ":memory:", check_same_thread=False, isolation_level=None
            )
            try:
                self._open(cluster)
            except BaseException:
                self._db.close()
                raise
        except BaseException as error:
            self._release_owner()
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
                raise self._damaged(str(error)) from error
            if isinstance(error, OSError | sqlite3.OperationalError):
                raise ConfigError(
                    f"partitions cannot be kept in {path}: {getattr(error, 'strerror', None) or error}",
                    hint="Name another file with --state-file, or keep nothing: vipu-server --no-state",
                ) from error
            raise

    def _open(self, cluster: str) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise other_schema(self.path, version)
        if version == 0:
            if self.path is not None:
                raise self._damaged("it has no version")
            _make_tables(self._db, cluster)
        row = self._db.execute("SELECT name FROM pod").fetchone()
        if row is None:
            raise self._damaged("it names no POD")
        if not isinstance(row[0], str):
            raise self._damaged("pod: name is no text")
        if row[0] != cluster:
            raise ConfigError(
                f"{self.path} holds the state of {row[0]}, not of {cluster}",
                hint=f"Start it as `vipu-server --cluster {row[0]}`, or name another file with --state-file.",
            )
        # From here on the file is ours to change.
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")

    def close(self) -> None:
        """Close the file and give it up. Idempotent."""
        self._db.close()
        self._release_owner()

    def load(self, cluster: Cluster) -> StoredState:
        """All that is stored; ``cluster``: the POD as it is described. Raises ConfigError for another description of
        the POD, for what cannot be read, and for a state that does not hold together."""
        with self._guard:
            rows = rows_of(self._db)
        fingerprint = (rows.pod or {}).get("fingerprint")
        if isinstance(fingerprint, str) and fingerprint not in ("", fingerprint_of(cluster)):
            raise ConfigError(
                f"{self.path} was written for another description of {cluster.name}: its agents or links changed",
                hint="Start the server with the description it had, or name another file with --state-file.",
            )
        try:
            state = state_from_rows(cluster, rows)
        except ValueError as error:
            raise self._damaged(str(error)) from error
        if not fingerprint:
            with self._committing():
                self._db.execute("UPDATE pod SET fingerprint = ?", (fingerprint_of(cluster),))
        return state

    def write(self, state: StoredState, cluster: Cluster, lease: Lease) -> None:
        """Put a whole state into a new store, with the id and epoch of another."""
        change = StateChange(
            {partition.name: partition for partition in state.partitions},
            state.allocations,
            state.lost,
            {entry.agent: entry for entry in state.plans.maintenance},
            {entry.needs.name: entry for entry in state.plans.queue},
            {entry.name: entry for entry in state.plans.reservations},
            state.layout,
        )
        self.commit(change)
        with self._committing():
            row = (fingerprint_of(cluster), lease.pod, lease.epoch)
            self._db.execute("UPDATE pod SET fingerprint = ?, uid = ?, epoch = ?", row)
            self._db.executemany("INSERT INTO users VALUES (?, ?)", state.users.items())

    def users(self) -> dict[str, str]:
        """The record of each user, by name."""
        with self._guard:
            return {str(n): str(data) for n, data in self._db.execute("SELECT name, data FROM users")}

    def put_user(self, name: str, data: str | None) -> None:
        """Store a user's record; None removes it. Raises ServiceError if it cannot be stored."""
        with self._committing():
            self._check_lead()
            self._db.execute("DELETE FROM users WHERE name = ?", (name,))
            if data is not None:
                self._db.execute("INSERT INTO users VALUES (?, ?)", (name, data))

    @property
    def uid(self) -> str:
        """The id of the state, which stays as long as its file; empty for a store in memory."""
        if self.path is None:
            return ""
        with self._committing():
            uid = str(self._db.execute("SELECT uid FROM pod").fetchone()[0])
            if not uid:
                uid = secrets.token_hex(8)
                self._db.execute("UPDATE pod SET uid = ?", (uid,))
        return uid

    def lead(self) -> Lease:
        """Become the state's one owner: from now on `commit` refuses the previous owner. The lease is for the machines;
        that of a store in memory has epoch 0.
        """
        if self.path is None:
            return Lease()
        uid = self.uid
        with self._committing():
            lease = Lease(uid, int(self._db.execute("SELECT epoch FROM pod").fetchone()[0]) + 1)
            self._db.execute("UPDATE pod SET epoch = ?", (lease.epoch,))
        self._lease = lease
        return lease

    def commit(self, change: StateChange) -> None:
        """Store a change, whole or not at all. Raises ServiceError, without any change, if that is impossible, and
        Superseded if another server leads.
        """
        with self._committing():
            self._check_lead()
            for name, partition in change.partitions.items():
                if partition is None:
                    self._db.execute("DELETE FROM partitions WHERE name = ?", (name,))
                else:
                    row = (name, json.dumps(plain_row(partition)))
                    self._db.execute("INSERT OR REPLACE INTO partitions VALUES (?, ?)", row)
            for kind, _ in PLAN_KINDS:
                self._write_entries(kind, getattr(change, kind))
            if change.allocations is not None:
                rows = [(i, a.name, json.dumps(a.agents)) for i, a in enumerate(change.allocations)]
                self._db.execute("DELETE FROM allocations")
                self._db.executemany("INSERT INTO allocations VALUES (?, ?, ?)", rows)
                self._db.execute("UPDATE pod SET own_allocations = 1")
            if change.lost is not None:
                self._db.execute("DELETE FROM lost")
                agents = [(agent,) for agent in sorted(change.lost)]
                self._db.executemany("INSERT INTO lost VALUES (?)", agents)
            if change.layout is not None:
                self._db.execute("DELETE FROM layout")
                self._db.executemany("INSERT INTO layout VALUES (?, ?, ?)", layout_rows(change.layout))
                self._db.execute("UPDATE pod SET own_layout = 1")

    def _write_entries(self, kind: str, entries: Mapping[str, Any]) -> None:
        for name, entry in entries.items():
            if entry is None:
                self._db.execute("DELETE FROM plans WHERE kind = ? AND name = ?", (kind, name))
            else:
                row = (kind, name, json.dumps(plain_row(entry)))
                self._db.execute("INSERT OR REPLACE INTO plans VALUES (?, ?, ?)", row)

    def _check_lead(self) -> None:
        if self._lease.epoch:
            epoch = self._db.execute("SELECT epoch FROM pod").fetchone()[0]
            if epoch != self._lease.epoch:
                raise Superseded(
                    f"another server owns {self.path} (its epoch {epoch}; ours {self._lease.epoch})",
                    hint="Use that server: vipu --server-version. This one ends and leaves its machines to it.",
                )

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        try:
            with self._transaction():
                yield
        except sqlite3.Error as error:
            raise ServiceError(
                f"the state file {self.path} cannot be written: {error}; nothing was changed",
                hint="Make room on its file system, then try again.",
            ) from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._guard:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite has ended the transaction by itself if the disk is full.
                if self._db.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        self._db.execute("ROLLBACK")
                raise

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(
            f"the state file {self.path} is damaged or no state file: {what}",
            hint=f"See what can be kept: vipu-server check --cluster {self._cluster} --state-file {self.path}",
        )

    def _release_owner(self) -> None:
        if self._owner is not None:
            self._owner.release()
            self._owner = None


def default_state_file(cluster: str) -> Path:
    """Default state file of a POD: in the user's directory for state (XDG)."""
    base = environment().get(XDG_STATE_HOME) or os.path.expanduser("~/.local/state")
    return Path(base) / "podrun" / f"vipu-server-{cluster}.sqlite"


def fingerprint_of(cluster: Cluster) -> str:
    """A short hash of everything that stored partitions rely on: the POD's agents in order, their IPU-Link domains, its
    links.
    """
    topology = cluster.topology
    agents = [(agent.id, agent.ild) for agent in cluster.agents]
    links = (topology.ild_ipus, topology.ipu_links.value, topology.gateway.value)
    return hashlib.sha256(json.dumps([cluster.target, agents, links]).encode()).hexdigest()[:16]


def _create(path: Path, cluster: str) -> None:
    """Make the file if there is none, whole or not at all. Raises ConfigError if it is empty."""
    if path.exists():
        if path.stat().st_size == 0:
            raise ConfigError(
                f"the state file {path} is empty: what it held is lost, or it never was one",
                hint=f"Restore a copy of it, or remove it to start without partitions: rm {path}",
            )
        return
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as db:
            _make_tables(db, cluster)
        fresh.replace(path)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def _make_tables(db: sqlite3.Connection, cluster: str) -> None:
    db.execute("BEGIN")
    for statement in (*_TABLES.strip().split(";\n"), _PLANS, _USERS, _LAYOUT):
        db.execute(statement)
    db.execute("INSERT INTO pod (name) VALUES (?)", (cluster,))
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")
