"""The environment variables that podrun reads: what each is for, and the one place that reads the process's own.

Functions take a mapping of variables; `environment` is what they use where their caller gives none. A value counts at
the moment it is read. ``docs/environment.md`` is the table of `VARIABLES` for users.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from podrun.core.errors import UsageError

BEGAN_NS = time.time_ns()
"""When this process began to read podrun's files: this module is among the first."""

CACHE_DIR = "PODRUN_CACHE_DIR"

TLS_VARIABLES = ("PODRUN_TLS_CERT", "PODRUN_TLS_KEY", "PODRUN_TLS_CA")

# The names that several modules use; a name that one module uses stands there and in the table.
PODRUN_CHECK_REPLICAS = "PODRUN_CHECK_REPLICAS"
PODRUN_COMMAND = "PODRUN_COMMAND"
PODRUN_CONVOLUTIONS = "PODRUN_CONVOLUTIONS"
PODRUN_DEFAULTS = "PODRUN_DEFAULTS"
PODRUN_FAULTS = "PODRUN_FAULTS"
PODRUN_FIRST_IPU = "PODRUN_FIRST_IPU"
PODRUN_HOST_COLLECTIVES = "PODRUN_HOST_COLLECTIVES"
PODRUN_LAUNCH_ID = "PODRUN_LAUNCH_ID"
PODRUN_MACHINES_PER_PROCESS = "PODRUN_MACHINES_PER_PROCESS"
PODRUN_MOMENTS = "PODRUN_MOMENTS"
PODRUN_OFFLINE_MODE = "PODRUN_OFFLINE_MODE"
PODRUN_OWN_CACHE = "PODRUN_OWN_CACHE"
PODRUN_PLAN_CACHE = "PODRUN_PLAN_CACHE"
PODRUN_PROGRESS = "PODRUN_PROGRESS"
PODRUN_PROGRESS_FILE = "PODRUN_PROGRESS_FILE"
PODRUN_PROGRAM_FAULTS = "PODRUN_PROGRAM_FAULTS"
PODRUN_RUNTIME_DIR = "PODRUN_RUNTIME_DIR"
PODRUN_RESTART_COUNT = "PODRUN_RESTART_COUNT"
PODRUN_TENSORFLOW = "PODRUN_TENSORFLOW"
PODRUN_TRACEBACK = "PODRUN_TRACEBACK"

GCDA_OPTIONS = "GCDA_OPTIONS"
IPUOF_CONFIG_PATH = "IPUOF_CONFIG_PATH"
IPUOF_VIPU_API_GCD_ID = "IPUOF_VIPU_API_GCD_ID"
IPUOF_VIPU_API_HOST = "IPUOF_VIPU_API_HOST"
IPUOF_VIPU_API_PARTITION_ID = "IPUOF_VIPU_API_PARTITION_ID"
IPUOF_VIPU_API_PORT = "IPUOF_VIPU_API_PORT"
IPUOF_VIPU_API_TIMEOUT = "IPUOF_VIPU_API_TIMEOUT"
VIPU_CLI_API_HOST = "VIPU_CLI_API_HOST"
POPART_CACHE_DIR = "POPART_CACHE_DIR"
POPXL_CACHE_DIR = "POPXL_CACHE_DIR"
POPDIST_EXECUTABLE_CACHE_PATH = "POPDIST_EXECUTABLE_CACHE_PATH"
POPDIST_LOCAL_INSTANCE_INDEX = "POPDIST_LOCAL_INSTANCE_INDEX"
POPDIST_NUM_IPUS_PER_REPLICA = "POPDIST_NUM_IPUS_PER_REPLICA"
POPDIST_NUM_LOCAL_REPLICAS = "POPDIST_NUM_LOCAL_REPLICAS"
POPDIST_NUM_TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
POPDIST_REPLICA_INDEX_OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
POPDIST_UNIFORM_REPLICAS_PER_INSTANCE = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
POPLAR_ENGINE_OPTIONS = "POPLAR_ENGINE_OPTIONS"
POPTORCH_CACHE_DIR = "POPTORCH_CACHE_DIR"

XLA_FLAGS = "XLA_FLAGS"
OMPI_COMM_WORLD_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
OMPI_COMM_WORLD_RANK = "OMPI_COMM_WORLD_RANK"
OMPI_COMM_WORLD_SIZE = "OMPI_COMM_WORLD_SIZE"
XDG_STATE_HOME = "XDG_STATE_HOME"

