"""Every option of ``podrun``, once: the parser, ``--help``, the configuration file and docs/launcher.md come
from it.

Names, meanings and defaults follow PopRun's. The last group is podrun's own.
"""

from __future__ import annotations

import enum
import itertools

from podrun.core.quick_dataclass import dataclass


class ValueKind(enum.Enum):
    """The kind of value that an option takes on the command line."""

    FLAG = "flag"
    """Nothing: ``--dry-run``. (``--dry-run=no`` is understood.)"""
    BOOLEAN = "boolean"
    """yes, no, on, off, 1, 0, true or false."""
    COUNT = "count"
    """A whole number, 1 or more."""
    INDEX = "index"
    """A whole number, 0 or more."""
    PORT = "port"
    """1 to 65535."""
    SECONDS = "seconds"
    """A positive number."""
    TEXT = "text"
    """Any text; may start with a dash (it holds other options)."""
    NAME = "name"
    """Text that does not start with a dash."""
    VERBOSITY = "verbosity"
    """Nothing; counts up."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``default`` is the value of an absent option; None: podrun decides at run time, as ``help`` says.

    ``repeatable`` options gather a tuple. ``choices`` lists the only values. ``config``: whether it may stand in a
    configuration file. ``ignored`` is the warning given once when the option is used: why it has no effect here.
    """

    name: str
    kind: ValueKind
    help: str
    default: object = None
    metavar: str = ""
    short: str = ""
    repeatable: bool = False
    choices: tuple[str, ...] = ()
    config: bool = True
    ignored: str = ""

    @property
    def takes_value(self) -> bool:
        """True iff the next word belongs to it."""
        return self.kind not in (ValueKind.FLAG, ValueKind.VERBOSITY)


PORT_DEFAULT = 8090
"""The port at which a V-IPU controller listens."""

