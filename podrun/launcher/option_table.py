"""Every option of ``podrun``, once: the parser, ``--help``, the configuration file and docs/launcher.md come
from it.

Names, meanings and defaults follow PopRun's. The last group is podrun's own.
"""

from __future__ import annotations

from podrun.launcher.option_kinds import Option, Section, ValueKind

PORT_DEFAULT = 8090
"""The port at which a V-IPU controller listens."""


OPTIONS: tuple[Option, ...] = (
    Option(
        "help", ValueKind.FLAG, Section.GENERAL, "print this table and exit", False, short="h", config=False
    ),
    Option("version", ValueKind.FLAG, Section.GENERAL, "print the version and exit", False, config=False),
    Option(
        "version-format",
        ValueKind.NAME,
        Section.GENERAL,
        "text, full-text or full-json; the full ones add what podrun depends on",
        "text",
        "FORMAT",
        choices=("text", "full-text", "full-json"),
        config=False,
    ),
    Option(
        "verbose",
        ValueKind.VERBOSITY,
        Section.GENERAL,
        "report the main steps; -vv reports every step",
        0,
        short="v",
    ),
    Option("vv", ValueKind.FLAG, Section.GENERAL, "the same as -vv", False, config=False),
    Option("quiet", ValueKind.FLAG, Section.GENERAL, "only errors and what the instances print", False),
    Option(
        "debug",
        ValueKind.BOOLEAN,
        Section.GENERAL,
        "as -vv, and instances dump their stacks when they crash",
        False,
    ),
    Option(
        "dry-run",
        ValueKind.FLAG,
        Section.GENERAL,
        "print what would be started, and where, and exit",
        False,
        config=False,
    ),
    Option(
        "import-config",
        ValueKind.NAME,
        Section.GENERAL,
        "read options from a YAML file; those on the command line come first",
        None,
        "FILE",
        config=False,
    ),
    Option(
        "export-config",
        ValueKind.NAME,
        Section.GENERAL,
        "write the options in effect to a YAML file, then go on",
        None,
        "FILE",
        config=False,
    ),
    Option(
        "overwrite-config",
        ValueKind.BOOLEAN,
        Section.GENERAL,
        "let --export-config replace a file",
        False,
        config=False,
    ),
    # --- layout
    # -----------------------------------------------------------------------------------------------
    Option("num-replicas", ValueKind.COUNT, Section.LAYOUT, "replicas in all", 1, "N"),
    Option("ipus-per-replica", ValueKind.COUNT, Section.LAYOUT, "IPUs of each replica", 1, "N"),
    Option(
        "num-instances",
        ValueKind.COUNT,
        Section.LAYOUT,
        "host processes; replicas are divided evenly among them",
        1,
        "N",
    ),
    Option(
        "num-ilds",
        ValueKind.COUNT,
        Section.LAYOUT,
        "IPU-Link domains to spread over (default: as few as possible)",
        None,
        "N",
    ),
    Option(
        "host",
        ValueKind.NAME,
        Section.LAYOUT,
        "hosts for the instances, divided evenly: host0,host1 or host[0-3,7] (default: this one)",
        None,
        "LIST",
        short="H",
    ),
    Option(
        "hostfile",
        ValueKind.NAME,
        Section.LAYOUT,
        "the same from a file, one host a line; not with --host",
        None,
        "FILE",
    ),
    Option(
        "host-subnet", ValueKind.NAME, Section.LAYOUT, "network between hosts, as 10.1.0.0/16", None, "CIDR"
    ),
    # --- partition
    # --------------------------------------------------------------------------------------------
    Option(
        "vipu-server-host",
        ValueKind.NAME,
        Section.PARTITION,
        "V-IPU server (default: $IPUOF_VIPU_API_HOST, one of yours on this host, $VIPU_CLI_API_HOST; "
        "else podrun starts one for the run)",
        None,
        "HOST",
    ),
    Option(
        "vipu-server-port",
        ValueKind.PORT,
        Section.PARTITION,
        f"its port (default: {PORT_DEFAULT})",
        None,
        "PORT",
    ),
    Option(
        "vipu-server-timeout",
        ValueKind.SECONDS,
        Section.PARTITION,
        "how long a V-IPU request may take",
        120.0,
        "SECONDS",
    ),
    Option(
        "vipu-partition",
        ValueKind.NAME,
        Section.PARTITION,
        "partition to use, or to create (default: $IPUOF_VIPU_API_PARTITION_ID, else the only one there is)",
        None,
        "NAME",
    ),
    Option(
        "vipu-partition-attempts",
        ValueKind.COUNT,
        Section.PARTITION,
        "attempts to get it active, also while others have it",
        1,
        "N",
    ),
    Option(
        "update-partition",
        ValueKind.BOOLEAN,
        Section.PARTITION,
        "create it anew if it does not fit the run",
        False,
    ),
    Option(
        "reset-partition",
        ValueKind.BOOLEAN,
        Section.PARTITION,
        "reset it before the run (default: yes, but no if it is reconfigurable)",
        None,
    ),
    Option(
        "remove-partition",
        ValueKind.BOOLEAN,
        Section.PARTITION,
        "remove it afterwards if podrun created it",
        True,
    ),
    Option(
        "vipu-cluster", ValueKind.NAME, Section.PARTITION, "deprecated: use --vipu-allocation", None, "NAME"
    ),
    Option(
        "vipu-allocation", ValueKind.NAME, Section.PARTITION, "allocation to take the IPUs from", None, "NAME"
    ),
    Option(
        "sync-type",
        ValueKind.NAME,
        Section.PARTITION,
        "ST_POD_NATIVE_DEFAULT or ST_C2_COMPATIBLE, for a partition that is created",
        None,
        "TYPE",
    ),
    Option("offline-mode", ValueKind.BOOLEAN, Section.PARTITION, "run the instances without IPUs", False),
    # --- output
    # -----------------------------------------------------------------------------------------------
    Option(
        "print-topology",
        ValueKind.BOOLEAN,
        Section.OUTPUT,
        "print the table of hosts, ILDs, instances, replicas",
        False,
    ),
    Option(
        "only-output-from-instance",
        ValueKind.INDEX,
        Section.OUTPUT,
        "leave out what the other instances print (a failing one is still shown)",
        None,
        "INDEX",
    ),
    # --- processes
    # --------------------------------------------------------------------------------------------
    Option(
        "executable-cache-path",
        ValueKind.NAME,
        Section.PROCESS,
        "where instances keep compiled programs (default: a directory that is removed afterwards)",
        None,
        "DIR",
    ),
    Option(
        "tensorflow",
        ValueKind.NAME,
        Section.PROCESS,
        "1 or 2: the API that `import tensorflow` gives (default: as the program uses it)",
        None,
        "VERSION",
        choices=("1", "2"),
    ),
    Option(
        "mpi-global-args",
        ValueKind.TEXT,
        Section.PROCESS,
        "options of mpirun; --output-filename DIR, --tag-output and -x VAR[=VALUE] keep their meaning",
        (),
        "STR",
        repeatable=True,
    ),
    Option(
        "mpi-local-args",
        ValueKind.TEXT,
        Section.PROCESS,
        "the same for each instance; -x VAR[=VALUE] and -wdir DIR keep their meaning",
        (),
        "STR",
        repeatable=True,
    ),
    Option(
        "instance-mpi-local-args",
        ValueKind.TEXT,
        Section.PROCESS,
        "the same for one instance",
        (),
        'INDEX:"STR"',
        repeatable=True,
    ),
    Option(
        "process-placement",
        ValueKind.NAME,
        Section.PROCESS,
        "disabled is the only strategy here: the operating system places processes",
        "disabled",
        "STRATEGY",
    ),
    Option(
        "numa-aware",
        ValueKind.BOOLEAN,
        Section.PROCESS,
        "accepted, no effect",
        False,
        ignored="podrun leaves the placement of processes to the operating system",
    ),
    Option(
        "allow-run-as-root",
        ValueKind.BOOLEAN,
        Section.PROCESS,
        "accepted: podrun may always run as root",
        False,
    ),
    Option(
        "synchronise-python-venv",
        ValueKind.BOOLEAN,
        Section.PROCESS,
        "accepted, no effect",
        False,
        ignored="hosts are prepared by Ray (`ray start` on each, with the same environment)",
    ),
    Option(
        "synchronise-poplar-sdk",
        ValueKind.BOOLEAN,
        Section.PROCESS,
        "accepted, no effect",
        False,
        ignored="there is no Poplar SDK to copy",
    ),
    Option(
        "distribute-ssh-key",
        ValueKind.BOOLEAN,
        Section.PROCESS,
        "accepted, no effect",
        False,
        ignored="podrun does not use ssh; Ray connects the hosts",
    ),
    Option(
        "max-restarts",
        ValueKind.INDEX,
        Section.PROCESS,
        "when instances fail, do what their error needs and start all of them again, at most N times",
        None,
        "N",
    ),
    Option(
        "restart-policy",
        ValueKind.NAME,
        Section.PROCESS,
        "file that says what is done after which failure (podrun help faults; 3 restarts if it says no number)",
        None,
        "FILE",
    ),
    Option(
        "check-replicas",
        ValueKind.INDEX,
        Section.PROCESS,
        "have replicas compare digests of their weights every N batches; a difference is an error (podrun help faults)",
        None,
        "N",
    ),
    Option(
        "record",
        ValueKind.NAME,
        Section.PROCESS,
        "record the run, for podrun replay, shrink, diff and incidents (podrun help records)",
        None,
        "FILE",
    ),
    # --- emulation
    # --------------------------------------------------------------------------------------------
    Option(
        "cluster",
        ValueKind.NAME,
        Section.EMULATION,
        "the POD to emulate, by name or file, if no server runs (default: the smallest that holds the run)",
        None,
        "NAME|FILE",
    ),
    Option(
        "private",
        ValueKind.BOOLEAN,
        Section.EMULATION,
        "start a V-IPU server for this run alone, whatever other servers this host runs",
        False,
    ),
    Option(
        "ray-address",
        ValueKind.NAME,
        Section.EMULATION,
        "Ray cluster whose nodes hold the machines; auto: $RAY_ADDRESS, else this host's "
        "(default: auto with --host, else none)",
        None,
        "HOST:PORT",
    ),
    Option(
        "wait",
        ValueKind.BOOLEAN,
        Section.EMULATION,
        "wait in the V-IPU server's queue until IPUs are free",
        False,
    ),
    Option(
        "fault",
        ValueKind.TEXT,
        Section.EMULATION,
        "plan a fault: ipu:5@batch=17:tile-parity, link:2-3@batch=17:down, machine:1@batch=17:lost; the launch fails "
        "unless it strikes or ends in :optional (repeatable)",
        (),
        "SPEC",
        repeatable=True,
    ),
    Option(
        "fault-plan",
        ValueKind.NAME,
        Section.EMULATION,
        "YAML or JSON file of faults, besides those of --fault (podrun help faults)",
        None,
        "FILE",
    ),
)
"""In the order of ``--help``."""

BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}
