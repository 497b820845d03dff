"""Runs TensorFlow Serving's front: both protocols over one set of models, and a look at the repository each second."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from podrun.core.errors import PodrunError
from podrun.core.quick_dataclass import dataclass
from podrun.core.stop_signals import stop_on_signals
from podrun.serving.tfserving.answers import load_version
from podrun.serving.tfserving.grpc_front import grpc_server
from podrun.serving.tfserving.rest_front import RestServer
from podrun.serving.tfserving.versions import ServedVersions

log = logging.getLogger("podrun.serving")
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Where to listen (port 0: any), how often to look at the repository, and how long an incomplete batch waits."""

    address: str = "127.0.0.1"
    grpc_port: int = 8500
    http_port: int = 8501
    look_seconds: float = 1.0
    delay_us: int = 0


@dataclass(frozen=True, slots=True)
class RunningFront:
    """A front that serves: its ports and its models."""

    grpc_port: int
    http_port: int
    versions: ServedVersions


@contextmanager
def running_front(repository: Path, settings: FrontSettings) -> Iterator[RunningFront]:
    """A front for as long as the context lasts. The models of the repository are loaded when it begins; one that
    cannot be is told in the log and by the protocol. UsageError for ports in use, ConfigError for no repository.
    """
    versions = ServedVersions(repository, partial(load_version, delay_us=settings.delay_us))
    ended = threading.Event()

    def look_again() -> None:
        while not ended.wait(settings.look_seconds):
            try:
                versions.look()
            except PodrunError as error:
                log.warning("%s", error.message)

    looking = threading.Thread(target=look_again, name="podrun-serving-look", daemon=True)
    rest = RestServer(versions, (settings.address, settings.http_port))
    http = threading.Thread(target=rest.serve_forever, name="podrun-serving-rest", daemon=True)
    try:
        server, grpc_port = grpc_server(versions, f"{settings.address}:{settings.grpc_port}")
        try:
            versions.look()
            server.start()
            http.start()
            looking.start()
            yield RunningFront(grpc_port, rest.server_address[1], versions)
        finally:
            ended.set()
            server.stop(_END_SECONDS).wait(_END_SECONDS)
    finally:
        if http.ident is not None:
            rest.shutdown()
            http.join(_END_SECONDS)
        if looking.ident is not None:
            looking.join(_END_SECONDS)
        rest.server_close()
        versions.close()


def serve_tensorflow(repository: Path, settings: FrontSettings) -> int:
    """Serve until this process is told to stop; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="podrun serve: %(message)s")
    stop = stop_on_signals()
    with running_front(repository, settings) as front:
        log.info("gRPC on %s:%d, REST on port %d", settings.address, front.grpc_port, front.http_port)
        stop.wait()
    return 0