VARIABLES: Mapping[str, str] = {
    # podrun's own
    CACHE_DIR: "Directory of everything that podrun caches: compiled programs and tile plans.",
    PODRUN_CHECK_REPLICAS: "After how many batches replicas compare weights; `podrun --check-replicas` sets it.",
    PODRUN_COMMAND: "Set by `podrun profile`: the command, which reports show.",
    PODRUN_CONVOLUTIONS: "`xla` computes convolutions and products with XLA alone, slower, instead of oneDNN.",
    PODRUN_DEFAULTS: "Set by podrun: variables of libraries that it set, with values, for processes that it starts.",
    "PODRUN_CUSTOM_OPS": "Python files, separated by colons, that register operators of your own.",
    PODRUN_FAULTS: "Faults of the emulated machines of a script that runs without `podrun`, as `--fault` takes them.",
    PODRUN_FIRST_IPU: "Set by `podrun`: the first IPU of the launch in a partition that it shares with others.",
    PODRUN_HOST_COLLECTIVES: "Set by `podrun`: address, port and key at which the instances find each other.",
    "PODRUN_HOST_COLLECTIVES_TIMEOUT": "Seconds that an instance waits for others in a popdist collective; 300.",
    "PODRUN_HOST_MARK": "Set by `podrun` on remote hosts: marks the processes of one launch, so that all can be ended.",
    "PODRUN_INCIDENTS": "File for incidents of served models, a line of JSON each; `podrun serve --incidents` sets it.",
    PODRUN_LAUNCH_ID: "Set by `podrun`: identifies the launch that a process belongs to.",
    PODRUN_MACHINES_PER_PROCESS: "Emulated machines that share one process; by default as many as memory requires.",
    PODRUN_MOMENTS: "File to which all processes of a launch add a line for each step of its start, up to the first "
    "batch of each program, with times.",
    PODRUN_OFFLINE_MODE: "Set by `podrun --offline-mode`: 1 lets programs compile without attaching to IPUs.",
    PODRUN_OWN_CACHE: "Set by `podrun`: 1 where the executable cache of a launch is removed after it.",
    PODRUN_PLAN_CACHE: "Directory of kept tile plans and shapes instead of the usual; `off` for none, and no programs.",
    PODRUN_PROGRESS: "`off`: say nothing of preparations that take long.",
    PODRUN_PROGRESS_FILE: "Set by `podrun` on a terminal: the file in which the first instance says how far it is.",
    PODRUN_PROGRAM_FAULTS: "Set by `podrun`: file with the faults that strike in instances, such as those of a disk.",
    "PODRUN_RECORD": "Set by `podrun --record`: folder in which the processes of a launch record the run.",
    PODRUN_RUNTIME_DIR: "Directory of files that say where servers of this user listen, and of the user's secret.",
    "PODRUN_OWN_SERVER": "Set by `podrun`: 1 where the partition service must prove to be the same user's.",
    PODRUN_RESTART_COUNT: "Set by `podrun`: how often the instances were started again; 0 at first.",
    "PODRUN_SUPERVISED": "Set by `podrun` for a launch that starts again what fails: hints do not advise it then.",
    "PODRUN_STANDALONE_IPUS": "IPUs that a script without `podrun` finds; 64.",
    PODRUN_TENSORFLOW: "1 or 2: the API of TensorFlow that `import tensorflow` gives; else as the script uses it.",
    "PODRUN_TOKEN": "The user's secret instead of that in the runtime directory, for servers on other hosts.",
    "PODRUN_TLS_CERT": "PEM file with this host's certificate: connections use TLS then. See *Security*.",
    "PODRUN_TLS_KEY": "PEM file with the key of that certificate.",
    "PODRUN_TLS_CA": "PEM file with the authority that all certificates have to be of.",
    PODRUN_TRACEBACK: "`full` shows whole tracebacks: also the frames inside podrun, JAX and Python's module runner.",
    "PODRUN_VIRTUAL_POD": "Set for a scheduler: HOST:PORT of the virtual POD that podrun simulate serves.",
    "PODRUN_WORKER_TEMPLATE": "Set by `podrun` for Ray: socket of the process of which machines' processes are copies.",
    # The SDK's, which programs, PopRun and V-IPU agree on
    GCDA_OPTIONS: "JSON; `simulateSOCError.errorList`, `.triggerCount` and `.rearmOnReset` plan faults.",
    IPUOF_CONFIG_PATH: "File that describes a partition's devices, instead of asking the partition service.",
    "IPUOF_LOG_LEVEL": "Log level of the connection to IPUs; `podrun` passes it to instances.",
    IPUOF_VIPU_API_GCD_ID: "Graph compilation domain of the partition to use; 0.",
    IPUOF_VIPU_API_HOST: "Host of the partition service.",
    IPUOF_VIPU_API_PARTITION_ID: "Name of the partition to use.",
    IPUOF_VIPU_API_PORT: "Port of the partition service; 8090.",
    IPUOF_VIPU_API_TIMEOUT: "Seconds that a request to the partition service may take; 120.",
    "IPU_APP_EVENT_RECORD_PATH": "Directory in which programs record the last error of their IPUs, for gcipuinfo.",
    POPART_CACHE_DIR: "Directory of PopART's executable cache; naming it switches the cache on.",
    POPXL_CACHE_DIR: "The same as POPART_CACHE_DIR, which comes first.",
    "POPART_DOT_CHECKS": "Points of compilation at which the graph is drawn, separated by colons.",
    "POPART_LOG_DEST": "Where PopART's log goes: stdout, stderr or a file.",
    "POPART_LOG_LEVEL": "PopART's log level: TRACE, DEBUG, INFO, WARN, ERR or OFF.",
    POPDIST_EXECUTABLE_CACHE_PATH: "Set by `podrun`: executable cache that all instances of a run share.",
    POPDIST_LOCAL_INSTANCE_INDEX: "Set by `podrun`: number of the instance on its host.",
    POPDIST_NUM_IPUS_PER_REPLICA: "Set by `podrun`: IPUs of each replica.",
    POPDIST_NUM_LOCAL_REPLICAS: "Set by `podrun`: replicas of the instance.",
    POPDIST_NUM_TOTAL_REPLICAS: "Set by `podrun`: replicas of all instances.",
    POPDIST_REPLICA_INDEX_OFFSET: "Set by `podrun`: first replica of the instance among all.",
    POPDIST_UNIFORM_REPLICAS_PER_INSTANCE: "Set by `podrun`: 1 if all instances own equally many replicas.",
    POPLAR_ENGINE_OPTIONS: "JSON of Poplar engine options, such as `autoReport.all`.",
    "POPLAR_TARGET_OPTIONS": "Set by `podrun`: JSON of Poplar target options of the partition.",
    POPTORCH_CACHE_DIR: "Directory of PopTorch's compiled programs, unless the options name one.",
    "POPTORCH_DEFAULT_OPTIONS": "JSON of options that every `poptorch.Options` starts with.",
    "POPTORCH_IPU_MODEL": "1: PopTorch uses a model of an IPU instead of IPUs; options.useIpuModel comes first.",
    "POPTORCH_IPU_MODEL_VERSION": "Architecture of that model: ipu1, ipu2 or ipu21; ipu2.",
    "POPTORCH_LOG_LEVEL": "PopTorch's log level: TRACE, DEBUG, INFO, WARN, ERR or OFF; WARN.",
    "POPTORCH_SMALL_IPU_MODEL": "1: the same with a model of 4 tiles.",
    "POPTORCH_WAIT_FOR_IPU": "1: wait until IPUs are free instead of failing.",
    "PVTI_OPTIONS": "JSON: `enable` and `directory` of traces that `poptorch.profiling.Channel` and `libpvti` write.",
    VIPU_CLI_API_HOST: "Host of the partition service for the `vipu` command; its other options likewise.",
    "VIPU_CLI_API_PORT": "Port of the partition service that VIPU_CLI_API_HOST names; 8090.",
    "_PODRUN_COMPLETE": "Set by a shell that completes `podrun` (`podrun completion`); `_POPRUN_COMPLETE` likewise.",
    "NO_COLOR": "Any text: no colour on terminals either (no-color.org).",
    "VIPU_CLI_API_USER_ID": "User at a partition service with users of its own (`vipu-server --secure`).",
    "VIPU_CLI_API_ACCESS_KEY": "That user's access key.",
    # Of other programs
    "HOME": "Home directory, below which caches and state are kept.",
    "TERM": "Kind of terminal; `dumb` shows no colour.",
    "JAX_PLATFORMS": "Platforms that JAX may use; machines set it to cpu.",
    "NPROC": "Threads of XLA clients that start; podrun sets it around the start of its own, whatever it says.",
    XLA_FLAGS: "XLA's flags; `--xla_cpu_max_isa` limits the instruction set, by which compiled code is kept. podrun "
    "has its own values for the number of devices, the optimization level and fast math, which would change bits.",
    "ONEDNN_MAX_CPU_ISA": "Limits oneDNN's instruction set, by which compiled code is kept.",
    "DNNL_MAX_CPU_ISA": "The same as ONEDNN_MAX_CPU_ISA, which comes first.",
    OMPI_COMM_WORLD_LOCAL_SIZE: "Set by `podrun` as mpirun does: instances on this host.",
    OMPI_COMM_WORLD_RANK: "Set by `podrun` as mpirun does: number of the instance.",
    OMPI_COMM_WORLD_SIZE: "Set by `podrun` as mpirun does: number of instances.",
    "PATH": "Where the program to launch is looked for.",
    "PYTHONPATH": "Python's search path, to which `podrun` adds the SDK's module names.",
    "RAY_ADDRESS": "Ray cluster to start machines on; by default one on this host.",
    "RAY_AUTH_MODE": "Whether Ray asks for a token; podrun switches it on.",
    "RAY_AUTH_TOKEN": "Ray's token; podrun makes one if there is none.",
    "RAY_AUTH_TOKEN_PATH": "File with Ray's token.",
    "XDG_CACHE_HOME": "Directory below which caches are kept, instead of `~/.cache`.",
    "XDG_RUNTIME_DIR": "Directory below which runtime files are kept.",
    XDG_STATE_HOME: "Directory below which the partition service keeps its state, instead of `~/.local/state`.",
}
"""Every variable that podrun reads, by name, with one sentence about it."""


