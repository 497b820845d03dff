"""An optimizer's update can be written over its operands: XLA copies none of weights and state first."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest
from jax import export

from .programs import Adam, Momentum, Sgd, compiled, mlp


@pytest.mark.parametrize("rule", [Sgd(), Momentum(), Adam()], ids=lambda rule: type(rule).__name__)
def test_xla_copies_nothing_to_update_in_place(rule: Any) -> None:
    computation = compiled(mlp(replicas=4, update=rule)).computations["update.0"]
    exported = export.deserialize(bytearray(computation.stablehlo))
    states = [at for at, name in enumerate(computation.inputs) if name in computation.outputs]
    together = [at for at in states if computation.inputs[at].startswith("arena_slice:")]
    assert together
    lowered = jax.jit(exported.call, donate_argnums=together).lower(*exported.in_avals)
    entry = lowered.compile().as_text().split("ENTRY", 1)[1]
    shape = ",".join(map(str, exported.in_avals[together[0]].shape))
    assert f"[{shape}]" in entry
    assert not re.findall(rf"f32\[{shape}\]\S* copy\(", entry)
