"""A ResNet as torchvision has it, data-parallel over the replicas that it is launched with.

podrun --num-replicas 16 examples/poptorch/resnet_replicas.py

Batch normalisation sees a replica's own samples; every replica has running statistics of its own, and the host reads
the first one's. Beside it torch trains on the same samples and the losses are compared.
"""

import argparse
import copy

import popdist
import popdist.poptorch
import poptorch
import torch
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers, width, num_classes):
        super().__init__()
        self.inplanes = width
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        for stage, blocks in enumerate(layers):
            setattr(self, f"layer{stage + 1}", self._make_layer(width << stage, blocks, 2 if stage else 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width << (len(layers) - 1), num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _make_layer(self, planes, blocks, stride):
        layers = [BasicBlock(self.inplanes, planes, stride)]
        self.inplanes = planes
        layers += [BasicBlock(planes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, images, labels=None):
        out = self.model(images)
        if labels is None:
            return out
        return out, self.loss(out, labels)


class Shapes(torch.utils.data.Dataset):
    """Noisy images, each with a bright quarter: which one is the class."""

    def __init__(self, count, pixels):
        generator = torch.Generator().manual_seed(5)
        self.images = 0.5 * torch.randn(count, 3, pixels, pixels, generator=generator)
        self.labels = torch.randint(0, 4, (count,), generator=generator)
        half = pixels // 2
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            row, column = divmod(label, 2)
            image[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 1.0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def trained_on_cpu(model, optimizer, images, labels, replicas):
    """One step of torch: each replica's samples by themselves, gradients averaged. The last replica's loss."""
    optimizer.zero_grad()
    for x, y in zip(images.chunk(replicas), labels.chunk(replicas), strict=True):
        loss = model(x.double(), y)[1]
        (loss / replicas).backward()
    optimizer.step()
    return loss.item()


def accuracy(model, images, labels):
    return (model(images).argmax(-1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4, help="of a replica's micro-batch")
    parser.add_argument("--pixels", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    if popdist.isPopdistEnvSet():
        popdist.init()
        options = popdist.poptorch.Options()
        replicas, rank = popdist.getNumTotalReplicas(), popdist.getInstanceIndex()
    else:
        options = poptorch.Options().replicationFactor(16)
        replicas, rank = 16, 0
    options.randomSeed(42).broadcastBuffers(False)
    loader = poptorch.DataLoader(options, Shapes(512, args.pixels), batch_size=args.samples, shuffle=True)
    model = WithLoss(ResNet([1, 1, 1, 1], 8, 4))
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    whole = replicas == options.replication_factor  # Every sample passes through this process.
    reference = copy.deepcopy(model).double()  # Normalisation over few samples enlarges what float32 rounds.
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    training = poptorch.trainingModel(model.train(), options, optimizer)
    losses = []
    for epoch in range(args.epochs):
        for step, (images, labels) in enumerate(loader):
            _, loss = training(images, labels)
            losses.append(loss.mean().item())
            if whole and epoch == 0 and step < 3:
                expected = trained_on_cpu(reference, plain, images, labels, replicas)
                assert abs(loss.reshape(-1)[-1].item() - expected) < 2e-3, (loss, expected)
        print(f"instance {rank}, epoch {epoch}: loss {losses[-1]:.3f}", flush=True)
    assert losses[-1] < 0.8 * losses[0], losses
    training.destroy()
    test = Shapes(64, args.pixels)
    inference = poptorch.inferenceModel(
        model.eval(), poptorch.Options().replicationFactor(options.replication_factor)
    )
    found = accuracy(inference, test.images, test.labels)
    print(f"instance {rank}: accuracy {found:.2f} on {replicas} replicas", flush=True)
    assert found > 0.6
    inference.destroy()


if __name__ == "__main__":
    main()
