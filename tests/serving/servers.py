"""The genuine Triton for tests: started with a repository, stopped with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from podrun.core.errors import PodrunError
from podrun.serving import triton_server
from tests.serving.test_triton import free_ports, wait_for

START_SECONDS = 300.0
"""Every instance is a process that imports JAX: many of them start slowly on a loaded host."""


@dataclass(frozen=True, slots=True)
class TritonOfTest:
    """A running server: its gRPC client, its addresses, its processes."""

    client: Any
    grpc: str
    http: str
    metrics: str
    process: subprocess.Popen[bytes]
    log: Path

    def stubs(self, model: str = "") -> list[psutil.Process]:
        """The processes of instances: of a model, or of all."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [
            p for p in family if "triton_python_backend_stub" in p.name() and model in " ".join(p.cmdline())
        ]


@contextlib.contextmanager
def triton(
    repository: Path,
    models: Sequence[str],
    *words: str,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Iterator[TritonOfTest]:
    """A server whose ``models`` are ready. ``words``: for tritonserver; ``options``: of `podrun serve`."""
    grpcclient = pytest.importorskip("tritonclient.grpc")
    try:
        triton_server.find_tritonserver("", os.environ)
    except PodrunError as error:
        pytest.skip(error.message)
    grpc, http, metrics = free_ports(3)
    command = [sys.executable, "-m", "podrun", "serve", str(repository), *options, "--grpc-port", str(grpc)]
    command += ["--http-port", str(http), "--metrics-port", str(metrics), "--", *words]
    log = repository.with_suffix(".log")
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environ
        )
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{grpc}")
    try:
        wait_for(
            lambda: client.is_server_live() and all(client.is_model_ready(name) for name in models),
            process,
            log,
            START_SECONDS,
        )
        yield TritonOfTest(
            client, f"127.0.0.1:{grpc}", f"127.0.0.1:{http}", f"127.0.0.1:{metrics}", process, log
        )
    finally:
        client.close()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(60)


def tensor(x: np.ndarray, name: str = "x", kind: str = "FP32") -> list[Any]:
    """The inputs of a request over gRPC."""
    import tritonclient.grpc as grpcclient

    sent = grpcclient.InferInput(name, list(x.shape), kind)
    sent.set_data_from_numpy(x)
    return [sent]
