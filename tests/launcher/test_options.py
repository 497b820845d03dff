"""The command line's grammar."""

from __future__ import annotations

from string import ascii_lowercase as LETTERS

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.errors import UsageError
from podrun.launcher.help_text import default_text, help_text
from podrun.launcher.option_table import BY_NAME, OPTIONS, Option, ValueKind
from podrun.launcher.option_words import OptionTable
from podrun.launcher.options import (
    nearest_option,
    parse_command_line,
    show_value,
    values_in_effect,
)
from tests.conftest import CHARACTERS

REFERENCE_DEFAULTS = {
    "num-replicas": 1,
    "ipus-per-replica": 1,
    "num-instances": 1,
    "vipu-server-timeout": 120,
    "vipu-partition-attempts": 1,
    "update-partition": False,
    "reset-partition": None,
    "remove-partition": True,
    "print-topology": False,
    "offline-mode": False,
    "overwrite-config": False,
    "allow-run-as-root": False,
    "version-format": "text",
}
REFERENCE_OPTIONS = [
    *REFERENCE_DEFAULTS,
    *(
        "help",
        "version",
        "import-config",
        "export-config",
        "debug",
        "host",
        "hostfile",
        "num-ilds",
        "verbose",
        "vv",
    ),
    *(
        "vipu-server-host",
        "vipu-server-port",
        "vipu-partition",
        "vipu-cluster",
        "vipu-allocation",
        "sync-type",
    ),
    *("executable-cache-path", "tensorflow"),
    *("mpi-global-args", "mpi-local-args", "instance-mpi-local-args", "numa-aware"),
    *("process-placement", "only-output-from-instance", "host-subnet", "synchronise-python-venv"),
    *("synchronise-poplar-sdk", "distribute-ssh-key"),
    *("fault", "cluster", "private", "ray-address", "dry-run", "quiet"),
    *("max-restarts", "restart-policy", "record", "wait", "fault-plan", "check-replicas"),
]


def test_the_whole_option_table_is_there_with_its_defaults() -> None:
    assert {option.name for option in OPTIONS} == set(REFERENCE_OPTIONS)
    for name, default in REFERENCE_DEFAULTS.items():
        assert BY_NAME[name].default == default, name


