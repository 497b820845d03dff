"""Host lists and mpirun's options."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.errors import UsageError
from podrun.launcher.host_names import parse_hosts, read_hostfile
from podrun.launcher.mpi_arguments import parse_instance_arguments, parse_mpi_arguments


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("host0,host1", ["host0", "host1"]),
        ("host[0-2,4]", ["host0", "host1", "host2", "host4"]),
        ("n[08-10].rack,login", ["n08.rack", "n09.rack", "n10.rack", "login"]),
        ("10.1.0.1", ["10.1.0.1"]),
        ("::1", ["::1"]),
    ],
)
def test_host_lists_with_ranges_are_read(text: str, hosts: list[str]) -> None:
    assert list(parse_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,,b", "a[", "a[1-]", "a[3-1]", "a[x]", "a b", "a,a", "h[0-99999]", "-a"]
)
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_hosts(text)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True))
def test_ranges_are_what_they_list(numbers: list[int]) -> None:
    inside = ",".join(map(str, numbers))
    assert parse_hosts(f"h[{inside}]x") == tuple(f"h{n}x" for n in numbers)


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# mine\nhost0\n  host1  # second\n\n")
    assert read_hostfile(path) == ("host0", "host1")
    path.write_text("host0\nbad name\n")
    with pytest.raises(UsageError, match=":2: 'bad name'"):
        read_hostfile(path)
    path.write_text("# none\n")
    with pytest.raises(UsageError, match="names no host"):
        read_hostfile(path)


def test_mpi_options_with_a_meaning() -> None:
    read = parse_mpi_arguments(
        [
            "-x A -x B=1 --mca btl_tcp_if_include 10.1.0.0/16",
            "--output-filename out -wdir 'a b' --tag-output",
        ],
        "--m",
    )
    assert read.exports == {"A": None, "B": "1"}
    assert read.output_directory == "out"
    assert read.working_directory == "a b"
    assert read.without_effect == ("--mca",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-x", "needs 1 more word"),
        ("--mca a", "needs 2 more words"),
        ("-x 1A", "not a variable name"),
        ("-x A=1 -x A=2", "gives A two values"),
        ("-x POPDIST_NUM_LOCAL_REPLICAS=3", "podrun sets for each instance"),
        ("-x OMPI_COMM_WORLD_RANK", "podrun sets for each instance"),
        ("'open", "cannot be read"),
        ("train.py", "not an option of mpirun"),
    ],
)
def test_mpi_options_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_mpi_arguments([text], "--mpi-local-args")


def test_arguments_of_one_instance() -> None:
    read = parse_instance_arguments(['1:"-x A=1"', "1:-x B=2", "0:-x A=3"], 2)
    assert read[1].exports == {"A": "1", "B": "2"}
    assert read[0].exports == {"A": "3"}
    with pytest.raises(UsageError, match="names instance 2; there are 2"):
        parse_instance_arguments(["2:-x A"], 2)
    with pytest.raises(UsageError, match="takes INDEX"):
        parse_instance_arguments(["-x A"], 2)
