"""Options of planners: the names that the libraries know, their words for others, and what they change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from podrun import popart
from podrun.core.errors import InvalidOptionError
from podrun.runtime.planner_options import CONVOLUTIONS, KNOWN, LSTMS, PRODUCTS, check_planner_options
from tests.popart.popart_sessions import options


@pytest.mark.parametrize(
    ("source", "name", "value", "words"),
    [
        (CONVOLUTIONS, "startTileMultiplier", "3", "Unrecognised option 'startTileMultiplier'"),
        (CONVOLUTIONS, "partialsTypes", "half", "Unrecognised option 'partialsTypes'"),
        (
            CONVOLUTIONS,
            "partialsType",
            "int",
            r"value 'int' for option 'partialsType': Not one of the values: \['float'",
        ),
        (PRODUCTS, "enableFastReduce", "True", "Not one of the values: .'false', 'true'.$"),
        (
            PRODUCTS,
            "availableMemoryProportion",
            "much",
            "option 'availableMemoryProportion': Not a floating point",
        ),
        (LSTMS, "numShards", "1.5", "option 'numShards': Not a valid integer"),
    ],
)
def test_what_the_libraries_do_not_know_is_said_in_their_words(
    source: str, name: str, value: str, words: str
) -> None:
    with pytest.raises(InvalidOptionError, match=words):
        check_planner_options({source: {name: value}})


def test_known_options_are_accepted() -> None:
    plain: dict[Any, str] = {float: "0.5", int: "2", str: "{}"}
    for source, known in KNOWN.items():
        check_planner_options(
            {source: {n: v[0] if isinstance(v, tuple) else plain[v] for n, v in known.items()}}
        )


def convolution(**values: Any) -> popart.InferenceSession:
    """A session, not prepared, of one convolution."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [1, 16, 16, 16]))
    w = builder.addInitializedInputTensor(np.ones([16, 16, 3, 3], np.float32))
    y = builder.aiOnnx.conv([x, w], pads=[1, 1, 1, 1])
    device = popart.DeviceManager().createOfflineIPUDevice({"numIPUs": 1})
    flow = popart.DataFlow(1, [y])
    return popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=options(**values))


def test_a_session_refuses_them_when_its_device_is_prepared() -> None:
    session = convolution(convolutionOptions={"startTileMultiplier": "3"})
    with pytest.raises(popart.poplar_exception, match="Unrecognised option 'startTileMultiplier'") as caught:
        session.prepareDevice()
    assert "availableMemoryProportion" in str(caught.value.hint)


def test_a_share_of_memory_reaches_the_planner() -> None:
    plain, little = convolution(), convolution(convolutionOptions={"availableMemoryProportion": "0.05"})
    assert not plain.parts.model.built.program.plans.proportions
    assert [share for _, share in little.parts.model.built.program.plans.proportions] == [0.05]
