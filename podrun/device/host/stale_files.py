"""IPUoF configuration files: what they say of a partition's machines, and whether it is still so.

A file that podrun has written says which life of which partition it describes (``Epoch``), and a machine says for which
it works. Of a user's own file, without an epoch, something has to listen where it says that machines are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from podrun.core.access import make_token
from podrun.core.documents import read_text
from podrun.core.environment import runtime_directory
from podrun.core.errors import ConfigError, NotFoundError, PodrunError, ServiceError
from podrun.core.identity import connect_tcp
from podrun.core.layout import IpuRange
from podrun.core.proven_channel import open_channel
from podrun.device.host.ports import Site
from podrun.device.service import wire
from podrun.protos import ipuof_pb2 as pb
from podrun.protos import vipu_pb2
from podrun.protos.services import stub_of

CONNECT_SECONDS = 5.0
"""Longest wait for a machine that a file names to accept a connection."""
_told: set[Path] = set()
"""Files that this process has said to pass over."""


def sites_of(config: vipu_pb2.PartitionConfig) -> list[Site]:
    """The machines in a partition's configuration. Raises ServiceError for an inconsistent one."""
    machines: dict[int, list[vipu_pb2.IpuofDevice]] = {}
    for device in config.devices:
        machines.setdefault(device.machine, []).append(device)
    sites = []
    for index, devices in sorted(machines.items()):
        ipus = sorted(device.partition_ipu for device in devices)
        endpoints = {f"{device.ip}:{device.server_port}" for device in devices}
        if ipus != list(range(ipus[0], ipus[0] + len(ipus))) or len(endpoints) != 1:
            raise ServiceError(f"the partition service describes machine {index} of the partition with gaps")
        sites.append(Site(index, endpoints.pop(), IpuRange(ipus[0], len(ipus))))
    return sites


def read_config(path: Path) -> vipu_pb2.PartitionConfig:
    """An IPUoF configuration file, as `vipu get partition NAME --ipuof-configs` prints it."""
    hint = "Write it anew: vipu get partition NAME --ipuof-configs > FILE"
    try:
        text = read_text(path, hint=hint)
        plain = json.loads(text[text.index("{") :])
        fields = {field.name for field in vipu_pb2.IpuofDevice.DESCRIPTOR.fields}
        devices = [
            vipu_pb2.IpuofDevice(**{name: value for name, value in device.items() if name in fields})
            for device in plain["devices"]
        ]
        attributes = {str(name): str(value) for name, value in plain.get("attributes", {}).items()}
        int(attributes.get("GCD Id", "0"))
        config = vipu_pb2.PartitionConfig(devices=devices, attributes=attributes)
        if not devices:
            raise ValueError("it names no IPUs")
        sites_of(config)
    except (
        ConfigError,
        NotFoundError,
        ServiceError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        told = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} is no IPUoF configuration: {told}", hint=hint) from error
    return config


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
        connect_tcp(host.strip("[]"), int(port), CONNECT_SECONDS).close()
    except OSError as error:
        told = os.strerror(error.errno) if error.errno else str(error)
        return f"no machine listens at {endpoint} ({told})"
    if not epoch:
        return ""
    try:
        with open_channel(endpoint, wire.CHANNEL_OPTIONS, token) as channel:
            stub = stub_of(pb, "Ipuof", channel)
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
