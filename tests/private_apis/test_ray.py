"""Each private name of Ray that podrun uses exists in the installed Ray, and its replacement does its work."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import podrun
from podrun.partition.host import guardian
from podrun.private_apis import lean_imports, ray_worker
from podrun.private_apis import ray as private_ray

PACKAGE = Path(podrun.__file__).parent


def find(name: str) -> object:
    """The object of a dotted name: the longest prefix that can be imported, then attributes."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        if importlib.util.find_spec(words[0]) and end > 1:
            try:
                found: object = importlib.import_module(".".join(words[:end]))
            except ImportError:
                continue
            for word in words[end:]:
                found = getattr(found, word)
            return found
    raise ImportError(name)


# The worker's module cannot be imported: it runs as a program.
@pytest.mark.parametrize(
    "name", sorted(set(private_ray.PRIVATE_NAMES) - {"ray._private.workers.default_worker"})
)
def test_ray_still_has_each_name(name: str) -> None:
    found = find(name)
    # A constant, the only one of these names that is not called.
    assert isinstance(found, bool) if name.endswith("RAY_DISABLE_FAILURE_SIGNAL_HANDLER") else callable(found)


def test_ray_has_its_worker_where_ours_starts_it() -> None:
    assert importlib.util.find_spec("ray._private.workers.default_worker") is not None


@pytest.mark.parametrize("option", private_ray.INIT_OPTIONS)
def test_ray_init_takes_the_option(option: str) -> None:
    import ray

    assert f'"{option}"' in inspect.getsource(inspect.unwrap(ray.init))


@pytest.mark.parametrize(
    "option", [*private_ray.AGENT_COMMANDS, *private_ray.AGENT_PORTS, *private_ray.WORKER_OPTIONS]
)
def test_ray_starts_its_raylet_with_the_option(option: str) -> None:
    from ray._private import services

    assert f"{option}=" in inspect.getsource(services.start_raylet)


def test_nodes_keep_their_processes_by_kind() -> None:
    from ray._private import node

    assert "self.all_processes" in inspect.getsource(node.Node)


def test_no_other_module_touches_rays_privates() -> None:
    private = re.compile(r"ray\._private|ray\._raylet|import _raylet|from ray import _")
    touching = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "private_apis" and private.search(path.read_text(encoding="utf-8"))
    ]
    assert touching == []


def test_a_ray_without_the_names_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray import _raylet
    from ray._private import node, services, utils, worker

    monkeypatch.delattr(utils, "read_ray_address")
    monkeypatch.delattr(worker, "print_to_stdstream")
    monkeypatch.delattr(_raylet, "AuthenticationTokenLoader")
    monkeypatch.delattr(services, "start_ray_process")
    for name in (*private_ray.SERVICES, "start_ray_processes"):
        monkeypatch.delattr(node.Node, name)
    assert private_ray.last_started_address() == ""
    private_ray.log_instead_of_printing()
    private_ray.read_environment_again()
    assert "a second start in one process may fail" in caplog.text
    with private_ray.only_what_machines_need():
        assert not hasattr(services, "start_ray_process")


def test_the_raylet_command_starts_no_agents_and_our_worker() -> None:
    command = [
        "raylet",
        "--metrics-agent-port=0",
        "--runtime_env_agent_port=7001",
        "--num_prestart_python_workers=2",
        "--python_worker_command=python setup.py /ray/workers/default_worker.py --metrics-agent-port=0",
        "--dashboard_agent_command=python agent.py --listen-port=0",
        "--runtime_env_agent_command=python main.py",
    ]
    ours = f"-I -S {Path(private_ray.__file__).with_name('ray_worker.py')}"
    assert private_ray.raylet_command(command) == [
        "raylet",
        "--metrics-agent-port=1",
        "--runtime_env_agent_port=7001",
        "--num_prestart_python_workers=0",
        f"--python_worker_command=python setup.py {ours} --metrics-agent-port=0",
        "--dashboard_agent_command= ",
        "--runtime_env_agent_command= ",
        "--dashboard_agent_listen_port=1",
    ]
    quoted = '--python_worker_command=python "/with a space/default_worker.py" --x'
    assert private_ray.raylet_command([quoted])[0] == f"--python_worker_command=python {ours} --x"