@pytest.mark.parametrize(
    ("words", "expected", "program"),
    [
        (["--num-replicas", "4", "x.py"], {"num-replicas": 4}, ("x.py",)),
        (["--num-replicas=4", "x.py", "--num-replicas=5"], {"num-replicas": 4}, ("x.py", "--num-replicas=5")),
        (["--num-rep", "4", "x"], {"num-replicas": 4}, ("x",)),
        (["--num-instance=4", "x"], {"num-instances": 4}, ("x",)),
        (["-H", "a,b", "x"], {"host": "a,b"}, ("x",)),
        (["-Ha,b", "x"], {"host": "a,b"}, ("x",)),
        (["-H=a", "x"], {"host": "a"}, ("x",)),
        (["--num-replicas=5", "--", "-x=1", "--num-r"], {"num-replicas": 5}, ("-x=1", "--num-r")),
        (
            ["--mpi-local-args", "-H=a", "--mpi-local", "--num-rep", "x"],
            {"mpi-local-args": ("-H=a", "--num-rep")},
            ("x",),
        ),
        (
            ["--mpi-local-args", "--dry-run=no", "x", "-H=b"],
            {"mpi-local-args": ("--dry-run=no",)},
            ("x", "-H=b"),
        ),
        (["-vv", "x"], {"verbose": 2}, ("x",)),
        (["-v", "-v", "x"], {"verbose": 2}, ("x",)),
        (["--vv", "x"], {"vv": True}, ("x",)),
        (["--verbose", "x"], {"verbose": 1}, ("x",)),
        (["--dry-run=no", "x"], {"dry-run": False}, ("x",)),
        (["--", "-strange"], {}, ("-strange",)),
        (["--mpi-local-args", "-x A", "x"], {"mpi-local-args": ("-x A",)}, ("x",)),
        (
            ["--mpi-global-args=--tag-output", "--mpi-global-args", "--mca a b", "x"],
            {"mpi-global-args": ("--tag-output", "--mca a b")},
            ("x",),
        ),
        (["--fault", "ipu:5@batch=17:tile-parity", "x"], {"fault": ("ipu:5@batch=17:tile-parity",)}, ("x",)),
        (["--num-replicas", "4", "--num-replicas", "4", "x"], {"num-replicas": 4}, ("x",)),
        (["--vipu-server-timeout", "0.5", "x"], {"vipu-server-timeout": 0.5}, ("x",)),
        ([], {}, ()),
    ],
)
def test_command_lines_give_their_options_and_the_program(
    words: list[str], expected: dict[str, object], program: tuple[str, ...]
) -> None:
    line = parse_command_line(words)
    assert dict(line.options) == expected
    assert line.program == program


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--num-replica-s", "3"], "unknown option --num-replica-s", "Did you mean --num-replicas?"),
        (["--num_replicas", "3"], "unknown option --num_replicas", "Did you mean --num-replicas?"),
        (["--num_instance=3"], "unknown option --num_instance", "Did you mean --num-instances?"),
        (["--PARTITON", "x"], "unknown option --PARTITON", "--vipu-partition"),
        (["--xyzzy"], "unknown option --xyzzy", "podrun --help"),
        (["-q"], "unknown option -q", "--quiet"),
        (["-np", "4"], "unknown option -np", "Did you mean --num-instances?"),
        (["-v3"], "unknown option -v3", ""),
        (["-q=1"], "unknown option -q=1", "podrun --help"),
        (["-z"], "unknown option -z", "podrun --help"),
        (["--num", "3"], "--num could be --num-replicas, --num-instances", "Type more"),
        (["--vipu-server-host=a", "--vipu-server-host=b"], "given twice, with a and with b", "=b"),
        (["--num-replicas"], "--num-replicas needs a value", "--num-replicas=4"),
        (["--num-replicas", "--dry-run", "x"], "--dry-run is another option", "--num-replicas=4"),
        (["--num-replicas", "four"], "takes a whole number, not 'four'", "--num-replicas=4"),
        (["--num-replicas", "0"], "it can be 1 to", ""),
        (["--num-replicas", "-4"], "it can be 1 to", ""),
        (["--vipu-server-port", "70000"], "it can be 1 to 65535", ""),
        (["--vipu-server-timeout", "nan"], "it can be more than 0", ""),
        (["--reset-partition", "x.py"], "takes yes or no, not 'x.py'", "--reset-partition=yes"),
        (["--version-format", "yaml"], "cannot be 'yaml'", "full-json"),
        (["--vipu-partition="], "this one is empty", "NAME"),
        (["--verbose=3"], "takes no value", "-vv"),
    ],
)
def test_command_lines_that_cannot_be_read_are_refused_with_a_hint(
    words: list[str], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse_command_line(words)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("word", ["yes", "on", "1", "true", "YES", "True"])
def test_words_for_true_switch_an_option_on(word: str) -> None:
    assert parse_command_line([f"--offline-mode={word}"]).options == {"offline-mode": True}


@pytest.mark.parametrize("word", ["no", "off", "0", "false", "Off"])
def test_words_for_false_switch_an_option_off(word: str) -> None:
    assert parse_command_line(["--offline-mode", word]).options == {"offline-mode": False}


def _value(option: Option) -> st.SearchStrategy[object]:
    if option.choices:
        return st.sampled_from(option.choices)
    match option.kind:
        case ValueKind.BOOLEAN:
            return st.booleans()
        case ValueKind.COUNT | ValueKind.PORT:
            return st.integers(1, 65535)
        case ValueKind.INDEX:
            return st.integers(0, 65535)
        case ValueKind.SECONDS:
            return st.floats(0.001, 1e6).map(lambda x: float(f"{x:.3f}"))
        case _:
            return st.builds(
                str.__add__, st.sampled_from(LETTERS), st.text(LETTERS + "0123456789=:@/. -", max_size=12)
            )


VALUED = [option for option in OPTIONS if option.takes_value]


@given(
    st.lists(st.sampled_from(VALUED), unique_by=lambda o: o.name).flatmap(
        lambda options: st.tuples(*[st.tuples(st.just(o), _value(o), st.booleans()) for o in options])
    ),
    st.lists(st.text(CHARACTERS, min_size=1)),
)
def test_what_is_written_is_what_is_read(
    chosen: tuple[tuple[Option, object, bool], ...], rest: list[str]
) -> None:
    words: list[str] = []
    for option, value, joined in chosen:
        text = show_value(value)
        words += [f"--{option.name}={text}"] if joined else [f"--{option.name}", text]
    line = parse_command_line([*words, "program", *rest])
    assert line.program == ("program", *rest)
    assert line.options == {o.name: (v,) if o.repeatable else v for o, v, _ in chosen}


@given(st.sampled_from(OPTIONS), st.data())
def test_a_beginning_is_the_option_or_ambiguous_or_another_ones_name(
    option: Option, data: st.DataObject
) -> None:
    start = option.name[: data.draw(st.integers(1, len(option.name)))]
    sharing = [o.name for o in OPTIONS if o.name.startswith(start)]
    matches = OptionTable(OPTIONS).matches(start)
    if start in sharing or len(sharing) == 1:
        assert [o.name in sharing for o in matches] == [True]
    else:
        with pytest.raises(UsageError, match="could be"):
            parse_command_line([f"--{start}"])


@given(st.sampled_from(OPTIONS).filter(lambda o: len(o.name) > 4), st.data())
def test_one_letter_missing_is_understood_as_a_typing_error(option: Option, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(option.name) - 2))
    assert nearest_option(option.name[:at] + option.name[at + 1 :]) is not None


def test_settle_fills_in_defaults_and_counts_verbosity() -> None:
    assert values_in_effect({})["num-replicas"] == 1
    assert values_in_effect({"vv": True})["verbose"] == 2
    assert values_in_effect({"debug": True})["verbose"] == 2
    assert values_in_effect({"verbose": 5})["verbose"] == 2
    with pytest.raises(UsageError, match="exclude each other"):
        values_in_effect({"quiet": True, "verbose": 1})


def test_help_stays_readable_whatever_columns_says() -> None:
    assert help_text(1) == help_text(40)


def test_help_names_every_option_with_its_default() -> None:
    text = help_text(100)
    assert max(map(len, text.splitlines())) <= 100
    for option in OPTIONS:
        assert f"--{option.name}" in text
        if default_text(option):
            joined = " ".join(text.split())
            assert f"(default: {default_text(option)})" in joined
