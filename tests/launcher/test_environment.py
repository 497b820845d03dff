"""What instances find in their environment."""

from __future__ import annotations

import json

import pytest

from podrun.core.errors import UsageError
from podrun.launcher.options import parse_command_line
from podrun.launcher.plan import plan_launch
from podrun.launcher.program import LaunchContext
from podrun.launcher.spec import (
    PartitionAddress,
    compat_directory,
    instance_environment,
    target_options,
)

OWN = {
    "PATH": "/bin",
    "HOME": "/home/me",
    "PYTHONPATH": "/mine",
    "A": "1",
    "POPDIST_NUM_LOCAL_REPLICAS": "99",
}
ADDRESS = PartitionAddress("127.0.0.1", 8090, "p16", 120.0, {"instanceSize": "4"})


def environment(words: str, index: int, *, local: bool = True, offline: bool = False) -> dict[str, str]:
    line = parse_command_line([*words.split(), "-H", "elsewhere", "x.py"])
    spec = plan_launch(line.options, line.program, LaunchContext(OWN, "/", "python"))
    return instance_environment(
        spec.layout,
        spec.instances[index],
        OWN,
        address=None if offline else ADDRESS,
        cache_path="/cache",
        launch_id="1-2",
        local=local,
    )


def test_layout_of_one_instance_of_four() -> None:
    found = environment("--num-replicas 16 --num-instances 4", 2)
    expected = {
        "POPDIST_NUM_TOTAL_REPLICAS": "16",
        "POPDIST_NUM_IPUS_PER_REPLICA": "1",
        "POPDIST_NUM_LOCAL_REPLICAS": "4",
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
        "POPDIST_REPLICA_INDEX_OFFSET": "8",
        "POPDIST_LOCAL_INSTANCE_INDEX": "2",
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "2",
        "IPUOF_VIPU_API_HOST": "127.0.0.1",
        "IPUOF_VIPU_API_PORT": "8090",
        "IPUOF_VIPU_API_PARTITION_ID": "p16",
        "IPUOF_VIPU_API_TIMEOUT": "120",
        "IPUOF_LOG_LEVEL": "WARN",
        "POPDIST_EXECUTABLE_CACHE_PATH": "/cache",
        "PODRUN_LAUNCH_ID": "1-2",
        "HOME": "/home/me",
    }
    assert expected.items() <= found.items()
    assert found["PYTHONPATH"].split(":") == [str(compat_directory()), "/mine"]
    assert json.loads(found["POPLAR_TARGET_OPTIONS"]) == {"instanceSize": "4"}


def test_offline_has_the_layout_but_no_ipus() -> None:
    found = environment("--offline-mode=1 --num-replicas 2", 0, offline=True)
    assert found["POPDIST_NUM_TOTAL_REPLICAS"] == "2"
    assert found["PODRUN_OFFLINE_MODE"] == "1"
    assert not [name for name in found if name.startswith("IPUOF_VIPU")]


def test_elsewhere_only_what_is_forwarded_and_named() -> None:
    line = ["--mpi-local-args=-x A -x B=2", "-H", "elsewhere", "x.py"]
    parsed = parse_command_line(line)
    spec = plan_launch(parsed.options, parsed.program, LaunchContext(OWN, "/", "python"))
    found = instance_environment(
        spec.layout, spec.instances[0], OWN, address=ADDRESS, cache_path="/c", launch_id="1-2", local=False
    )
    assert "HOME" not in found
    assert (found["A"], found["B"], found["PATH"]) == ("1", "2", "/bin")


def test_target_options_of_a_small_and_a_large_partition() -> None:
    assert target_options(4, 16, 4) == {
        "ipuLinkDomainSize": "4",
        "ipuLinkConfiguration": "default",
        "ipuLinkTopology": "mesh",
        "gatewayMode": "true",
        "instanceSize": "4",
    }
    large = target_options(128, 64, 32)
    assert (large["ipuLinkDomainSize"], large["ipuLinkConfiguration"]) == ("64", "slidingWindow")
    assert (large["ipuLinkTopology"], large["instanceSize"]) == ("torus", "32")


def test_the_users_target_options_come_first() -> None:
    own = {"POPLAR_TARGET_OPTIONS": '{"gatewayMode": "false", "extra": 1}'}
    options = target_options(4, 16, 4, environ=own)
    assert options["gatewayMode"] == "false"
    assert options["extra"] == "1"
    for wrong in ("{", "[]"):
        with pytest.raises(UsageError, match="POPLAR_TARGET_OPTIONS"):
            target_options(4, 16, 4, environ={"POPLAR_TARGET_OPTIONS": wrong})
