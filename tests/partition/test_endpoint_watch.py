"""The end of a listening process is noticed; a closed connection is not taken for it."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import threading
from concurrent import futures

import grpc

from podrun.partition.host.discovery import listens
from podrun.partition.machines.endpoint_watch import EndpointWatcher
from tests.conftest import wait_until

LISTENER = """
import socket, time
s = socket.create_server(("127.0.0.1", 0))
print(s.getsockname()[1], flush=True)
time.sleep(99)
"""


def test_the_end_of_a_grpc_server_is_noticed() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    watcher, gone, other = EndpointWatcher(), threading.Event(), threading.Event()
    watcher.watch(f"127.0.0.1:{port}", gone.set)
    watcher.watch(f"127.0.0.1:{port}", other.set)()  # Stopped at once: says nothing later.
    assert listens(f"127.0.0.1:{port}")
    assert not gone.is_set()
    server.stop(grace=None).wait(60)
    assert gone.wait(60)
    assert not other.is_set()
    assert not listens(f"127.0.0.1:{port}")


def test_the_end_of_a_killed_process_is_noticed() -> None:
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        gone = threading.Event()
        EndpointWatcher().watch(f"127.0.0.1:{int(child.stdout.readline())}", gone.set)
        assert not gone.is_set()
        child.send_signal(signal.SIGKILL)
        assert gone.wait(60)


def test_a_closed_connection_is_made_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = threading.Event()
        stop = EndpointWatcher().watch(f"127.0.0.1:{server.getsockname()[1]}", gone.set)
        for _ in range(3):
            server.settimeout(20)
            connection, _ = server.accept()
            connection.sendall(b"something")
            connection.close()
        assert not gone.is_set()
        stop()


def test_an_endpoint_without_a_listener_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    told: queue.Queue[str] = queue.Queue()
    watcher = EndpointWatcher()
    watcher.watch(endpoint, lambda: told.put("first"))
    assert told.get(timeout=60) == "first"
    watcher.watch(endpoint, lambda: told.put("second"))
    assert told.get(timeout=60) == "second"


def test_the_thread_ends_with_the_last_watched_endpoint() -> None:
    watcher, gone = EndpointWatcher(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        for _ in range(3):
            watcher.watch(endpoint, gone.set)
        thread = watcher._thread
        assert thread is not None
        wait_until(lambda: len(watcher._selector.get_map()) == 4, 60, "all are watched, and the wake-up")
        with watcher._lock:  # All are forgotten before the thread hears of it once.
            watcher._watched.clear()
        watcher._wake_up.send(b".")
        thread.join(60)
        assert not thread.is_alive()
        assert not gone.is_set()
    watcher.watch(endpoint, gone.set)  # Nobody is there.
    assert gone.wait(60)
    left = watcher._thread
    if left is not None:
        left.join(60)
        assert not left.is_alive()
