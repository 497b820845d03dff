"""How weights are trained: optimizers, reductions, loss scaling."""

from __future__ import annotations

from podrun.popart.enums.base import PopartEnum


class AdamMode(PopartEnum):
    """Members of the Adam family."""

    Adam = 0
    AdamNoBias = 1
    AdaMax = 2
    Lamb = 3
    LambNoBias = 4


class AdaptiveMode(PopartEnum):
    """Members of the adaptive family."""

    AdaGrad = 0
    RMSProp = 1
    CenteredRMSProp = 2
    AdaDelta = 3


class WeightDecayMode(PopartEnum):
    """Decay of the weight itself, or a term of the gradient."""

    Decay = 0
    L2Regularization = 1


class SGDAccumulatorAndMomentum(PopartEnum):
    """One tensor for accumulator and momentum, or two."""

    Combined = 0
    Separate = 1


class ReductionType(PopartEnum):
    """How a loss or a gradient is reduced."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(PopartEnum):
    """A running mean, or a division after the sum."""

    Running = 0
    Post = 1


class GradientTensorTrackingMethod(PopartEnum):
    """Gradients that automatic loss scaling watches."""

    AllNonViewChangingGradientTensors = 0
    ConvAndMatmulGradients = 1
    GradientsOfUserSpecifiedTensors = 2
