"""PopART's optimizers: values with const flags, specifics per weight, and their checks.

An optimizer's class may enter, one file for each family (`sgd`, `adam`, `adaptive`); `base` has the hyper-parameters
and checks that all share. The formulas are `podrun.runtime.optimizers`', those that graphcore/popart documents in
willow/include/popart/sgd.hpp, adam.hpp and adaptive.hpp.
"""

from podrun.popart.optimizers.adam import Adam
from podrun.popart.optimizers.adaptive import Adaptive
from podrun.popart.optimizers.base import ClipNormSettings, Optimizer, OptimizerValue, OptimizerValueMap
from podrun.popart.optimizers.sgd import SGD, ConstSGD

__all__ = [
    "SGD",
    "Adam",
    "Adaptive",
    "ClipNormSettings",
    "ConstSGD",
    "Optimizer",
    "OptimizerValue",
    "OptimizerValueMap",
]
