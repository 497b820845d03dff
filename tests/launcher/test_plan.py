"""Validation rules and placement."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.errors import NotFoundError, PodrunError, UsageError
from podrun.faults import parse_fault
from podrun.launcher.config_file import merge_config
from podrun.launcher.option_table import OPTIONS, Option
from podrun.launcher.options import parse_command_line
from podrun.launcher.placement import fit_to_pod
from podrun.launcher.plan import plan_launch
from podrun.launcher.program import LaunchContext
from podrun.launcher.recording import words_of
from podrun.launcher.spec import LaunchSpec, PodFacts
from podrun.record.events import Event, LaunchHeader, Record, to_lines

POD16 = PodFacts("pod16", 16, 16)
POD64 = PodFacts("pod64", 64, 64, "torus")
POD256 = PodFacts("pod256", 256, 64, "torus")
PODS = {"pod16": 16, "pod64": 64, "pod256": 256}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan")
    (path / "train.py").touch()
    (path / "folder.py").mkdir()
    (path / "tool").touch()
    return path


def plan(words: str, directory: Path, environ: dict[str, str] | None = None) -> LaunchSpec:
    line = parse_command_line([*words.split(), "train.py", "--epochs", "1"])
    context = LaunchContext(environ or {"PATH": "/bin:/usr/bin"}, str(directory), "/env/bin/python")
    return plan_launch(line.options, line.program, context)


@given(st.integers(0, 6), st.integers(0, 3), st.data())
def test_instances_own_blocks_of_replicas_and_hosts_blocks_of_instances(
    replicas_log: int, ipus_log: int, data: st.DataObject
) -> None:
    replicas = 1 << replicas_log
    instances = 1 << data.draw(st.integers(0, replicas_log))
    hosts = 1 << data.draw(st.integers(0, instances.bit_length() - 1))
    if (replicas << ipus_log) // instances > 64:
        return
    context = LaunchContext({}, "/", "python")
    names = ",".join(f"h{i}" for i in range(hosts))
    words = f"--num-replicas {replicas} --num-instances {instances} --ipus-per-replica {1 << ipus_log} -H {names} x.py"
    line = parse_command_line(words.split())
    spec = fit_to_pod(plan_launch(line.options, line.program, context), PodFacts("huge", 1 << 12, 1 << 12))
    owned = [r for i in spec.instances for r in range(i.first_replica, i.first_replica + i.replicas)]
    assert owned == list(range(replicas))
    assert [i.host for i in spec.instances] == [f"h{i * hosts // instances}" for i in range(instances)]
    for host in spec.layout.hosts:
        assert [i.local_index for i in spec.instances if i.host == host] == list(range(instances // hosts))
    assert spec.layout.ipus == replicas << ipus_log


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            "--num-replicas 10 --num-instances 4",
            "10 replicas cannot be divided evenly among 4 instances",
            "2 or 5",
        ),
        ("--num-replicas 2 --num-instances 4", "cannot be divided evenly", "--num-instances 2"),
        (
            "--num-replicas 12",
            "need 12 IPUs, and a partition has a power of two",
            "--num-replicas 8 (8 IPUs)",
        ),
        ("--num-replicas 4 --ipus-per-replica 3", "need 12 IPUs", "Make --ipus-per-replica a power of two"),
        (
            "--num-replicas 4 -H a,b,c,d --num-instances 2",
            "2 instances cannot be divided evenly among 4 hosts",
            "4",
        ),
        ("--num-replicas 8 --num-instances 2 --num-ilds 4", "among 4 IPU-Link domains", "--num-instances 4"),
        ("--num-replicas 128", "an instance would drive 128 IPUs", "--num-instances 2 or more"),
        ("--host a --hostfile f", "exclude each other", ""),
        ("--hostfile nowhere", "there is no host file nowhere", ""),
        ("--only-output-from-instance 1", "there are 1 instances", "0 to 0"),
        ("--offline-mode 1 --fault ipu:0@batch=1:tile-parity", "--fault needs IPUs", ""),
        ("--process-placement spread", "is not available", "disabled"),
        ("--host-subnet 10.0.0.300/8", "is not a network", "10.1.0.0/16"),
        ("-H a,a", "names a twice", "Name each host once"),
        ("--sync-type ST_NONE", "unknown sync type", "c2-compatible"),
        ("--vipu-partition a/b", "is no name for a partition", "letters, digits"),
        ("--ray-address ray://a:10001", "is no address of a Ray cluster", "10.0.0.1:6379"),
        ("--executable-cache-path train.py/x", "train.py is not a directory", "leave it out"),
    ],
)
def test_options_that_contradict_each_other_are_refused_with_a_hint(
    words: str, message: str, hint: str, directory: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        plan(words, directory)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("program", "kind", "message", "hint"),
    [
        ([], UsageError, "no program", "podrun --num-replicas"),
        (["trian.py"], NotFoundError, "there is no script trian.py", "Did you mean train.py?"),
        (["folder.py"], UsageError, "is a directory", ""),
        ([""], UsageError, "name is empty", "podrun --num-replicas"),
        (["no-such-command"], NotFoundError, "there is no program", "Options of podrun come before"),
        (["train"], NotFoundError, "there is no program", "Did you mean train.py?"),
        (["./tool"], NotFoundError, "there is no program", "type ./tool and make it executable (chmod +x"),
        (["/etc/passwd"], NotFoundError, "there is no program", "type /etc/passwd and"),
    ],
)
def test_programs_that_are_not_there(
    program: list[str], kind: type[PodrunError], message: str, hint: str, directory: Path
) -> None:
    context = LaunchContext({"PATH": "/bin:/usr/bin"}, str(directory), "python")
    with pytest.raises(kind) as caught:
        plan_launch({}, tuple(program), context)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_scripts_run_with_our_interpreter_and_commands_as_they_are(directory: Path) -> None:
    assert plan("", directory).instances[0].command == ("/env/bin/python", "train.py", "--epochs", "1")
    context = LaunchContext({"PATH": "/bin:/usr/bin"}, str(directory), "/env/bin/python")
    assert plan_launch({}, ("echo", "a"), context).instances[0].command == ("echo", "a")


def test_another_python_is_warned_about(directory: Path) -> None:
    context = LaunchContext({"PATH": "/bin:/usr/bin"}, str(directory), "/env/bin/python")
    spec = plan_launch({}, ("python3", "train.py"), context)
    assert any("may not find podrun" in warning for warning in spec.warnings)


def test_a_pod_that_is_too_small_is_named_with_one_that_is_not(directory: Path) -> None:
    with pytest.raises(UsageError, match="needs 32 IPUs; pod16 has 16") as caught:
        fit_to_pod(plan("--num-replicas 32", directory), POD16, lambda: PODS)
    assert caught.value.hint == "Type --cluster pod64, or fewer replicas."


def test_ipu_link_domains_follow_from_the_pod(directory: Path) -> None:
    spec = fit_to_pod(plan("--num-replicas 128 --num-instances 4", directory), POD256)
    assert spec.layout.ilds == 2
    assert [i.ild for i in spec.instances] == [0, 0, 1, 1]
    assert [i.gcd for i in spec.instances] == [0, 1, 2, 3]
    assert spec.partition is not None
    assert spec.partition.num_gcds == 4
    single = fit_to_pod(plan("--num-replicas 64 --num-instances 4", directory), POD256)
    assert single.partition is not None
    assert (single.partition.num_gcds, [i.gcd for i in single.instances]) == (1, [0, 0, 0, 0])
    spread = fit_to_pod(plan("--num-replicas 64 --num-instances 4 --num-ilds 4", directory), POD256)
    assert [i.ild for i in spread.instances] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="2 IPU-Link domains"):
        fit_to_pod(plan("--num-replicas 64 --num-instances 2 --num-ilds 2", directory), POD64)


def test_an_instance_may_not_span_ipu_link_domains(directory: Path) -> None:
    with pytest.raises(UsageError, match="cannot share evenly") as caught:
        fit_to_pod(plan("--num-replicas 32 --num-instances 1", directory), PodFacts("odd", 64, 16))
    assert "--num-instances 2" in (caught.value.hint or "")


def test_warnings_come_once_each(directory: Path) -> None:
    line = parse_command_line(
        [
            *("--numa-aware=yes", "--vipu-cluster", "c", "--mpi-global-args=--mca btl tcp --mca oob tcp"),
            *("--mpi-local-args=-x NOWHERE --bind-to none", "train.py"),
        ]
    )
    spec = plan_launch(line.options, line.program, LaunchContext({}, str(directory), "python"))
    joined = "\n".join(spec.warnings)
    assert joined.count("--mca") == 1
    for part in ("--numa-aware has no effect", "deprecated", "--bind-to", "NOWHERE"):
        assert part in joined


def test_options_after_the_program_are_said_to_be_the_programs(directory: Path) -> None:
    (warning,) = plan("train.py --num-replicas 16 --debug --vipu-partition=p", directory).warnings
    assert warning.startswith(
        "--num-replicas, --vipu-partition after the program are arguments of the program"
    )
    assert plan("--num-replicas 4 train.py --num-replicas 4 --debug --epochs 3", directory).warnings == ()


def test_partition_name_comes_from_the_environment_if_not_given(directory: Path) -> None:
    environ = {"IPUOF_VIPU_API_PARTITION_ID": "mine"}
    spec = plan("", directory, environ)
    assert spec.partition is not None
    assert spec.partition.name == "mine"
    spec = plan("--vipu-partition other", directory, environ)
    assert spec.partition is not None
    assert spec.partition.name == "other"


def test_offline_has_no_partition_and_any_number_of_replicas(directory: Path) -> None:
    spec = plan("--offline-mode on --num-replicas 6 --num-instances 3", directory)
    assert spec.partition is None
    assert [i.first_replica for i in spec.instances] == [0, 2, 4]


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.takes_value], ids=lambda o: o.name)
def test_a_wrong_value_is_refused_with_what_to_type(option: Option, directory: Path) -> None:
    """Whatever stands behind an option is taken, or refused by name with a hint: nothing else comes out of it."""
    for value in ("", "-1", "zz zz/\xe9", "1" * 30, "\n", "[", "a" * 300):
        context = LaunchContext({"PATH": "/bin:/usr/bin"}, str(directory), "python")
        refused: PodrunError | None = None
        try:
            line = parse_command_line([f"--{option.name}={value}", "train.py"])
            plan_launch(merge_config(line.options, directory), line.program, context)
        except PodrunError as error:
            refused = error
        assert refused is None or (refused.exit_code == 2 and refused.hint), value


@pytest.mark.parametrize(
    ("words", "pod", "link"),
    [
        ("--num-replicas 16", POD16, "link:1-2"),
        ("--num-replicas 16", POD16, "link:0-14"),
        ("--num-replicas 16", POD64, "link:0-14"),
        ("--num-replicas 128 --num-instances 2", POD256, "link:62-64"),
    ],
)
def test_a_fault_of_a_link_that_the_partition_does_not_have_is_refused(
    words: str, pod: PodFacts, link: str, directory: Path
) -> None:
    with pytest.raises(UsageError, match="no IPU-Link joins IPUs"):
        fit_to_pod(plan(f"{words} --fault {link}@batch=3:down", directory), pod)


def test_links_between_the_ends_exist_where_a_torus_is_filled(directory: Path) -> None:
    fitted = fit_to_pod(
        plan("--num-replicas 64 --num-instances 4 --fault link:0-62@batch=3:down", directory), POD64
    )
    assert fitted.partition is not None
    assert [fault.text for fault in fitted.partition.faults] == ["link:0-62@batch=3:down"]


def test_faults_of_the_environment_are_planned_as_those_of_the_command_line(directory: Path) -> None:
    environ = {"PATH": "/bin", "PODRUN_FAULTS": "ipu:1@step=2:trap:optional; machine:0@batch=9:lost"}
    spec = plan("--num-replicas 4 --fault ipu:3@batch=4:trap", directory, environ)
    assert spec.partition is not None
    assert [fault.text for fault in spec.partition.faults] == [
        "ipu:1@batch=2:trap:optional",
        "machine:0@batch=9:lost",
        "ipu:3@batch=4:trap",
    ]
    for wrong, message in (("ipu:9@batch=2:trap", "no IPU 9"), ("nonsense", "is not of the form")):
        with pytest.raises(UsageError, match=message):
            plan("--num-replicas 4", directory, {"PATH": "/bin", "PODRUN_FAULTS": wrong})


def test_a_record_is_a_plan_of_the_faults_that_struck(directory: Path) -> None:
    struck = Event("launch", 0, 3, "fault", {"fault": "ipu:3@batch=4:trap"})
    header = LaunchHeader(
        ("--fault-plan=old.yaml", "--", "train.py"),
        str(directory),
        (parse_fault("ipu:3@batch=4:trap"), parse_fault("ipu:1@batch=9:trap")),
    )
    file = directory / "run.record"
    file.write_text("\n".join(to_lines(Record(header, (struck, struck)))) + "\n")
    spec = plan(f"--num-replicas 4 --fault-plan {file.name}", directory)
    assert spec.partition is not None
    assert [fault.text for fault in spec.partition.faults] == ["ipu:3@batch=4:trap"]
    assert not [
        word for word in words_of({"fault-plan": "run.record", "num-replicas": 4}, ()) if "fault" in word
    ]
    file.write_text(file.read_text().replace("batch=4", "batch=5"))
    with pytest.raises(UsageError, match=r"run.record was changed: its digest is not that of its lines"):
        plan(f"--num-replicas 4 --fault-plan {file.name}", directory)


def test_every_instance_is_told_which_api_of_tensorflow_it_gives(directory: Path) -> None:
    chosen = plan("--num-replicas 2 --num-instances 2 --tensorflow 1 train.py", directory)
    assert [one.exports for one in chosen.instances] == [{"PODRUN_TENSORFLOW": "1"}] * 2
    assert plan("--num-replicas 2 train.py", directory).instances[0].exports == {}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"POPLAR_TARGET_OPTIONS": "gatewayMode=true"}, "POPLAR_TARGET_OPTIONS is not JSON"),
        ({"POPLAR_TARGET_OPTIONS": "[1]"}, "POPLAR_TARGET_OPTIONS is not a JSON object"),
        ({"PODRUN_MACHINES_PER_PROCESS": "abc"}, "PODRUN_MACHINES_PER_PROCESS is 'abc'"),
    ],
)
def test_variables_of_the_user_are_checked_before_anything_starts(
    directory: Path, variables: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        plan("--num-replicas 2", directory, {"PATH": "/bin", **variables})
    assert "Unset it" in str(refused.value.hint)
