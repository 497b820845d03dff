"""Recurrent networks: a stack of LSTM layers on ``[time, batch, features]``."""

from __future__ import annotations

import math

from podrun.models.network import Network


def lstm(net: Network, x: str, layers: int, hidden: int) -> str:
    """The last layer's outputs, ``[time, batch, hidden]``; gates in one product per layer and step (PopART
    LSTM).
    """
    features = net.shape(x)[-1]
    for layer in range(layers):
        with net.scope(f"lstm{layer}"):
            wide = features + hidden
            weights = net.weight(f"lstm{layer}", (4, wide, hidden), 1.0 / math.sqrt(wide))
            bias = net.weight(f"lstm{layer}.bias", (4, hidden))
            x = str(net.builder.aiGraphcore.lstm([x, weights, bias], outputFullSequence=1)[0])
            features = hidden
    return x
