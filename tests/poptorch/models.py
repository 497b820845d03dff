"""Small models of the usual kinds; each gives a loss for its samples, which are always the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

CLASSES, WORDS, LENGTH, WIDTH = 5, 23, 6, 16


class Classified(nn.Module):
    """A network and its cross entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.network(x), labels)


class Residual(nn.Module):
    """Two convolutions with batch normalisation beside a shortcut."""

    def __init__(self, entering: int, leaving: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(entering, leaving, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(leaving)
        self.second = nn.Conv2d(leaving, leaving, 3, 1, 1, bias=False)
        self.last = nn.BatchNorm2d(leaving)
        self.short = nn.Conv2d(entering, leaving, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm(self.first(x)), inplace=True)
        return F.relu(self.last(self.second(inner)) + self.short(x))


class Recurrent(nn.Module):
    """An embedding, an LSTM or a GRU, and a classifier of its last output."""

    def __init__(self, kind: type[nn.Module], **settings: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.layers: Any = kind(WIDTH, WIDTH, batch_first=True, **settings)
        self.head = nn.Linear(WIDTH * (2 if settings.get("bidirectional") else 1), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layers(self.words(x))
        made: torch.Tensor = self.head(hidden[:, -1])
        return made


class Encoder(nn.Module):
    """Words and places through encoder layers; ``causal`` hides what comes later. ``patches``: of an image instead."""

    def __init__(self, causal: bool = False, patches: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.enter: nn.Module = nn.Conv2d(3, WIDTH, 4, 4) if patches else nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(1, 4 if patches else LENGTH, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=causal)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS if causal else CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = self.enter(x)
        if entered.dim() == 4:
            entered = entered.flatten(2).transpose(1, 2)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if self.causal else None
        hidden = self.layers(entered + self.places, mask=mask, is_causal=self.causal)
        made: torch.Tensor = self.head(hidden if self.causal else hidden.mean(1))
        return made.transpose(1, 2) if self.causal else made


class Translator(nn.Module):
    """torch's whole transformer, from words to words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Transformer(WIDTH, 2, 1, 1, 32, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)  # Not the embedding: one IPU has a weight.

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.words(x), self.words(target[:, :-1]))
        return F.cross_entropy(self.head(hidden).transpose(1, 2), target[:, 1:])


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1, groups=2), nn.GroupNorm(4, 16), nn.SiLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, CLASSES)),
    )


def _resnet18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    for entering, leaving, stride in ((8, 8, 1), (8, 16, 2), (16, 32, 2), (32, 64, 1)):
        layers += [Residual(entering, leaving, stride), Residual(leaving, leaving, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def rows(count: int) -> tuple[torch.Tensor, ...]:
    """Rows of 12 numbers and classes."""
    g = torch.Generator().manual_seed(2)
    return torch.randn(count, 12, generator=g), torch.randint(0, CLASSES, (count,), generator=g)


def images(count: int) -> tuple[torch.Tensor, ...]:
    """Images of 3x8x8 and classes."""
    g = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, 8, 8, generator=g), torch.randint(0, CLASSES, (count,), generator=g)


def words(count: int) -> tuple[torch.Tensor, ...]:
    """Sentences and classes."""
    g = torch.Generator().manual_seed(2)
    return torch.randint(0, WORDS, (count, LENGTH), generator=g), torch.randint(
        0, CLASSES, (count,), generator=g
    )


def next_words(count: int) -> tuple[torch.Tensor, ...]:
    """Sentences, and the same one word further on."""
    g = torch.Generator().manual_seed(2)
    whole = torch.randint(0, WORDS, (count, LENGTH + 1), generator=g)
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


@dataclass(frozen=True, slots=True)
class Model:
    """How to make a model, its samples, and the names of the modules at which its pipeline's second stage may begin.

    ``normalised``: it has batch normalisation, whose statistics are of one micro-batch and one replica.
    """

    make: Callable[[], nn.Module]
    samples: Callable[[int], tuple[torch.Tensor, ...]]
    second: str
    normalised: bool = False


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, CLASSES))


MODELS: dict[str, Model] = {
    "mlp": Model(lambda: Classified(_mlp()), rows, "network.2"),
    "cnn": Model(lambda: Classified(_cnn()), images, "network.4", normalised=True),
    "lstm": Model(lambda: Classified(Recurrent(nn.LSTM, num_layers=2)), words, "network.head"),
    "gru": Model(lambda: Classified(Recurrent(nn.GRU, bidirectional=True)), words, "network.head"),
    "transformer": Model(Translator, next_words, "layers.decoder"),
    "bert": Model(lambda: Classified(Encoder()), words, "network.layers.layers.1"),
    "gpt": Model(lambda: Classified(Encoder(causal=True)), next_words, "network.layers.layers.1"),
    "vit": Model(lambda: Classified(Encoder(patches=True)), images, "network.layers.layers.1"),
    "resnet18": Model(lambda: Classified(_resnet18()), images, "network.7", normalised=True),
}