def environment(passed: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """``passed``, or the environment of this process if it is None."""
    return os.environ if passed is None else passed


def pass_on(name: str, value: str) -> None:
    """Set a variable for the rest of this process and for the processes that it starts."""
    os.environ[name] = value


def set_default(name: str, value: str) -> None:
    """Set a variable that the user did not set, for the rest of this process and the processes that it starts."""
    if name not in os.environ:
        os.environ[name] = value
        os.environ[PODRUN_DEFAULTS] = ";".join([*_defaults(), f"{name}={value}"])


def chosen_by_user(name: str) -> str | None:
    """The value of a variable that the user set; None if it is unset or `set_default` set it, here or in a parent."""
    value = os.environ.get(name)
    return None if f"{name}={value}" in _defaults() else value


def _defaults() -> list[str]:
    """What `set_default` set, as ``NAME=VALUE``."""
    return [entry for entry in os.environ.get(PODRUN_DEFAULTS, "").split(";") if entry]


def podrun_cache_directory(environ: Mapping[str, str]) -> Path | None:
    """The directory for everything that podrun caches.

    ``$PODRUN_CACHE_DIR``, else ``podrun`` under ``$XDG_CACHE_HOME`` or under ``$HOME/.cache``. None if no variable
    names an absolute path: caches hold native code, so a folder that other users may write to is never taken.
    """
    if explicit := environ.get(CACHE_DIR):
        return Path(explicit).expanduser()
    home = environ.get("HOME", "")
    for base in (environ.get("XDG_CACHE_HOME", ""), os.path.join(home, ".cache") if home else ""):
        if os.path.isabs(base):
            return Path(base) / "podrun"
    return None


def runtime_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The directory for files of this user's processes: where services run, and the user's secret.

    ``$PODRUN_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/podrun``, else ``podrun-UID`` in the directory for temporary files.
    It is made if it is missing, with mode 0700. Raises UsageError if it belongs to another user or cannot be used.
    """
    env = environment(environ)
    if env.get(PODRUN_RUNTIME_DIR):
        path = Path(env[PODRUN_RUNTIME_DIR])
    elif env.get("XDG_RUNTIME_DIR") and os.access(env["XDG_RUNTIME_DIR"], os.W_OK):
        path = Path(env["XDG_RUNTIME_DIR"]) / "podrun"
    else:
        path = Path(tempfile.gettempdir()) / f"podrun-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise UsageError(
            f"the runtime directory {path} cannot be used: {error.strerror}",
            hint="Name another: export PODRUN_RUNTIME_DIR=DIRECTORY",
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UsageError(
            f"the runtime directory {path} belongs to another user",
            hint="Name another: export PODRUN_RUNTIME_DIR=DIRECTORY",
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o700)
    return path