_GENERAL = (
    Option("help", ValueKind.FLAG, "print this table and exit", False, short="h", config=False),
    Option("version", ValueKind.FLAG, "print the version and exit", False, config=False),
    Option(
        "version-format",
        ValueKind.NAME,
        "text, full-text or full-json; the full ones add what podrun depends on",
        "text",
        "FORMAT",
        choices=("text", "full-text", "full-json"),
        config=False,
    ),
    Option("verbose", ValueKind.VERBOSITY, "report the main steps; -vv reports every step", 0, short="v"),
    Option("vv", ValueKind.FLAG, "the same as -vv", False, config=False),
    Option("quiet", ValueKind.FLAG, "only errors and what the instances print", False),
    Option("debug", ValueKind.BOOLEAN, "as -vv, and instances dump their stacks when they crash", False),
    Option(
        "dry-run", ValueKind.FLAG, "print what would be started, and where, and exit", False, config=False
    ),
    Option(
        "import-config",
        ValueKind.NAME,
        "read options from a YAML file; those on the command line come first",
        None,
        "FILE",
        config=False,
    ),
    Option(
        "export-config",
        ValueKind.NAME,
        "write the options in effect to a YAML file, then go on",
        None,
        "FILE",
        config=False,
    ),
    Option("overwrite-config", ValueKind.BOOLEAN, "let --export-config replace a file", False, config=False),
)
_LAYOUT = (
    Option("num-replicas", ValueKind.COUNT, "replicas in all", 1, "N"),
    Option("ipus-per-replica", ValueKind.COUNT, "IPUs of each replica", 1, "N"),
    Option(
        "num-instances", ValueKind.COUNT, "host processes; replicas are divided evenly among them", 1, "N"
    ),
    Option(
        "num-ilds",
        ValueKind.COUNT,
        "IPU-Link domains to spread over (default: as few as possible)",
        None,
        "N",
    ),
    Option(
        "host",
        ValueKind.NAME,
        "hosts for the instances, divided evenly: host0,host1 or host[0-3,7] (default: this one)",
        None,
        "LIST",
        short="H",
    ),
    Option(
        "hostfile", ValueKind.NAME, "the same from a file, one host a line; not with --host", None, "FILE"
    ),
    Option("host-subnet", ValueKind.NAME, "network between hosts, as 10.1.0.0/16", None, "CIDR"),
)
_PARTITION = (
    Option(
        "vipu-server-host",
        ValueKind.NAME,
        "V-IPU server (default: $IPUOF_VIPU_API_HOST, one of yours on this host, $VIPU_CLI_API_HOST; "
        "else podrun starts one for the run)",
        None,
        "HOST",
    ),
    Option("vipu-server-port", ValueKind.PORT, f"its port (default: {PORT_DEFAULT})", None, "PORT"),
    Option("vipu-server-timeout", ValueKind.SECONDS, "how long a V-IPU request may take", 120.0, "SECONDS"),
    Option(
        "vipu-partition",
        ValueKind.NAME,
        "partition to use, or to create (default: $IPUOF_VIPU_API_PARTITION_ID, else the only one there is)",
        None,
        "NAME",
    ),
    Option(
        "vipu-partition-attempts",
        ValueKind.COUNT,
        "attempts to get it active, also while others have it",
        1,
        "N",
    ),
    Option("update-partition", ValueKind.BOOLEAN, "create it anew if it does not fit the run", False),
    Option(
        "reset-partition",
        ValueKind.BOOLEAN,
        "reset it before the run (default: yes, but no if it is reconfigurable)",
    ),
    Option("remove-partition", ValueKind.BOOLEAN, "remove it afterwards if podrun created it", True),
    Option("vipu-cluster", ValueKind.NAME, "deprecated: use --vipu-allocation", None, "NAME"),
    Option("vipu-allocation", ValueKind.NAME, "allocation to take the IPUs from", None, "NAME"),
    Option(
        "sync-type",
        ValueKind.NAME,
        "ST_POD_NATIVE_DEFAULT or ST_C2_COMPATIBLE, for a partition that is created",
        None,
        "TYPE",
    ),
    Option("offline-mode", ValueKind.BOOLEAN, "run the instances without IPUs", False),
)
_OUTPUT = (
    Option("print-topology", ValueKind.BOOLEAN, "print the table of hosts, ILDs, instances, replicas", False),
    Option(
        "only-output-from-instance",
        ValueKind.INDEX,
        "leave out what the other instances print (a failing one is still shown)",
        None,
        "INDEX",
    ),
)
_PROCESS = (
    Option(
        "executable-cache-path",
        ValueKind.NAME,
        "where instances keep compiled programs (default: the user's cache)",
        None,
        "DIR",
    ),
    Option(
        "tensorflow",
        ValueKind.NAME,
        "1 or 2: the API that `import tensorflow` gives (default: as the program uses it)",
        None,
        "VERSION",
        choices=("1", "2"),
    ),
    Option(
        "mpi-global-args",
        ValueKind.TEXT,
        "options of mpirun; --output-filename DIR, --tag-output and -x VAR[=VALUE] keep their meaning",
        (),
        "STR",
        repeatable=True,
    ),
    Option(
        "mpi-local-args",
        ValueKind.TEXT,
        "the same for each instance; -x VAR[=VALUE] and -wdir DIR keep their meaning",
        (),
        "STR",
        repeatable=True,
    ),
    Option(
        "instance-mpi-local-args",
        ValueKind.TEXT,
        "the same for one instance",
        (),
        'INDEX:"STR"',
        repeatable=True,
    ),
    Option(
        "process-placement",
        ValueKind.NAME,
        "disabled is the only strategy here: the operating system places processes",
        "disabled",
        "STRATEGY",
    ),
    Option(
        "numa-aware",
        ValueKind.BOOLEAN,
        "accepted, no effect",
        False,
        ignored="podrun leaves the placement of processes to the operating system",
    ),
    Option("allow-run-as-root", ValueKind.BOOLEAN, "accepted: podrun may always run as root", False),
    Option(
        "synchronise-python-venv",
        ValueKind.BOOLEAN,
        "accepted, no effect",
        False,
        ignored="hosts are prepared by Ray (`ray start` on each, with the same environment)",
    ),
    Option(
        "synchronise-poplar-sdk",
        ValueKind.BOOLEAN,
        "accepted, no effect",
        False,
        ignored="there is no Poplar SDK to copy",
    ),
    Option(
        "distribute-ssh-key",
        ValueKind.BOOLEAN,
        "accepted, no effect",
        False,
        ignored="podrun does not use ssh; Ray connects the hosts",
    ),
    Option(
        "max-restarts",
        ValueKind.INDEX,
        "when instances fail, do what their error needs and start all of them again, at most N times",
        None,
        "N",
    ),
    Option(
        "restart-policy",
        ValueKind.NAME,
        "file that says what is done after which failure (podrun help faults; 3 restarts if it says no number)",
        None,
        "FILE",
    ),
    Option(
        "check-replicas",
        ValueKind.INDEX,
        "have replicas compare digests of their weights every N batches; a difference is an error (podrun help faults)",
        None,
        "N",
    ),
    Option(
        "record",
        ValueKind.NAME,
        "record the run, for podrun replay, shrink, diff and incidents (podrun help records)",
        None,
        "FILE",
    ),
)
_EMULATION = (
    Option(
        "cluster",
        ValueKind.NAME,
        "the POD to emulate, by name or file, if no server runs (default: the smallest that holds the run)",
        None,
        "NAME|FILE",
    ),
    Option(
        "private",
        ValueKind.BOOLEAN,
        "start a V-IPU server for this run alone, whatever other servers this host runs",
        False,
    ),
    Option(
        "ray-address",
        ValueKind.NAME,
        "Ray cluster whose nodes hold the machines; auto: $RAY_ADDRESS, else this host's "
        "(default: auto with --host, else none)",
        None,
        "HOST:PORT",
    ),
    Option("wait", ValueKind.BOOLEAN, "wait in the V-IPU server's queue until IPUs are free", False),
    Option(
        "fault",
        ValueKind.TEXT,
        "plan a fault: ipu:5@batch=17:tile-parity, link:2-3@batch=17:down, machine:1@batch=17:lost; the launch fails "
        "unless it strikes or ends in :optional (repeatable)",
        (),
        "SPEC",
        repeatable=True,
    ),
    Option(
        "fault-plan",
        ValueKind.NAME,
        "YAML or JSON file of faults, besides those of --fault (podrun help faults)",
        None,
        "FILE",
    ),
)

SECTIONS: dict[str, tuple[Option, ...]] = {
    "General": _GENERAL,
    "Replicas, instances, hosts": _LAYOUT,
    "Partition": _PARTITION,
    "Output": _OUTPUT,
    "Processes and MPI": _PROCESS,
    "Emulation (podrun's own)": _EMULATION,
}
"""The options by the headings of ``--help``."""
OPTIONS = tuple(itertools.chain.from_iterable(SECTIONS.values()))
"""In the order of ``--help``."""

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}
