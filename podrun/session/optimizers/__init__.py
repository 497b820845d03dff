"""Optimizers: PopART's classes (values with const flags, specifics per weight) and the update rules behind them.

An optimizer's class and its rule may enter, one file for each family (`sgd`, `adam`, `adaptive`). `base` has the
hyper-parameters and checks that all share, `rules` the arithmetic common to update rules, which the compiler takes. The
formulas are those that graphcore/popart documents in willow/include/popart/sgd.hpp, adam.hpp and adaptive.hpp.
"""

from podrun.session.optimizers.adam import Adam
from podrun.session.optimizers.adaptive import Adaptive
from podrun.session.optimizers.base import (
    ClipNormSettings,
    Optimizer,
    OptimizerValue,
    OptimizerValueMap,
    UpdateContext,
)
from podrun.session.optimizers.sgd import SGD, ConstSGD

__all__ = [
    "SGD",
    "Adam",
    "Adaptive",
    "ClipNormSettings",
    "ConstSGD",
    "Optimizer",
    "OptimizerValue",
    "OptimizerValueMap",
    "UpdateContext",
]
