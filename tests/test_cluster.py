"""Descriptions of PODs: the shipped ones, and errors about wrong files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from podrun.core import cluster_file
from podrun.core.cluster import GatewayTopology, LinkTopology, cluster_names, config_directory, ladder_links
from podrun.core.cluster_file import load_cluster
from podrun.core.errors import ConfigError, NotFoundError

SIZES = {"ipu-m2000": 4, "pod16": 16, "pod64": 64, "pod128": 128, "pod256": 256}
BOW = {"bow-2000": 4, "bow-pod16": 16, "bow-pod64": 64, "bow-pod128": 128, "bow-pod256": 256}


def test_the_pods_that_ship() -> None:
    assert cluster_names() == [*SIZES, *BOW]


@pytest.mark.parametrize(("name", "ipus"), [*SIZES.items(), *BOW.items()])
def test_each_pod_holds_together(name: str, ipus: int) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.ipu_count == ipus
    assert cluster.target == ("bow" if name in BOW else "gc200")
    assert [agent.index for agent in cluster.agents] == list(range(ipus // 4))
    assert len({agent.host for agent in cluster.agents}) == len(cluster.agents)
    assert len({agent.serial for agent in cluster.agents}) == len(cluster.agents)
    assert sum(ild.ipu_count for ild in cluster.ilds) == ipus
    assert all(ild.ipu_count == cluster.topology.ild_ipus for ild in cluster.ilds)
    assert (cluster.topology.gateway is GatewayTopology.NONE) == (len(cluster.ilds) == 1)
    assert [name for a in cluster.allocations for name in a.agents] == [agent.id for agent in cluster.agents]
    assert cluster.gateway_memory_bytes == 128 << 30


def test_no_launch_needs_the_schema_for_the_pods_that_ship(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = sorted(config_directory().glob("*.yaml"))
    digests = {cluster_file.text_digest(file.read_text(encoding="utf-8")): file.stem for file in files}
    assert digests.keys() == cluster_file.CHECKED, f"descriptions have changed: their digests are {digests}"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "podrun.core.cluster_schema", None)
        pods = [load_cluster(file) for file in files]
        edited = tmp_path / "mine.yaml"
        edited.write_text(GOOD.replace("count: 4", "count: 0"), encoding="utf-8")
        with pytest.raises(ImportError):
            load_cluster(edited)
    monkeypatch.setattr(cluster_file, "CHECKED", frozenset())
    assert [load_cluster(file) for file in files] == pods


def test_serials_name_the_board() -> None:
    agent = load_cluster("pod16").agents[1]
    assert [agent.board_serial(number) for number in (3, 2, 1, 0)] == [
        "0024.0002.8203102",
        "0024.0002.8203102",
        "0024.0001.8203102",
        "0024.0001.8203102",
    ]


def test_links_are_a_ladder_and_a_torus_joins_its_ends() -> None:
    assert ladder_links(4, LinkTopology.MESH) == [(0, 1), (2, 3), (0, 2), (1, 3)]
    mesh, torus = ladder_links(64, LinkTopology.MESH), ladder_links(64, LinkTopology.TORUS)
    assert set(torus) - set(mesh) == {(0, 62), (1, 63)}
    ends = [ipu for link in torus for ipu in link]
    assert {ends.count(ipu) for ipu in range(64)} == {3}
    pod = load_cluster("pod128")
    assert all(a // 64 == b // 64 for a, b in pod.ipu_links())


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(NotFoundError, match="unknown cluster 'pod61'") as caught:
        load_cluster("pod61")
    assert "Did you mean pod64?" in str(caught.value.hint) or "Did you mean pod16?" in str(caught.value.hint)
    with pytest.raises(NotFoundError, match="no cluster file"):
        load_cluster("nowhere/pod.yaml")


GOOD = (config_directory() / "pod16.yaml").read_text(encoding="utf-8")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        GOOD.replace("name: pod16", "name: mine")
        .replace("count: 4", "count: 2")
        .replace("size: 16", "size: 8")
    )
    cluster = load_cluster(path)
    assert (cluster.name, cluster.ipu_count) == ("mine", 8)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("target: gc200", "target: gc300", 5, "target is 'gc300'; expected 'gc200' or 'bow'"),
        ("target: gc200", "tarket: gc200", 5, "tarket is no key of a POD description; did you mean target?"),
        ("  model: IPU-M2000\n", "", 6, "machine.model is missing"),
        ("topology: mesh", "topology: ring", 10, "ipu_links.topology is 'ring'; expected 'mesh' or 'torus'"),
        ("domain_size: 16", "domain_size: 12", 11, "expected a power of two"),
        (
            "domain_size: 16",
            "domain_size: 128",
            11,
            "ipu_links.domain_size is 128; expected less than or equal to 64",
        ),
        ("domain_size: 16", "domain_size: 32", 11, "does not divide the 16 IPUs"),
        ("domain_size: 16", "domain_size: 8", 13, "expected looped"),
        ("topology: none", "topology: looped", 13, "expected none"),
        ("count: 4", "count: four", 15, "agents[0].count is 'four'; expected a valid integer"),
        ('id: "ipum{n}"', 'id: "ipum"', 16, "expected a different name for each agent"),
        ('id: "ipum{n}"', 'id: "ipum{m}"', 16, "has {m}; expected {n}, {ild} or {position}"),
        ("82031{n:2}", "82031", 19, "expected NNNN.{board}.YYYYYYY"),
        ("agents: all", "agents: [ipum1, ipum9]", 22, "names 'ipum9', which is no agent"),
        ("target: gc200", "target: gc200\ntarget: bow", 6, "target is there twice"),
        ("target: gc200", "target: [gc200", 6, "not YAML"),
    ],
)
def test_a_wrong_file_names_line_key_and_what_was_expected(
    tmp_path: Path, old: str, new: str, line: int, words: str
) -> None:
    assert old in GOOD
    path = tmp_path / "wrong.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert caught.value.message.startswith(f"{path}:{line}: "), caught.value.message
    assert words in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words\n", "name: [1\n"])
def test_files_that_are_nothing_like_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"wrong\.yaml:\d+: "):
        load_cluster(path)
