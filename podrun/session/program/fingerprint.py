"""A digest of what decides a session's program besides the Program's own fields: its forward function and
its rule.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from podrun.onnx_models.tensor_proto import raw_data
from podrun.session.program.build import BuiltModel

if TYPE_CHECKING:
    from podrun.onnx_models.light_model import LightModel


def fingerprint(light: LightModel, built: BuiltModel) -> str | None:
    """Equal digests, equal forward functions and update rules. None where the model does not say it all: with
    operators of the program's own.

    Values of weights are left out where the program does not bake them in, so training can go on from a
    checkpoint without compiling again.
    """
    from podrun.onnx_models import custom

    if any(custom.registered(node.domain, node.op_type) for node in built.lowered.graph.nodes):
        return None
    shape = light.copy().proto
    baked = [tensor for tensor in shape.graph.initializer if tensor.name not in built.program.parameters]
    del shape.graph.initializer[:]
    shape.graph.initializer.extend(baked)
    del shape.metadata_props[:]
    digest = hashlib.sha256(shape.SerializeToString(deterministic=True))
    for tensor in baked:
        if tensor.name in light.values:
            digest.update(raw_data(light.values[tensor.name]))
    digest.update(repr(sorted(built.program.inputs.items())).encode())
    digest.update(repr((built.lowered.training, sorted(built.lowered.outputs))).encode())
    if built.rule is not None:
        digest.update(repr(_rule(built)).encode())
    return digest.hexdigest()


def _rule(built: BuiltModel) -> tuple[object, ...]:
    rule = built.rule
    assert rule is not None
    weights = []
    for name in sorted(built.trained):
        spec = built.program.parameters[name].spec
        state = sorted((prefix, repr(value)) for prefix, value in rule.state(spec).items())
        weights.append(
            (name, rule.group_key(name), state, sorted(rule.scalars(name)), rule.gradient_dtype(spec))
        )
    return (type(rule).__name__, rule.optimizer._modes(), rule.context, tuple(weights))
