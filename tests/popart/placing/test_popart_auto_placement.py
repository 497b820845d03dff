"""VirtualGraphMode.Auto: pieces by cost, not by number of operators, and the numbers of placement by hand."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

import podrun.popart as popart
from tests.popart.popart_sessions import modelled, options, replicated

WIDTHS = [512, 512, 512, 512, 16, 16, 16, 16, 16]
"""Three large products before small ones."""
FEWER = [512, 512, 512, 16, 16]
AUTO = popart.VirtualGraphMode.Auto


def uneven(
    names: bool = False, places: list[int] | None = None, widths: list[int] = WIDTHS
) -> tuple[bytes, str, str, list[str]]:
    """A chain of products and ReLUs of very different sizes: model, input, loss, weights."""
    builder = popart.Builder()
    x = y = builder.addInputTensor("FLOAT", [4, widths[0]])
    random, weights = np.random.default_rng(3), []
    made = []
    for inner, outer in itertools.pairwise(widths):
        start = random.standard_normal((inner, outer)).astype(np.float32) / np.sqrt(inner, dtype=np.float32)
        weights.append(builder.addInitializedInputTensor(start))
        made.append(builder.aiOnnx.matmul([y, weights[-1]], *(["dense"] if names else [])))
        y = builder.aiOnnx.relu([made[-1]])
        made.append(y)
    loss = builder.aiGraphcore.l1loss([y], 0.1)
    for index, place in enumerate(places or []):
        builder.virtualGraph([*made, loss][index], place)
    return builder.getModelProto(), x, loss, weights


def session(model, loss, ipus, device=None, **values):
    return popart.TrainingSession(
        model,
        popart.DataFlow(2, [loss]),
        loss,
        popart.ConstSGD(0.1),
        device or popart.DeviceManager().createOfflineIPUDevice({"numIPUs": str(ipus)}),
        userOptions=options(**values),
    )


def places_of(made: popart.TrainingSession) -> list[int]:
    return [node.place.ipu for node in made.parts.model.placed.graph.nodes if node.place.ipu is not None]


def cycles_by_ipu(made: popart.TrainingSession) -> list[int]:
    """Modelled cycles of one micro-batch on each IPU."""
    found: dict[int, int] = {}
    for segment in modelled(made)["segments"]:
        found[segment["ipu"]] = found.get(segment["ipu"], 0) + segment["report"]["step"]["cycles"]
    return [found[ipu] for ipu in sorted(found)]


def test_pieces_are_contiguous_and_better_balanced_than_equal_counts():
    model, _, loss, _ = uneven()
    made = session(model, loss, 2, virtualGraphMode=AUTO)
    places = places_of(made)
    assert places == sorted(places)
    assert set(places) == {0, 1}
    half = len(places) // 2
    assert places != [0] * half + [1] * (len(places) - half)
    by_count, _, loss, _ = uneven(places=[int(i >= half) for i in range(len(places))])
    equal = session(by_count, loss, 2, virtualGraphMode=popart.VirtualGraphMode.Manual)
    assert max(cycles_by_ipu(made)) < 0.9 * max(cycles_by_ipu(equal))


def test_ratios_say_how_much_each_ipu_gets():
    model, _, loss, _ = uneven()
    few = places_of(session(model, loss, 2, virtualGraphMode=AUTO, virtualGraphSplitRatios=[0.1, 0.9]))
    many = places_of(session(model, loss, 2, virtualGraphMode=AUTO, virtualGraphSplitRatios=[0.9, 0.1]))
    assert few.count(0) < many.count(0)


def test_names_of_nodes_need_not_be_unique():
    assert places_of(session(*_two(uneven(names=True)), 4, virtualGraphMode=AUTO)) == places_of(
        session(*_two(uneven()), 4, virtualGraphMode=AUTO)
    )


def _two(case: tuple[bytes, str, str, list[str]]) -> tuple[bytes, str]:
    return case[0], case[2]


def test_annotations_of_the_model_are_not_read():
    model, _, loss, _ = uneven(places=[1] * 17)
    assert places_of(session(model, loss, 4, virtualGraphMode=AUTO)) == places_of(
        session(*_two(uneven()), 4, virtualGraphMode=AUTO)
    )


def test_what_nobody_needs_stays_with_what_is_before_it():
    model, _, loss, _ = uneven()
    proto = onnx.ModelProto.FromString(model)
    extra = onnx.helper.make_node("Relu", [proto.graph.node[0].output[0]], ["unused"])
    proto.graph.node.insert(1, extra)
    places = places_of(session(proto.SerializeToString(), loss, 2, virtualGraphMode=AUTO))
    assert places[0] == places[1]
    assert len(places) == len(proto.graph.node)


def test_a_graph_with_fewer_operators_than_ipus_is_refused():
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [4, 4])
    w = builder.addInitializedInputTensor(np.eye(4, dtype=np.float32))
    loss = builder.aiGraphcore.identityloss([builder.aiOnnx.matmul([x, w])])
    with pytest.raises(popart.popart_exception, match="find enough splits for 4 IPUs: the graph has 2"):
        session(builder.getModelProto(), loss, 4, virtualGraphMode=AUTO)


@pytest.mark.slow
def test_pieces_are_stages_of_a_pipeline():
    sharded = trained(uneven(), 4, virtualGraphMode=AUTO, accumulation=8)
    pipelined = trained(uneven(), 4, virtualGraphMode=AUTO, enablePipelining=True, accumulation=8)
    for name, value in sharded.items():
        np.testing.assert_array_equal(pipelined[name], value, err_msg=name)


def trained(case, ipus: int, accumulation: int = 3, **values) -> dict[str, np.ndarray]:
    """Losses and weights after some steps."""
    model, x, loss, weights = case
    opts = replicated(2, accumulation, **values)
    with popart.DeviceManager().acquireAvailableDevice(2 * ipus) as device:
        made = popart.TrainingSession(
            model, popart.DataFlow(2, [loss]), loss, popart.ConstSGD(0.1), device, userOptions=opts
        )
        made.prepareDevice()
        made.weightsFromHost()
        anchors = made.initAnchorArrays()
        width = made.getInfo(x).shape()[-1]
        data = np.random.default_rng(1).standard_normal((2, accumulation, 2, 4, width)).astype(np.float32)
        made.run(popart.PyStepIO({x: data}, anchors))
        made.weightsToHost()
        arrays = {name: np.empty(made.getInfo(name).shape(), np.float32) for name in weights}
        made.readWeights(popart.PyWeightsIO(arrays))
    return {"loss": anchors[loss], **arrays}


@pytest.mark.parametrize(
    ("ipus", "widths"),
    [(2, FEWER), *(pytest.param(ipus, WIDTHS, marks=pytest.mark.slow) for ipus in (2, 4))],
    ids=["2-fewer", "2", "4"],
)
def test_numbers_are_those_of_placement_by_hand_and_of_one_ipu(ipus, widths):
    model, _, loss, _ = uneven(widths=widths)
    automatic = trained(uneven(widths=widths), ipus, virtualGraphMode=AUTO)
    places = places_of(session(model, loss, ipus, virtualGraphMode=AUTO))
    assert set(places) == set(range(ipus))
    by_hand = trained(
        uneven(places=places, widths=widths), ipus, virtualGraphMode=popart.VirtualGraphMode.Manual
    )
    whole = trained(uneven(widths=widths), 1)
    for name, value in by_hand.items():
        np.testing.assert_array_equal(automatic[name], value, err_msg=name)
        np.testing.assert_allclose(automatic[name], whole[name], rtol=2e-6, atol=1e-7, err_msg=name)


def test_what_reads_a_pipelined_variable_stays_together():
    """Where the cut by cost goes between two products, they stay together if they have one weight."""

    def places(readers: list[str], **values: object) -> list[int]:
        builder = popart.Builder()
        y = builder.addInputTensor("FLOAT", [4, 64])
        start = np.eye(64, dtype=np.float32)
        weights = {name: builder.addInitializedInputTensor(start, name) for name in dict.fromkeys(readers)}
        for name in readers:
            y = builder.aiOnnx.matmul([y, weights[name]])
        loss = builder.aiGraphcore.l1loss([y], 0.1)
        values |= {"enableGradientAccumulation": True, "accumulationFactor": 3}
        return places_of(session(builder.getModelProto(), loss, 2, virtualGraphMode=AUTO, **values))

    own = places(list("abcdef"), enablePipelining=True)
    cut = own.index(1)
    assert 0 < cut < 6
    tied = list("abcdef")
    tied[cut] = tied[cut - 1]
    assert places(tied).index(1) == cut, "sharding copies variables"
    found = places(tied, enablePipelining=True)
    assert found[cut - 1] == found[cut]
    assert set(found) == {0, 1}
