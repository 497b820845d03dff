"""Torch modules that the benchmarks of PopTorch train: each gives a loss, with samples to call it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class Trained(nn.Module):
    """A network and its cross entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(x), labels)


def mlp() -> nn.Module:
    """784-512-512-10."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class Residual(nn.Module):
    """A block of ResNet: two 3x3 convolutions, or (``bottleneck``) 1x1, 3x3 and 1x1 to four times the channels."""

    def __init__(self, entering: int, channels: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        leaving = channels * 4 if bottleneck else channels
        kernels = ((1, 1), (3, stride), (1, 1)) if bottleneck else ((3, stride), (3, 1))
        widths = [entering, *[channels] * (len(kernels) - 1), leaving]
        layers: list[nn.Module] = []
        for index, (kernel, step) in enumerate(kernels):
            pad = kernel // 2
            layers += [nn.Conv2d(widths[index], widths[index + 1], kernel, step, pad, bias=False)]
            layers += [nn.BatchNorm2d(widths[index + 1]), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or entering != leaving:
            self.shortcut = nn.Sequential(
                nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x) + self.shortcut(x))


def resnet(blocks: tuple[int, ...], bottleneck: bool, classes: int) -> nn.Sequential:
    """ResNet as torchvision has it, with so many blocks in each of four stages."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    entering = 64
    for stage, count in enumerate(blocks):
        for index in range(count):
            channels, stride = 64 << stage, 2 if stage and not index else 1
            layers.append(Residual(entering, channels, stride, bottleneck))
            entering = channels * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, classes))


class Masked(nn.Module):
    """BERT of transformers with its masked language model's loss."""

    def __init__(self, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertForMaskedLM(config)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.bert(input_ids=tokens, attention_mask=mask, labels=labels).loss
        return loss


def images(count: int, pixels: int, classes: int) -> tuple[torch.Tensor, ...]:
    """Random images and classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, pixels, pixels, generator=generator)
    return x, torch.randint(0, classes, (count,), generator=generator)


def rows(count: int) -> tuple[torch.Tensor, ...]:
    """Random rows of 784 numbers and classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 784, generator=generator), torch.randint(0, 10, (count,), generator=generator)


def sentences(count: int, length: int) -> tuple[torch.Tensor, ...]:
    """Random tokens, what may be attended to, and the tokens again as labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 30522, (count, length), generator=generator)
    return tokens, torch.ones(count, length, dtype=torch.int64), tokens


@dataclass(frozen=True, slots=True)
class Network:
    """How to make a module, and its samples for so many micro-batches."""

    make: Callable[[], nn.Module]
    samples: Callable[[int], tuple[torch.Tensor, ...]]


NETWORKS: dict[str, Network] = {
    "mlp": Network(lambda: Trained(mlp()), lambda n: rows(128 * n)),
    "mlp16": Network(lambda: Trained(mlp()), lambda n: rows(32 * n)),
    "resnet18": Network(lambda: Trained(resnet((2, 2, 2, 2), False, 10)), lambda n: images(16 * n, 64, 10)),
    "bert_tiny": Network(lambda: Masked(128, 2, 2), lambda n: sentences(4 * n, 128)),
    "bert_small": Network(lambda: Masked(512, 4, 8), lambda n: sentences(4 * n, 128)),
}
"""What `poptorch_step` times. ``mlp16`` is for 16 replicas."""


class Classified(nn.Module):
    """BERT-base of transformers with a classifier's loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.bert = BertForSequenceClassification(BertConfig())

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.bert(input_ids=tokens, attention_mask=mask, labels=labels).loss
        return loss


def bert_base_on_four_ipus() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """BERT-base in four blocks of three layers, and a micro-batch of one sentence of 128 tokens."""
    import poptorch

    model = Classified()
    layers: Any = model.bert.bert.encoder.layer
    for ipu in range(1, 4):
        poptorch.BeginBlock(layers[3 * ipu], ipu_id=ipu)
    tokens, mask, _ = sentences(1, 128)
    return model, (tokens, mask, torch.zeros(1, dtype=torch.int64))


def resnet50() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """ResNet-50 and a micro-batch of 224x224."""
    return Trained(resnet((3, 4, 6, 3), True, 1000)), images(1, 224, 1000)
