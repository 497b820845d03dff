"""What decides an executable, as bytes: two sessions with equal fingerprints compile to equal executables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podrun import __version__
from podrun.popart.build import BuiltModel

if TYPE_CHECKING:
    from onnx import ModelProto


def fingerprint(model: ModelProto, built: BuiltModel, target: str) -> dict[str, bytes]:
    """Named pieces for `podrun.popart.cache.key`. Values of weights are left out where the program does not
    bake them in, so training can go on from a checkpoint without compiling again.
    """
    import jax
    from onnx import ModelProto

    program, rule = built.program, built.rule
    shape = ModelProto()
    shape.CopyFrom(model)
    baked = [tensor for tensor in shape.graph.initializer if tensor.name not in program.parameters]
    del shape.graph.initializer[:]
    shape.graph.initializer.extend(baked)
    del shape.metadata_props[:]
    plain = {
        "versions": (__version__, jax.__version__),
        "parameters": sorted((name, repr(item)) for name, item in program.parameters.items()),
        "inputs": sorted((name, repr(item)) for name, item in program.inputs.items()),
        "anchors": program.anchors,
        "layout": (program.replicas, program.ipus_per_replica, program.accumulation_factor),
        "loss": (program.loss, program.loss_scaling, program.reduction),
        "update": _rule(built) if rule is not None else (),
        "name": program.name,
        "metadata": sorted(program.metadata.items()),
        "target": target,
    }
    return {
        "model": shape.SerializeToString(deterministic=True),
        **{name: repr(value).encode() for name, value in plain.items()},
    }


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
