"""Published networks written with the front end: functions of `popart.Builder`, for numbers or for shapes alone.

    from podrun import models

    built = models.build("resnet18", batch=4, weights=models.Random(seed=0))
    session = popart.InferenceSession(built.model, popart.DataFlow(1, [built.output]), device)

Only architectures with a published definition may enter; their models go to sessions, `podrun estimate` and tests.
`vision` and `sequences` hold the architectures, `catalogue` their names and sizes, `Network` the few operators they are
written in. With `Declared` weights a network of any size is built without a byte of weights, for the tile model; with
`Random` ones it runs.
"""

from podrun.models.catalogue import CATALOGUE, TRANSFORMERS, Built, Images, Transformer, build
from podrun.models.network import Declared, Network, Random, Weights

__all__ = [
    "CATALOGUE",
    "TRANSFORMERS",
    "Built",
    "Declared",
    "Images",
    "Network",
    "Random",
    "Transformer",
    "Weights",
    "build",
]
