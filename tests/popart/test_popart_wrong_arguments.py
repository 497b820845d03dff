"""Arguments of a wrong kind are refused by name, where they are given, in the words of the API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import podrun.popart as popart

NOTHING = {"output_complete_callback": print, "output_callback": print, "input_complete_callback": print}


def callbacks(**given: Any) -> Any:
    return popart.PyStepIOCallback(**{"input_callback": lambda tensor, prefetch: None, **NOTHING, **given})


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: popart.PyStepIO(None, None), TypeError, "inputs are a dict of arrays, not None"),
        (lambda: popart.PyStepIO({}, [1]), TypeError, r"outputs are a dict of arrays, not \[1\]"),
        (
            lambda: callbacks(input_callback=None),
            TypeError,
            r"input_callback is called with \(tensor id, prefetch\); got None",
        ),
        (
            lambda: callbacks(input_callback=lambda tensor: None),
            TypeError,
            r"called with \(tensor id, prefetch\); this one takes \(tensor\)",
        ),
        (
            lambda: callbacks(output_callback=3),
            TypeError,
            r"output_callback is called with \(tensor id\); got 3",
        ),
        (
            lambda: popart.DeviceManager().createIpuModelDevice({"numIPUs": "a"}),
            popart.popart_exception,
            "'numIPUs' for the IPU model is a number of them, not 'a'",
        ),
        (
            lambda: popart.DeviceManager().acquireAvailableDevice("a"),
            TypeError,
            "numIpus is an int, not 'a'",
        ),
        (
            lambda: popart.Builder().customOp("Nix", 1, "x.y", 3, {}),
            TypeError,
            "Inputs are a list of tensors, not 3",
        ),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_functions_of_c_and_those_with_defaults_are_callbacks() -> None:
    def accepted(**functions: Any) -> bool:
        try:
            return bool(callbacks(**functions))
        except TypeError:
            return False

    assert accepted(input_callback=max, output_callback=np.zeros)
    assert accepted(input_callback=lambda tensor, prefetch, other=1: None)
    assert accepted(output_callback=lambda *any_number: None)
    assert not accepted(input_callback=lambda tensor: None)
