"""What the partition service keeps across restarts, in SQLite: partitions, allocations, lost agents.

Each change is one transaction. A file belongs to one POD: opening it for another is refused.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from podrun.cluster import Allocation
from podrun.errors import ConfigError
from podrun.partition.events import Partition
from podrun.partition.placement import MachineSlice
from podrun.partition.types import PartitionState, SyncType

SCHEMA_VERSION = 1

_TABLES = """
CREATE TABLE pod (name TEXT NOT NULL, own_allocations INTEGER NOT NULL DEFAULT 0);
CREATE TABLE partitions (name TEXT PRIMARY KEY, data TEXT NOT NULL);
CREATE TABLE allocations (position INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, agents TEXT NOT NULL);
CREATE TABLE lost (agent TEXT PRIMARY KEY);
"""


class Store:
    """An open store. ``path`` None keeps everything in memory: for a service that lives only as long as its
    process.
    """

    def __init__(self, path: Path | None, cluster: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._open(cluster)
        except (OSError, sqlite3.OperationalError) as error:
            raise ConfigError(
                f"partitions cannot be kept in {path}: {getattr(error, 'strerror', None) or error}",
                hint="Name another file with --state-file, or keep nothing: vipu-server --no-state",
            ) from error
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{path} is no state file of a partition service: {error}",
                hint="Name another with --state-file, or remove it.",
            ) from error

    def _open(self, cluster: str) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            with self._transaction():
                for statement in _TABLES.strip().split(";\n"):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO pod (name) VALUES (?)", (cluster,))
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version > SCHEMA_VERSION:
            raise ConfigError(
                f"{self.path} is of a newer podrun (schema {version}; this one reads {SCHEMA_VERSION})",
                hint="Name another file with --state-file.",
            )
        name = self._db.execute("SELECT name FROM pod").fetchone()[0]
        if name != cluster:
            raise ConfigError(
                f"{self.path} holds the state of {name}, not of {cluster}",
                hint=f"Start it as `vipu-server --cluster {name}`, or name another file with --state-file.",
            )

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    # --- partitions -----------------------------------------------------------------------------------------

    def partitions(self) -> list[Partition]:
        """All partitions, in order of creation."""
        rows = self._db.execute("SELECT data FROM partitions").fetchall()
        return sorted((_partition(json.loads(row[0])) for row in rows), key=lambda p: (p.created, p.name))

    def save_partition(self, partition: Partition) -> None:
        """Write one partition, new or changed."""
        data = json.dumps(_plain(partition))
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO partitions VALUES (?, ?)", (partition.name, data))

    def forget_partition(self, name: str) -> None:
        """Delete one partition."""
        with self._transaction():
            self._db.execute("DELETE FROM partitions WHERE name = ?", (name,))

    # --- allocations and agents -----------------------------------------------------------------------------

    def allocations(self) -> list[Allocation] | None:
        """Allocations in order, or None if they were never changed from what the POD's description says."""
        if not self._db.execute("SELECT own_allocations FROM pod").fetchone()[0]:
            return None
        rows = self._db.execute("SELECT name, agents FROM allocations ORDER BY position").fetchall()
        return [Allocation(name, tuple(json.loads(agents))) for name, agents in rows]

    def save_allocations(self, allocations: Iterable[Allocation]) -> None:
        """Write all allocations."""
        rows = [(i, a.name, json.dumps(a.agents)) for i, a in enumerate(allocations)]
        with self._transaction():
            self._db.execute("DELETE FROM allocations")
            self._db.executemany("INSERT INTO allocations VALUES (?, ?, ?)", rows)
            self._db.execute("UPDATE pod SET own_allocations = 1")

    def lost(self) -> set[str]:
        """Agents whose machine was lost and not restarted."""
        return {row[0] for row in self._db.execute("SELECT agent FROM lost")}

    def save_lost(self, agents: Iterable[str]) -> None:
        """Write which agents are lost."""
        with self._transaction():
            self._db.execute("DELETE FROM lost")
            self._db.executemany("INSERT INTO lost VALUES (?)", [(agent,) for agent in sorted(agents)])

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db, self._lock)


class _Transaction:
    def __init__(self, db: sqlite3.Connection, lock: threading.Lock) -> None:
        self._db, self._lock = db, lock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._db.execute("COMMIT" if kind is None else "ROLLBACK")
        finally:
            self._lock.release()


def _plain(partition: Partition) -> dict[str, Any]:
    return {**asdict(partition), "state": partition.state.name, "sync_type": partition.sync_type.name}


def _partition(data: dict[str, Any]) -> Partition:
    return Partition(
        **{
            **data,
            "state": PartitionState[data["state"]],
            "sync_type": SyncType[data["sync_type"]],
            "slices": tuple(MachineSlice(**entry) for entry in data["slices"]),
            "faults": tuple(data["faults"]),
            "story": tuple(data["story"]),
        }
    )
