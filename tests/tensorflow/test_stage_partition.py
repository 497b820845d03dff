"""Layers divided into stages: against all divisions, and what layers of small models read, write and carry."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
CONFIG = {"memoryProportion": 0.5, "usePoplarEstimation": True}


def drawn_profile(random: np.random.RandomState, count: int) -> dict[str, Any]:
    from podrun.tensorflow.keras.stage_partition import empty_layer_profile

    layers = []
    for number in range(count):
        layer = empty_layer_profile()
        layer["cycle"]["forward"] = int(random.randint(1, 100))
        layer["memory"] |= {
            "shared": {f"code_{number % 2}": 1024**2}, "exclusive": {"weights": int(random.randint(0, 3)) * 1024**2},
            "inputs": int(random.randint(0, 60)), "outputs": int(random.randint(0, 60)),
        }  # fmt: skip
        layers.append(layer)
    names = [str(number) for number in range(count)]
    names[1] = names[2]  # Called twice: both calls are in one stage.
    return {"layerName": names, "layerType": names, "layerInfo": layers}


def division_cost(profile: dict[str, Any], cluster: dict[str, Any], limits: tuple[int, ...]) -> int | None:
    """The slowest stage and exchange of a division, in plain words; None if it is not possible."""
    layers = profile["layerInfo"]
    # A link gives 2 bytes in a cycle after 5 cycles, and takes 1 byte after 3.
    entering = [3 + layer["memory"]["inputs"] for layer in layers]
    leaving = [5 + layer["memory"]["outputs"] // 2 for layer in layers]
    slowest, exchange, last = 0, 0, len(limits) - 2
    for ipu, (start, end) in enumerate(itertools.pairwise(limits)):
        own = layers[start:end]
        shared = {name for layer in own for name in layer["memory"]["shared"]}
        held = len(shared) + sum(layer["memory"]["exclusive"]["weights"] for layer in own) // 1024**2
        if held > cluster["memory"] // 2 or {1, 2} & set(range(start, end)) in ({1}, {2}):
            return None
        slowest = max(slowest, sum(layer["cycle"]["forward"] for layer in own))
        between = (entering[start] if ipu else 0) + (leaving[end - 1] if ipu < last else 0)
        exchange = max(exchange, entering[0] + leaving[-1] + between)
    return slowest + exchange


def test_a_division_is_the_best_of_all() -> None:
    from podrun.tensorflow.keras.stage_partition import partition_by_cycles

    random, impossible = np.random.RandomState(2), 0
    for _ in range(30):
        count, ipus = int(random.randint(5, 8)), int(random.randint(2, 4))
        profile = drawn_profile(random, count)
        link = {"recvGBps": 1, "recvIdleCycle": 3, "sendGBps": 2, "sendIdleCycle": 5}
        cluster = {"clock": 1024**3, "memory": int(random.randint(5, 20)), "connection": [link] * ipus}
        divisions = [(0, *inner, count) for inner in itertools.combinations(range(1, count), ipus - 1)]
        costs = [c for d in divisions if (c := division_cost(profile, cluster, d)) is not None]
        if not costs:
            impossible += 1
            with pytest.raises(ValueError, match="take more of them"):
                partition_by_cycles(profile, cluster, CONFIG)
            continue
        chosen = partition_by_cycles(profile, cluster, CONFIG)
        assert division_cost(profile, cluster, tuple(chosen)) == min(costs)
    assert 0 < impossible < 30


def test_few_limits_of_many_layers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from podrun.tensorflow.keras import stage_partition

    random, plain, tried = np.random.RandomState(3), stage_partition._fastest_division, []

    def counted(costs: np.ndarray) -> tuple[int, list[int]]:
        tried.append(costs)
        return plain(costs)

    monkeypatch.setattr(stage_partition, "_fastest_division", counted)
    profile = drawn_profile(random, 40)
    for layer in profile["layerInfo"]:
        layer["memory"] |= {"inputs": int(random.randint(2000)), "outputs": int(random.randint(2000))}
        layer["cycle"]["forward"] = int(random.randint(100, 10000))
    link = {"recvGBps": 1, "recvIdleCycle": 3, "sendGBps": 2, "sendIdleCycle": 5}
    cluster = {"clock": 1024**3, "memory": 400, "connection": [link] * 3}
    starts = stage_partition.partition_by_cycles(profile, cluster, CONFIG)
    divisions = ((0, a, b, 40) for a, b in itertools.combinations(range(1, 40), 2))
    costs = [c for d in divisions if (c := division_cost(profile, cluster, d)) is not None]
    assert division_cost(profile, cluster, tuple(starts)) == min(costs)
    transfers = stage_partition.transfer_cost_matrix(profile, cluster)
    assert len(tried) * 10 < len(np.unique(transfers))
    cluster["connection"] = [link] * 41
    with pytest.raises(ValueError, match="no division of 40 layers fits 41 IPUs"):
        stage_partition.partition_by_cycles(profile, cluster, CONFIG)


def test_a_range_shares_code_and_carries_values() -> None:
    from podrun.tensorflow.keras.stage_partition import (
        add_layer_to_range,
        empty_layer_profile,
        empty_range_profile,
    )

    total = empty_range_profile()
    for number in (1, 2):
        layer = empty_layer_profile()
        layer["cycle"] = {"forward": 10 * number, "backward": 1}
        layer["memory"] |= {
            "shared": {"code": 100}, "exclusive": {"weights": 7}, "inputs": number, "outputs": 5 * number,
            "maxTemporary": 40, "curCarryOver": 3 * number, "curActivation": 2,
        }  # fmt: skip
        assert add_layer_to_range(total, layer) is total
    assert total["cycle"] == {"forward": 30, "backward": 2}
    memory = {
        "shared": {"code": 100},
        "exclusive": {"weights": 14},
        "inputs": 1,
        "outputs": 10,
        "curActivation": 4,
    }
    assert total["memory"] == {**memory, "maxTemporary": 48, "totalMemory": 100 + 14 + 48}


@pytest.mark.slow
def test_calls_of_layers_are_measured_and_told_apart(ipu_device: None) -> None:
    import tensorflow as tf
    import tf_keras

    from podrun.tensorflow.keras.stage_partition import layer_call_type, parse_model_intermediate
    from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

    layers = tf_keras.layers
    with IPUStrategyV1().scope():
        x = layers.Input((20,))
        first = layers.Dense(10, "relu")(x)
        third = layers.Dense(10, "relu", kernel_initializer="ones")(layers.Dense(10, "relu")(first))
        model = tf_keras.Model(x, layers.Dense(3)(layers.Add()([first, third])))
        carried, entering, leaving = parse_model_intermediate(model, 4)
        kinds = [layer_call_type(a, 4) for a in model.get_pipeline_stage_assignment()]
        batches = tf.data.Dataset.from_tensor_slices((np.ones((8, 20)), np.ones((8, 3)))).batch(2)
        steps = batches.cardinality() // 4 * 4  # A tensor, as programs give it.
        model.compile("sgd", "mse", steps_per_execution=steps)
        assert int(model._steps_per_execution.numpy()) == 4
    np.testing.assert_array_equal(carried, np.array([0, 10, 10, 0, 0]) * 16)
    np.testing.assert_array_equal(entering, np.array([20, 10, 20, 20, 10]) * 16)
    np.testing.assert_array_equal(leaving, np.array([10, 20, 20, 10, 3]) * 16)
    assert kinds[1] == kinds[2]
    assert len(set(kinds)) == 4


def test_helpers_of_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    import tensorflow as tf

    from podrun.tensorflow.keras.stage_partition import (
        print_profile_differences,
        tensor_bytes,
        with_batch_size,
    )

    assert with_batch_size((None, 3), 4) == (4, 3)
    assert with_batch_size((2, 3), 4) == (2, 3)
    assert tensor_bytes(tf.TensorSpec([None, 3], tf.float16), 4) == 24
    memory = {
        "shared": {"code_1": 1024**2, "code_2": 1024**2},
        "exclusive": {"weights": 0},
        "maxTemporary": 0,
    }
    actual = {
        "cycle": {"total": 4000, "forward": 4000, "backward": 0},
        "memory": {**memory, "totalMemory": 4 * 1024**2},
    }
    estimated = {
        "cycle": {"total": 5000, "forward": 3000, "backward": 0},
        "memory": {**memory, "totalMemory": 3 * 1024**2},
    }
    print_profile_differences([estimated], [actual])
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert words[0] == ["IPU", "0"]
    rows = {
        w[0]: [float(w[i].rstrip("%")) for i in (3, 5, 7, 9)] for w in words if "|" in w and w[0] != "total"
    }
    assert rows == {"forward": [4, 3, -1, -25], "code": [2, 2, 0, 0]}
    totals = [[w[3], w[5]] for w in words if w[0] == "total"]
    assert totals == [["4.0", "5.0"], ["4.0", "3.0"]]
