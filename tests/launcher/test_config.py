"""Options from and to files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.errors import ConfigError, ConflictError, NotFoundError
from podrun.launcher.config_file import (
    CONFIGURABLE,
    config_text,
    current_directory,
    merge_config,
    read_options_file,
    write_options_file,
)
from podrun.launcher.options import values_in_effect


def test_the_command_line_comes_first(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("num-replicas: 16\nnum-instances: 4\nreset-partition: no\n")
    merged = merge_config({"import-config": "c.yaml", "num-instances": 2}, tmp_path)
    assert merged["num-replicas"] == 16
    assert merged["num-instances"] == 2
    assert merged["reset-partition"] is False


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "num-replicas": st.integers(1, 1024),
            "reset-partition": st.booleans(),
            "vipu-partition": st.sampled_from(["p16", "yes", "007", "a: b", "1e3", "#x"]),
            "vipu-server-timeout": st.floats(0.5, 6000).map(lambda x: round(x, 3)),
            "mpi-local-args": st.lists(st.sampled_from(["-x A", "--mca a b"]), min_size=1).map(tuple),
            "verbose": st.integers(0, 2),
        },
    )
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]
) -> None:
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    effective = values_in_effect(values)
    write_options_file(path, effective, overwrite=False)
    read = read_options_file(path)
    assert values_in_effect(read) == values_in_effect({**effective, "vv": False})


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("num-replica: 3\n", ":1: num-replica is not an option", "num-replicas"),
        ("\nnum_replicas: 3\n", ":2: num_replicas is not an option", "num-replicas"),
        ("num-replicas: many\n", ":1: num-replicas takes a whole number, not 'many'", ""),
        ("num-replicas: 3\nnum-replicas: 3\n", ":2: num-replicas is given twice", ""),
        ("num-replicas: [3]\n", ":1: num-replicas takes one value", ""),
        ("fault: {a: b}\n", ":1: fault takes one value or a list", ""),
        ("verbose: 7\n", "verbose is 0, 1 or 2", ""),
        ("import-config: other\n", "belongs on the command line", ""),
        ("- a\n", ":1: expected option: value", "num-replicas: 16"),
        ("a: [\n", "not YAML", ""),
    ],
)
def test_wrong_files_name_file_line_and_key(text: str, message: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_options_file(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_file_that_is_missing_and_one_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no configuration file"):
        read_options_file(tmp_path / "none.yaml")
    path = tmp_path / "c.yaml"
    write_options_file(path, values_in_effect({"num-replicas": 2}), overwrite=False)
    with pytest.raises(ConflictError, match="exists already"):
        write_options_file(path, values_in_effect({"num-replicas": 4}), overwrite=False)
    write_options_file(path, values_in_effect({"num-replicas": 4}), overwrite=True)
    assert read_options_file(path)["num-replicas"] == 4


def test_only_options_that_belong_in_a_file_are_written() -> None:
    text = config_text(values_in_effect({"num-replicas": 2, "dry-run": True, "import-config": "x"}))
    keys = {line.split(":")[0] for line in text.splitlines() if line and line[0] not in "#- "}
    assert keys <= set(CONFIGURABLE)
    assert "num-replicas: 2" in text


def test_a_directory_that_is_gone_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert current_directory() == str(gone)
    gone.rmdir()
    with pytest.raises(NotFoundError, match="does not exist any more") as refused:
        current_directory()
    assert refused.value.hint == "Change to another directory: cd ~"
