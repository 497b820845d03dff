"""Cases of `RawCase`: updates of variables, by optimizers and by places."""

from __future__ import annotations

import numpy as np

from tests.tensorflow.comparing import RawCase, case
from tests.tensorflow.raw_contractions import random_values

_WEIGHTS, _GRADIENT, _SLOT, _OTHER = (
    random_values(3, 4),
    random_values(3, 4),
    np.abs(random_values(3, 4)) + 0.1,
    np.abs(random_values(3, 4)) + 0.6,
)


def _number(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def _update(op: str, label: str = "", /, **arguments: object) -> RawCase:
    """Variables are named ``var``, ``m`` and so on; the gradient and scalars are inputs."""
    names = ("var", "accum", "accum_update", "linear", "m", "v", "vhat", "ms", "mom", "mg")
    starts = {
        "var": _WEIGHTS,
        "m": _SLOT * 0.1,
        "v": _SLOT,
        "vhat": _OTHER * 0.4,
        "accum": _SLOT,
        "linear": _SLOT * 0.2,
        "accum_update": _OTHER,
        "ms": _SLOT,
        "mom": _SLOT * 0.3,
        "mg": _SLOT * 0.1,
    }
    own = arguments.pop("of")
    variables = {name: starts[name] for name in names if name in str(own).split()}
    scalars = {k: _number(v) if isinstance(v, float) else v for k, v in arguments.items()}
    return RawCase(
        op, label, {**scalars, "grad": _GRADIENT}, gradient=False, variables=variables, half_tolerance=2e-2
    )


UPDATES: list[RawCase] = [
    case("AssignVariableOp", value=_GRADIENT, _variables={"resource": _WEIGHTS}, _gradient=False),
    case("AssignAddVariableOp", value=_GRADIENT, _variables={"resource": _WEIGHTS}, _gradient=False),
    case("AssignSubVariableOp", value=_GRADIENT, _variables={"resource": _WEIGHTS}, _gradient=False),
    RawCase(
        "ResourceApplyGradientDescent",
        "",
        {"alpha": _number(0.1), "delta": _GRADIENT},
        variables={"var": _WEIGHTS},
        gradient=False,
    ),
    *(
        _update(op, f"{nesterov}", of="var accum", lr=0.1, momentum=0.9, use_nesterov=nesterov)
        for op in ("ResourceApplyMomentum", "ResourceApplyKerasMomentum")
        for nesterov in (False, True)
    ),
    *(
        _update(
            "ResourceApplyAdam",
            f"{nesterov}",
            of="var m v",
            beta1_power=0.81,
            beta2_power=0.99,
            lr=0.1,
            beta1=0.9,
            beta2=0.95,
            epsilon=1e-3,
            use_nesterov=nesterov,
        )
        for nesterov in (False, True)
    ),
    _update(
        "ResourceApplyAdamWithAmsgrad",
        of="var m v vhat",
        beta1_power=0.81,
        beta2_power=0.99,
        lr=0.1,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-3,
    ),
    _update(
        "ResourceApplyAdaMax", of="var m v", beta1_power=0.81, lr=0.1, beta1=0.9, beta2=0.95, epsilon=1e-3
    ),
    *(
        _update("ResourceApplyAdagrad", f"{slots}", of="var accum", lr=0.1, update_slots=slots)
        for slots in (False, True)
    ),
    *(
        _update(
            "ResourceApplyAdagradV2", f"{slots}", of="var accum", lr=0.1, epsilon=1e-3, update_slots=slots
        )
        for slots in (False, True)
    ),
    _update("ResourceApplyAdadelta", of="var accum accum_update", lr=0.1, rho=0.9, epsilon=1e-3),
    _update("ResourceApplyRMSProp", of="var ms mom", lr=0.1, rho=0.9, momentum=0.5, epsilon=1e-3),
    _update("ResourceApplyCenteredRMSProp", of="var mg ms mom", lr=0.1, rho=0.9, momentum=0.5, epsilon=1e-3),
    *(
        _update(
            "ResourceApplyFtrl",
            f"{multiplied}{power}",
            of="var accum linear",
            lr=0.1,
            l1=0.02,
            l2=0.03,
            lr_power=power,
            multiply_linear_by_lr=multiplied,
        )
        for multiplied, power in ((False, -0.5), (False, -0.7), (True, -0.5))
    ),
    *(
        _update(
            "ResourceApplyFtrlV2",
            f"{multiplied}",
            of="var accum linear",
            lr=0.1,
            l1=0.02,
            l2=0.03,
            l2_shrinkage=0.1,
            lr_power=power,
            multiply_linear_by_lr=multiplied,
        )
        for multiplied, power in ((False, -0.5), (True, -0.5))
    ),
    RawCase(
        "ResourceApplyProximalGradientDescent",
        "",
        {"alpha": _number(0.1), "l1": _number(0.2), "l2": _number(0.3), "delta": _GRADIENT},
        variables={"var": _WEIGHTS},
        gradient=False,
    ),
    *(
        _update("ResourceApplyProximalAdagrad", f"{l1}", of="var accum", lr=0.1, l1=l1, l2=0.3)
        for l1 in (0.0, 0.2)
    ),
    *(
        RawCase(
            "ResourceApplyAdagradDA",
            f"{l1}",
            {
                "grad": _GRADIENT,
                "lr": _number(0.1),
                "l1": _number(l1),
                "l2": _number(0.02),
                "global_step": np.array(3, np.int64),
            },
            gradient=False,
            half_tolerance=2e-2,
            variables={
                "var": _WEIGHTS,
                "gradient_accumulator": _SLOT - 0.3,
                "gradient_squared_accumulator": _OTHER,
            },
        )
        for l1 in (0.0, 0.05)
    ),
    _update("ResourceApplyAddSign", of="var m", lr=0.1, alpha=1.0, sign_decay=0.9, beta=0.8),
    _update("ResourceApplyPowerSign", of="var m", lr=0.1, logbase=1.0, sign_decay=0.9, beta=0.8),
    *(
        RawCase(
            f"ResourceScatter{kind}",
            "",
            {"indices": np.array([2, 0], np.int32), "updates": _OTHER[:2].copy()},
            variables={"resource": _WEIGHTS},
            gradient=False,
        )
        for kind in ["Add", "Sub", "Update", "Mul", "Div", "Min", "Max"]
    ),
    *(
        RawCase(
            f"ResourceScatter{kind}",
            "twice",
            {"indices": np.array([2, 2, 0], np.int32), "updates": _OTHER},
            variables={"resource": _WEIGHTS},
            gradient=False,
        )
        for kind in ["Add", "Sub", "Mul", "Div", "Min", "Max"]
    ),
    *(
        RawCase(
            f"ResourceScatterNd{kind}",
            "",
            {"indices": np.array([[2, 1], [0, 3]], np.int32), "updates": _OTHER[0, :2].copy()},
            variables={"ref": _WEIGHTS},
            gradient=False,
        )
        for kind in ("Update", "Add", "Sub")
    ),
]
