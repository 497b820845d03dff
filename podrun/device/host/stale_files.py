"""Whether IPUoF configuration files still describe what they say: asks the machines that they name.

A file that podrun has written says which life of which partition it describes (``Epoch``), and a machine says for which
it works. Of a user's own file, without an epoch, something has to listen where it says that machines are.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from podrun.core.access import make_token, open_channel
from podrun.core.environment import runtime_directory
from podrun.core.errors import PodrunError
from podrun.device.host.partition_config import CONNECT_SECONDS, read_config
from podrun.device.service import wire
from podrun.protos import ipuof_pb2 as pb
from podrun.protos import ipuof_pb2_grpc as stubs
from podrun.protos import vipu_pb2

_told: set[Path] = set()
"""Files that this process has said to pass over."""


def still_described(paths: Sequence[Path], environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Those of the files in the user's folder whose partition is there, and those that cannot be read. Says in one
    line, once in a process, which are passed over.
    """
    kept, gone = [], {}
    for path in paths:
        try:
            why = why_gone(read_config(path), environ)
        except PodrunError:
            why = ""  # Who uses the file gives the error.
        if why:
            gone[path] = why
        else:
            kept.append(path)
    fresh = [path for path in gone if path not in _told]
    if fresh:
        _told.update(fresh)
        what = "; ".join(f"{path.name}: {gone[path]}" for path in fresh)
        files = " ".join(map(str, fresh))
        sys.stderr.write(f"podrun: passed over what describes no partition any more: {what} (rm {files})\n")
        sys.stderr.flush()
    return tuple(kept)


def why_gone(config: vipu_pb2.PartitionConfig, environ: Mapping[str, str]) -> str:
    """Why a file describes nothing any more, as a phrase; empty if one of its machines works for its partition, or
    cannot say so.
    """
    endpoints = sorted({f"{device.ip}:{device.server_port}" for device in config.devices})
    epoch, partition = config.attributes.get("Epoch", ""), config.attributes.get("Partition", "")
    token = make_token(environ, runtime_directory(environ))

    def ask(endpoint: str) -> str:
        return _why_not(endpoint, epoch, partition, token)

    with ThreadPoolExecutor(min(len(endpoints), 16), thread_name_prefix="podrun-ipuof-files") as threads:
        reasons = list(threads.map(ask, endpoints))
    return "" if "" in reasons else reasons[0]


def _why_not(endpoint: str, epoch: str, partition: str, token: str) -> str:
    """Why the machine at an endpoint is not the partition's; empty if it is."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        told = os.strerror(error.errno) if error.errno else str(error)
        return f"no machine listens at {endpoint} ({told})"
    if not epoch:
        return ""
    try:
        with open_channel(endpoint, wire.CHANNEL_OPTIONS, token) as channel:
            stub = stubs.IpuofStub(channel)  # type: ignore[no-untyped-call]
            work: pb.DescribeReply = stub.Describe(pb.Empty(), timeout=CONNECT_SECONDS)
    except grpc.RpcError as error:
        status, _ = wire.status_of(error)
        if status in ("DEADLINE_EXCEEDED", "UNIMPLEMENTED"):
            return ""  # It is busy, or of an earlier podrun.
        return f"what listens at {endpoint} is no machine of this user's ({status})"
    if work.epoch == epoch or (work.partition == partition and not work.epoch):
        return ""
    now = f"works for partition {work.partition} now" if work.partition else "is in no partition"
    if work.partition == partition:
        now = f"works for a later partition {partition}"
    return f"partition {partition} is gone: the machine at {endpoint} {now}"
