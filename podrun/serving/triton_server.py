"""Starts the genuine Triton Inference Server with the backend ``poplar``.

A ``tritonserver`` is looked for where the caller says, on PATH, in its usual folder and in the wheel
``nvidia-pytriton``, which holds the server. What it needs besides (a folder of backends, with the stub of Triton's
Python backend for this interpreter) is made in a folder that goes when the server ends. It listens on the loopback
address unless told otherwise.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import podrun
from podrun.core.errors import MissingPackageError, PodrunError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.stop_signals import stop_signals_handled
from podrun.core.trampoline import tied_words
from podrun.serving.hang_watch import PATIENCE_SECONDS, HangWatch, server_lives
from podrun.serving.instance_watch import InstanceWatch
from podrun.serving.leftovers import remove_leftovers, server_folder
from podrun.serving.repository import check_repository, write_missing_config

USUAL_PLACE = Path("/opt/tritonserver/bin/tritonserver")
INSTALL = "pip install --no-deps nvidia-pytriton==0.7.0"
"""Its metadata ask for NumPy 1, which only its own Python code needs: the server does not."""
TESTED_VERSION = "2.51"
_END_SECONDS = 30.0
CRASHES = {
    128 + number: number.name for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)
}
"""Exit codes of a server that ended by a fault of its own, with the signals: Triton 2.51 aborts on an HTTP request
whose JSON states a shape of terabytes.
"""
_SHORT_LIFE_SECONDS = 5.0
"""A server that crashes before that would do so again."""
_MODEL_FILE = """import sys

sys.path += [path for path in {paths!r} if path not in sys.path]

from podrun.serving.triton_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""
"""The backend's file. The stub's interpreter does not heed PYTHONPATH on all hosts, so it names folders of packages."""


@dataclass(frozen=True, slots=True)
class TritonPlace:
    """Where a server is. ``libraries``: folder of libraries that its process needs, or None."""

    program: Path
    backends: Path
    stub: Path
    libraries: Path | None = None


@dataclass(frozen=True, slots=True)
class ServerPorts:
    """Where the server listens."""

    grpc: int = 8001
    http: int = 8000
    metrics: int = 8002
    address: str = "127.0.0.1"


def find_tritonserver(named: str = "", environ: Mapping[str, str] | None = None) -> TritonPlace:
    """The server that is ``named``, else the first that is there. MissingPackageError says what to type if there is
    none, UsageError for one without the Python backend.
    """
    path = (environ or {}).get("PATH", os.defpath)
    wheel = importlib.util.find_spec("pytriton")
    inside = Path(wheel.origin).parent / "tritonserver" if wheel is not None and wheel.origin else None
    if named:
        return _checked(Path(named).expanduser().resolve(), None)
    if on_path := shutil.which("tritonserver", path=path):
        return _checked(Path(on_path).resolve(), None)
    if USUAL_PLACE.is_file():
        return _checked(USUAL_PLACE, None)
    if inside is not None and (inside / "bin" / "tritonserver").is_file():
        return _checked(inside / "bin" / "tritonserver", inside.parent.parent / "nvidia_pytriton.libs")
    raise MissingPackageError(
        "there is no tritonserver on this host", hint=f"{INSTALL}, or name one: --tritonserver"
    )


def _checked(program: Path, libraries: Path | None) -> TritonPlace:
    if not os.access(program, os.X_OK) or program.is_dir():
        raise UsageError(f"{program} is no program", hint=f"{INSTALL} brings one.")
    home = program.parent.parent
    backends = home / "backends" / "python"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        stub = backends / "triton_python_backend_stub"
    if not (backends / "libtriton_python.so").is_file() or not stub.is_file():
        raise UsageError(
            f"{program} has no Python backend for Python {version} beside it ({backends})",
            hint=f"{INSTALL} has it.",
        )
    return TritonPlace(program, backends, stub, libraries)


def write_backends(place: TritonPlace, folder: Path) -> None:
    """A folder of backends: Triton's Python backend with the right stub, and ``poplar``.

    The files are copied: the server refuses libraries that links lead to.
    """
    python, poplar = folder / "python", folder / "poplar"
    python.mkdir(parents=True)
    poplar.mkdir()
    for file in place.backends.iterdir():
        if file.is_file() and file.name != place.stub.name:
            shutil.copy(file, python)
    shutil.copy(place.stub, python)
    (poplar / "model.py").write_text(_MODEL_FILE.format(paths=module_path()))


