"""Every option of ``podrun``, once: the parser, ``--help``, the configuration file and docs/launcher.md come
from it.

Names, meanings and defaults follow PopRun's. The last group is podrun's own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

PORT_DEFAULT = 8090
"""Where a V-IPU controller listens."""


class Kind(enum.Enum):
    """What stands behind an option on the command line."""

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


class Group(enum.Enum):
    """Heading in ``--help``."""

    GENERAL = "General"
    LAYOUT = "Replicas, instances, hosts"
    PARTITION = "Partition"
    OUTPUT = "Output"
    PROCESS = "Processes and MPI"
    EMULATION = "Emulation (podrun's own)"


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``default`` is what an absent option means; None: decided at run time as ``help`` says.

    ``repeatable`` options gather a tuple. ``choices`` lists the only values. ``config``: may stand in a
    configuration file. ``ignored`` is the one warning given when it is used: why it does nothing here.
    """

    name: str
    kind: Kind
    group: Group
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
        return self.kind not in (Kind.FLAG, Kind.VERBOSITY)


OPTIONS: tuple[Option, ...] = (
    Option("help", Kind.FLAG, Group.GENERAL, "print this table and exit", False, short="h", config=False),
    Option("version", Kind.FLAG, Group.GENERAL, "print the version and exit", False, config=False),
    Option(
        "version-format",
        Kind.NAME,
        Group.GENERAL,
        "text, full-text or full-json; the full ones add what podrun depends on",
        "text",
        "FORMAT",
        choices=("text", "full-text", "full-json"),
        config=False,
    ),
    Option("verbose", Kind.VERBOSITY, Group.GENERAL, "say what is done; -vv says all of it", 0, short="v"),
    Option("vv", Kind.FLAG, Group.GENERAL, "the same as -vv", False, config=False),
    Option("quiet", Kind.FLAG, Group.GENERAL, "only errors and what the instances print", False),
    Option(
        "debug", Kind.BOOLEAN, Group.GENERAL, "as -vv, and instances dump their stacks when they crash", False
    ),
    Option(
        "dry-run",
        Kind.FLAG,
        Group.GENERAL,
        "print what would be started, and where, and exit",
        False,
        config=False,
    ),
    Option(
        "import-config",
        Kind.NAME,
        Group.GENERAL,
        "read options from a YAML file; those on the command line come first",
        None,
        "FILE",
        config=False,
    ),
    Option(
        "export-config",
        Kind.NAME,
        Group.GENERAL,
        "write the options in effect to a YAML file, then go on",
        None,
        "FILE",
        config=False,
    ),
    Option(
        "overwrite-config",
        Kind.BOOLEAN,
        Group.GENERAL,
        "let --export-config replace a file",
        False,
        config=False,
    ),
    # --- layout
    # -----------------------------------------------------------------------------------------------
    Option("num-replicas", Kind.COUNT, Group.LAYOUT, "replicas in all", 1, "N"),
    Option("ipus-per-replica", Kind.COUNT, Group.LAYOUT, "IPUs of each replica", 1, "N"),
    Option(
        "num-instances",
        Kind.COUNT,
        Group.LAYOUT,
        "host processes; replicas are divided evenly among them",
        1,
        "N",
    ),
    Option(
        "num-ilds",
        Kind.COUNT,
        Group.LAYOUT,
        "IPU-Link domains to spread over (default: as few as possible)",
        None,
        "N",
    ),
    Option(
        "host",
        Kind.NAME,
        Group.LAYOUT,
        "hosts for the instances, divided evenly: host0,host1 or host[0-3,7] (default: this one)",
        None,
        "LIST",
        short="H",
    ),
    Option(
        "hostfile",
        Kind.NAME,
        Group.LAYOUT,
        "the same from a file, one host a line; not with --host",
        None,
        "FILE",
    ),
    Option("host-subnet", Kind.NAME, Group.LAYOUT, "network between hosts, as 10.1.0.0/16", None, "CIDR"),
    # --- partition
    # --------------------------------------------------------------------------------------------
    Option(
        "vipu-server-host",
        Kind.NAME,
        Group.PARTITION,
        "V-IPU server (default: $IPUOF_VIPU_API_HOST, one running on this host, $VIPU_CLI_API_HOST; "
        "else podrun starts one for the run)",
        None,
        "HOST",
    ),
    Option(
        "vipu-server-port", Kind.PORT, Group.PARTITION, f"its port (default: {PORT_DEFAULT})", None, "PORT"
    ),
    Option(
        "vipu-server-timeout",
        Kind.SECONDS,
        Group.PARTITION,
        "how long a V-IPU request may take",
        120.0,
        "SECONDS",
    ),
    Option(
        "vipu-partition",
        Kind.NAME,
        Group.PARTITION,
        "partition to use, or to create (default: $IPUOF_VIPU_API_PARTITION_ID, else the only one there is)",
        None,
        "NAME",
    ),
    Option(
        "vipu-partition-attempts",
        Kind.COUNT,
        Group.PARTITION,
        "attempts to get it active, also while others have it",
        1,
        "N",
    ),
    Option(
        "update-partition", Kind.BOOLEAN, Group.PARTITION, "create it anew if it does not fit the run", False
    ),
    Option(
        "reset-partition",
        Kind.BOOLEAN,
        Group.PARTITION,
        "reset it before the run (default: yes, but no if it is reconfigurable)",
        None,
    ),
    Option(
        "remove-partition", Kind.BOOLEAN, Group.PARTITION, "remove it afterwards if podrun created it", True
    ),
    Option("vipu-cluster", Kind.NAME, Group.PARTITION, "deprecated: use --vipu-allocation", None, "NAME"),
    Option("vipu-allocation", Kind.NAME, Group.PARTITION, "allocation to take the IPUs from", None, "NAME"),
    Option(
        "sync-type",
        Kind.NAME,
        Group.PARTITION,
        "ST_POD_NATIVE_DEFAULT or ST_C2_COMPATIBLE, for a partition that is created",
        None,
        "TYPE",
    ),
    Option("offline-mode", Kind.BOOLEAN, Group.PARTITION, "run the instances without IPUs", False),
    # --- output
    # -----------------------------------------------------------------------------------------------
    Option(
        "print-topology",
        Kind.BOOLEAN,
        Group.OUTPUT,
        "print the table of hosts, ILDs, instances, replicas",
        False,
    ),
    Option(
        "only-output-from-instance",
        Kind.INDEX,
        Group.OUTPUT,
        "leave out what the other instances print (a failing one is still shown)",
        None,
        "INDEX",
    ),
    # --- processes
    # --------------------------------------------------------------------------------------------
    Option(
        "executable-cache-path",
        Kind.NAME,
        Group.PROCESS,
        "where instances keep compiled programs (default: a directory that is removed afterwards)",
        None,
        "DIR",
    ),
    Option(
        "mpi-global-args",
        Kind.TEXT,
        Group.PROCESS,
        "options of mpirun; --output-filename DIR, --tag-output and -x VAR[=VALUE] keep their meaning",
        (),
        "STR",
        repeatable=True,
    ),
    Option(
        "mpi-local-args",
        Kind.TEXT,
        Group.PROCESS,
        "the same for each instance; -x VAR[=VALUE] and -wdir DIR keep their meaning",
        (),
        "STR",
        repeatable=True,
    ),
    Option(
        "instance-mpi-local-args",
        Kind.TEXT,
        Group.PROCESS,
        "the same for one instance",
        (),
        'INDEX:"STR"',
        repeatable=True,
    ),
    Option(
        "process-placement",
        Kind.NAME,
        Group.PROCESS,
        "disabled is the only strategy here: the operating system places processes",
        "disabled",
        "STRATEGY",
    ),
    Option(
        "numa-aware",
        Kind.BOOLEAN,
        Group.PROCESS,
        "accepted, no effect",
        False,
        ignored="podrun leaves the placement of processes to the operating system",
    ),
    Option(
        "allow-run-as-root", Kind.BOOLEAN, Group.PROCESS, "accepted: podrun may always run as root", False
    ),
    Option(
        "synchronise-python-venv",
        Kind.BOOLEAN,
        Group.PROCESS,
        "accepted, no effect",
        False,
        ignored="hosts are prepared by Ray (`ray start` on each, with the same environment)",
    ),
    Option(
        "synchronise-poplar-sdk",
        Kind.BOOLEAN,
        Group.PROCESS,
        "accepted, no effect",
        False,
        ignored="there is no Poplar SDK to copy",
    ),
    Option(
        "distribute-ssh-key",
        Kind.BOOLEAN,
        Group.PROCESS,
        "accepted, no effect",
        False,
        ignored="podrun does not use ssh; Ray connects the hosts",
    ),
    # --- emulation
    # --------------------------------------------------------------------------------------------
    Option(
        "cluster",
        Kind.NAME,
        Group.EMULATION,
        "the POD to emulate, by name or file, if no server runs (default: the smallest that holds the run)",
        None,
        "NAME|FILE",
    ),
    Option(
        "ray-address",
        Kind.NAME,
        Group.EMULATION,
        "Ray cluster whose nodes hold the machines; auto: $RAY_ADDRESS, else this host's "
        "(default: auto with --host, else none)",
        None,
        "HOST:PORT",
    ),
    Option(
        "fault",
        Kind.TEXT,
        Group.EMULATION,
        "plan a fault: ipu:5@step=17:tile-parity, link:2-3@step=17:down, machine:1@step=17:lost (repeatable)",
        (),
        "SPEC",
        repeatable=True,
    ),
)
"""In the order of ``--help``."""

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}
BY_SHORT: dict[str, Option] = {option.short: option for option in OPTIONS if option.short}