PRETENDED_RAY = {
    "ray/__init__.py": "import requests, jsonschema\nimport tqdm.auto as progress",
    "ray/_common/__init__.py": "",
    "ray/_common/usage/__init__.py": "",
    "ray/_common/usage/usage_lib.py": "import requests",
    "ray/util/__init__.py": "",
    "ray/util/serialization_addons.py": "def apply(context): raise AssertionError('Arrow is imported')",
    "ray/_private/__init__.py": "",
    "ray/_private/workers/__init__.py": "",
    "ray/_private/workers/default_worker.py": """
import gc, sys
import ray
from ray._common.usage import usage_lib
from ray.util import serialization_addons
serialization_addons.apply(None)
print("all are imported")
from requests.adapters import Adapter
import requests.sessions
print("one class:", requests.sessions.Adapter is Adapter is ray.requests.sessions.Adapter)
print("requests.get:", usage_lib.requests.get, "in", requests.__name__)
print("bar:", ray.progress.bar)
print(__name__, sys.argv[1:], gc.isenabled())
""",
    "requests/__init__.py": "print('requests is read')\nfrom requests import sessions\nget = 7",
    "requests/sessions.py": "from .adapters import Adapter",
    "requests/adapters.py": "from . import sessions\nclass Adapter: pass",
    "tqdm/__init__.py": "print('tqdm is read')\nbar = 8",
    "tqdm/auto.py": "print('tqdm.auto is read')\nfrom tqdm import bar",
    "jsonschema.py": "print('jsonschema is read')",
}
LEAN = {
    "podrun/__init__.py": "",
    "podrun/private_apis/__init__.py": "",
    "podrun/private_apis/lean_imports.py": Path(lean_imports.__file__).read_text(encoding="utf-8"),
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def start_worker(python: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-B", "-s", ray_worker.__file__, "--node-ip-address=here"],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def interpreter(version: str) -> str:
    """Path of a Python of this version; skips the test if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths = [*map(str, sorted(pyenv.glob(f"{version}.*/bin/python"))), shutil.which(f"python{version}")]
    for path in filter(None, paths):
        done = subprocess.run(
            [path, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True
        )
        if done.returncode == 0:
            return done.stdout.strip()
    pytest.skip(f"there is no Python {version} here")


OTHER_PYTHONS = [pytest.param(version, marks=pytest.mark.system) for version in ("3.12", "3.13")]


@pytest.mark.parametrize("version", ["", *OTHER_PYTHONS])
def test_our_worker_loads_seldom_used_modules_on_use(tmp_path: Path, version: str) -> None:
    write(tmp_path, PRETENDED_RAY | LEAN)
    done = start_worker(interpreter(version) if version else sys.executable, tmp_path)
    assert (done.stdout.splitlines(), done.stderr) == (
        [
            "all are imported",
            "requests is read",
            "one class: True",
            "requests.get: 7 in requests",
            "tqdm is read",
            "tqdm.auto is read",
            "bar: 8",
            "__main__ ['--node-ip-address=here'] False",
        ],
        "",
    )


WITHOUT_PACKAGES = """
import sys
sys.path[:] = [path for path in sys.path if not path.endswith("site-packages")]
"""
OTHER_RAY = {
    "ray/__init__.py": """
import requests
try:
    import tqdm.auto
except ImportError:
    print("no progress is shown")
""",
    "ray/_private/__init__.py": "",
    "ray/_private/workers/__init__.py": "",
    "ray/_private/workers/default_worker.py": "import ray; print('requests.get:', ray.requests.get)",
    "requests.py": "get = 7",
}


@pytest.mark.parametrize("podrun_there", [True, False])
def test_our_worker_starts_a_ray_with_other_names(tmp_path: Path, podrun_there: bool) -> None:
    """Without tqdm, without what is replaced, and where only Ray tells its workers where podrun is."""
    write(tmp_path, OTHER_RAY | (LEAN if podrun_there else {"podrun/__init__.py": ""}))
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_PACKAGES, encoding="utf-8")
    done = start_worker(sys.executable, tmp_path)
    assert (done.stdout, done.stderr) == ("no progress is shown\nrequests.get: 7\n", "")


DRIVER = """
import sys
from podrun.private_apis.ray import import_ray
from podrun.private_apis.ray_worker import SELDOM_USED

import_ray()
early = {*SELDOM_USED, "urllib3", "pydantic", "pyarrow"} & sys.modules.keys()
assert not early, f"Ray asks for {early} while it is imported"
before = list(sys.meta_path)
ray = import_ray()
assert sys.meta_path == before

from requests.adapters import HTTPAdapter
from jsonschema.validators import Draft7Validator
import jsonschema
import requests
from ray._private.accelerators import tpu
from ray._private.runtime_env import plugin_schema_manager

assert requests.sessions.HTTPAdapter is HTTPAdapter
assert jsonschema.Draft7Validator is Draft7Validator
assert tpu.requests.Session is requests.Session
assert plugin_schema_manager.jsonschema.ValidationError is jsonschema.ValidationError
print("done")
"""


@pytest.mark.system
def test_what_ray_seldom_uses_is_there_for_programs_and_for_ray() -> None:
    done = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


SIGNALS = """
import contextlib
import ctypes
import signal
from podrun.partition.machines import ray_session


def handler():
    action = ctypes.create_string_buffer(512)
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
    return action.raw[:8]


ray_session._keeping_sigterm = contextlib.nullcontext
signal.signal(signal.SIGTERM, lambda *_: None)
before = handler()
session = ray_session.RaySession()
kept = handler() == before
session.close()
print("kept" if kept else "replaced")
"""


@pytest.mark.slow
@pytest.mark.system
def test_sigterm_stays_with_the_program_while_ray_starts(tmp_path: Path) -> None:
    environ = {**os.environ, "PODRUN_RUNTIME_DIR": str(tmp_path)}
    words = [sys.executable, "-c", SIGNALS]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.returncode) == ("kept\n", 0), done.stderr


@pytest.mark.parametrize("tell", [private_ray.leave_signals_alone, private_ray.import_ray])
def test_rays_core_is_told_to_leave_signals_alone(
    tell: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private import ray_constants, worker

    monkeypatch.setattr(ray_constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER", False)
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # Replaced on import.
    monkeypatch.setattr(
        private_ray, "import_ray_alone", lambda: None
    )  # Ray is here already, and stays whole.
    tell()
    assert ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER is True


PRETENDED_COPIES = {
    **PRETENDED_RAY,
    **LEAN,
    "podrun/device/__init__.py": "",
    "podrun/device/service/__init__.py": "",
    "podrun/device/service/preload.py": "def import_for_copies(): pass",
    "ray/_private/workers/default_worker.py": """
import gc, os, sys
import ray
if __name__ == "imported" and "NOTES" in os.environ:
    with open(os.environ["NOTES"], "w") as notes:
        notes.write(" ".join(os.environ[name] for name in ("RAY_JOB_ID", "RAY_RAYLET_PID", "SPT_NOENV")))
if __name__ == "__main__":
    print(os.environ["RAY_JOB_ID"], sys.argv[1:], sys.orig_argv[2:3], gc.isenabled(), flush=True)
""",
}


def test_a_machines_process_is_a_copy_of_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own cluster's template, as long as that lives; else it imports for itself."""
    write(tmp_path, PRETENDED_COPIES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    template = ray_worker.WorkerTemplate({})
    template.listen(tmp_path / "template")

    def start(job: str) -> list[str]:
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                "-S",
                ray_worker.__file__,
                f"--for={job}",
            ],
            env={**os.environ, ray_worker.SOCKET_VARIABLE: str(tmp_path / "template"), "RAY_JOB_ID": job},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    try:
        copies = [start("1"), start("1")]
        stranger = start("2")
    finally:
        template.end()
    assert copies == [["1 ['--for=1'] ['--template'] False"]] * 2
    assert stranger == ["2 ['--for=2'] ['--for=2'] False"]
    assert start("1") == ["1 ['--for=1'] ['--for=1'] False"]
    template.end()


def test_a_template_that_expects_own_workers_imports_ray_before_the_first_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, PRETENDED_COPIES)
    os.mkfifo(tmp_path / "notes")
    notes = os.open(tmp_path / "notes", os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("RAY_RAYLET_PID", "4")
    template = ray_worker.WorkerTemplate({}, own_workers=True)
    try:
        template.listen(tmp_path / "template")
        template.expect(4)
        assert select.select([notes], [], [], 60)[0]
        assert os.read(notes, 100) == b"01000000 4 1"
        monkeypatch.setenv(ray_worker.SOCKET_VARIABLE, str(tmp_path / "template"))
        asked = [sys.executable, "-I", "-S", ray_worker.__file__, "a word"]
        done = []
        for job in (ray_worker.FIRST_JOB, "02000000"):
            monkeypatch.setenv("RAY_JOB_ID", job)
            done.append(subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout)
    finally:
        template.end()
        os.close(notes)
    assert done == [
        "01000000 ['a word'] ['--template'] False\n",
        "02000000 ['a word'] ['a word'] False\n",
    ]


def test_a_request_for_a_copy_keeps_environment_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["worker", "--a=1", "", "two words", os.fsdecode(b"\xff=")])
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("EQUALS", "a=b\nc")
    monkeypatch.setitem(os.environ, "NO_TEXT", os.fsdecode(b"\xfe"))
    whole = ray_worker._request(os.environ, sys.argv[1:])
    assert ray_worker._read_request(whole) == (dict(os.environ), sys.argv[1:])
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="no whole request"):
            ray_worker._read_request(whole[:end])


@pytest.mark.parametrize("file", [ray_worker.__file__, guardian.__file__])
def test_small_processes_import_next_to_nothing(file: str) -> None:
    """Each launch starts several of them."""
    code = f"import sys; exec(compile(open({file!r}).read(), 'file', 'exec'), {{'__name__': 'small', '__file__': ''}})"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{code}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    slow = {"contextlib", "enum", "json", "re", "shutil", "signal", "socket", "subprocess", "threading"}
    assert slow.isdisjoint(done.stdout.split())


def test_a_template_ends_that_never_gets_a_socket() -> None:
    template = ray_worker.WorkerTemplate({})
    template.end()
    assert template._process.returncode == -signal.SIGKILL