def command(place: TritonPlace, repository: Path, backends: Path, ports: ServerPorts) -> list[str]:
    """The words of the server's command."""
    words = [str(place.program), f"--model-repository={repository}", f"--backend-directory={backends}"]
    for name, port in (("http", ports.http), ("grpc", ports.grpc), ("metrics", ports.metrics)):
        words += [f"--{name}-port={port}", f"--{name}-address={ports.address}"]
    return [*words, "--allow-gpu-metrics=0", "--exit-on-error=false"]


def server_environment(place: TritonPlace, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server: with the libraries of the wheel."""
    variables = dict(environ)
    if place.libraries is not None:
        libraries = [str(place.libraries), *filter(None, [environ.get("LD_LIBRARY_PATH", "")])]
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    return variables


def module_path() -> list[str]:
    """Folders of podrun and of installed packages."""
    library = sysconfig.get_paths()["stdlib"]
    own = str(Path(podrun.__file__).resolve().parents[1])
    return list(dict.fromkeys([own, *(path for path in sys.path if path and _holds_packages(path, library))]))


def _holds_packages(path: str, library: str) -> bool:
    """True iff a folder of the module path is not the standard library's: environments may be made of several."""
    return os.path.isdir(path) and (not path.startswith(library) or "-packages" in path)


def serve(
    repository: Path,
    ports: ServerPorts,
    environ: Mapping[str, str],
    named: str = "",
    extra: Sequence[str] = (),
) -> int:
    """Run the server until it ends or this process is told to stop; returns its exit code. One that crashes or hangs is
    started again.
    """
    place = find_tritonserver(named, environ)
    for model in check_repository(repository):
        _complete(model)
    remove_leftovers()
    with server_folder() as folder:
        backends = folder / "backends"
        write_backends(place, backends)
        words = [*command(place, repository.resolve(), backends, ports), *_model_control(extra), *extra]
        http = f"{ports.address}:{ports.http}".replace("0.0.0.0:", "127.0.0.1:")
        while True:
            begin = time.monotonic()
            process = subprocess.Popen(tied_words(words), env=server_environment(place, environ))
            hangs = HangWatch(process.kill, functools.partial(server_lives, http))
            with InstanceWatch(process.pid, http, repository.resolve()), hangs:
                code, stopped = _wait(process)
            crash = f"hung for {PATIENCE_SECONDS:.0f} s" if hangs.hung else CRASHES.get(code)
            if stopped or crash is None or time.monotonic() - begin < _SHORT_LIFE_SECONDS:
                break
            _say(f"{place.program} crashed ({crash}) and is started again; its requests are lost")
    remove_leftovers()
    if code not in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT):
        _say(
            f"{place.program} ended with exit code {code}; what it printed says why. podrun is tested "
            f"with tritonserver {TESTED_VERSION}: {INSTALL}"
        )
    return code


def _complete(model: Path) -> None:
    """Write the configuration that a model lacks. What stands in the way is said: the other models are served."""
    try:
        written = write_missing_config(model)
        text = "" if written is None else f"wrote {written}"
    except PodrunError as error:
        text = f"model {model.name} has no configuration: {error.message}"
        text += f"\nhint: {error.hint}" if error.hint else ""
    if text:
        _say(text)


def _say(text: str) -> None:
    sys.stderr.write(f"podrun serve: {text}\n")
    sys.stderr.flush()


def _model_control(extra: Sequence[str]) -> list[str]:
    """Words that load all models and let one be loaded again, unless the caller says how models are controlled."""
    if any(word.startswith("--model-control-mode") for word in extra):
        return []
    return ["--model-control-mode=explicit", "--load-model=*"]


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """The server's exit code, and whether this process was told to stop; signals that end it end the server first."""
    told: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        told.append(number)
        process.send_signal(signal.SIGTERM)

    try:
        with stop_signals_handled(stop):
            # With a limit Python looks again and again: a signal just before a wait without one would not end it.
            code = process.wait(math.inf)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(_END_SECONDS)
    return (128 - code if code < 0 else code), bool(told)
