"""Train a small network on scikit-learn's handwritten digits with PopART, on one replica or many.

    podrun --num-replicas 16 examples/digits/train.py
    podrun --num-replicas 16 --num-instances 4 examples/digits/train.py --epochs 5
    python -m podrun.compat examples/digits/train.py --model mlp --save digits.onnx

An ordinary PopART program: it imports popart and popdist and nothing of the emulator. The global batch is
split over all replicas, and each instance feeds the share of its own replicas, so the result does not
depend on how many instances there are; and with Mean reduction one replica or sixteen compute the same
step, but for rounding.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

try:
    import popart
    import popdist
    import popdist.popart
except ImportError as error:
    sys.exit(
        f"error: {error}. This is a PopART program: start it with podrun, or alone with\n"
        f"    {sys.executable} -m podrun.compat {' '.join(sys.argv)}"
    )

CLASSES = 10
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Digits:
    """Images ``[n, 1, 8, 8]`` float32 in [0, 1] and labels int32, for training and held out for the test."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclass(frozen=True)
class Replication:
    """Replicas over all instances, and which of them this instance has."""

    total: int
    local: int
    offset: int
    instance: int

    @property
    def own(self) -> slice:
        """This instance's replicas."""
        return slice(self.offset, self.offset + self.local)


def load_digits() -> Digits:
    """scikit-learn's 1,797 images. The split is fixed, so that every seed is tested on the same images.

    They are read from its file: importing scikit-learn itself takes longer than all the training.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        sys.exit("The digits come with scikit-learn, which is not here: pip install scikit-learn")
    with gzip.open(Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    images = rows[:, :-1].reshape(-1, 1, 8, 8) / 16
    labels = rows[:, -1].astype(np.int32)
    order = np.random.RandomState(0).permutation(len(labels))
    test, train = np.split(order, [round(TEST_SHARE * len(order))])
    return Digits(images[train], labels[train], images[test], labels[test])


# --- Networks -----------------------------------------------------------------------------------


class Network:
    """Adds layers to a builder; weights are drawn from one seeded stream, in the order of the layers."""

    def __init__(self, builder: popart.Builder, seed: int) -> None:
        self.builder = builder
        self.random = np.random.RandomState(seed)

    def weight(self, shape: tuple[int, ...], fan_in: int, name: str) -> str:
        """A weight with He's initialisation."""
        values = self.random.standard_normal(shape) * np.sqrt(2 / fan_in)
        return self.builder.addInitializedInputTensor(values.astype(np.float32), name)

    def bias(self, size: int, name: str) -> str:
        """A bias that starts at zero."""
        return self.builder.addInitializedInputTensor(np.zeros(size, np.float32), name)

    def conv(self, x: str, inputs: int, outputs: int, name: str) -> str:
        """A 3 x 3 convolution that keeps the image's size, and ReLU."""
        with self.builder.nameScope(name):
            w = self.weight((outputs, inputs, 3, 3), inputs * 9, "w")
            b = self.bias(outputs, "b")
            y = self.builder.aiOnnx.conv([x, w, b], pads=[1, 1, 1, 1], kernel_shape=[3, 3])
            return self.builder.aiOnnx.relu([y])

    def dense(self, x: str, inputs: int, outputs: int, name: str) -> str:
        """A fully connected layer."""
        with self.builder.nameScope(name):
            w = self.weight((inputs, outputs), inputs, "w")
            return self.builder.aiOnnx.gemm([x, w, self.bias(outputs, "b")])


def cnn(net: Network, x: str) -> str:
    """Two convolutions, pooling, two dense layers: images to logits."""
    onnx = net.builder.aiOnnx
    h = net.conv(x, 1, 16, "conv0")
    h = net.conv(h, 16, 32, "conv1")
    (h,) = onnx.maxpool([h], 1, kernel_shape=[2, 2], strides=[2, 2])
    h = onnx.relu([net.dense(onnx.flatten([h]), 32 * 4 * 4, 64, "dense0")])
    return net.dense(h, 64, CLASSES, "dense1")


def mlp(net: Network, x: str) -> str:
    """64-512-512-10: images to logits."""
    onnx = net.builder.aiOnnx
    h = onnx.relu([net.dense(onnx.flatten([x]), 64, 512, "dense0")])
    h = onnx.relu([net.dense(h, 512, 512, "dense1")])
    return net.dense(h, 512, CLASSES, "dense2")


MODELS: dict[str, Callable[[Network, str], str]] = {"cnn": cnn, "mlp": mlp}


def build(model: str, batch: int, seed: int) -> tuple[popart.Builder, str, str]:
    """The network up to class probabilities for ``batch`` images; gives builder, input and output."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [batch, 1, 8, 8]), "images")
    logits = MODELS[model](Network(builder, seed), x)
    return builder, x, builder.aiOnnx.softmax([logits], axis=1)


# --- Sessions -----------------------------------------------------------------------------------


def options_for(replication: Replication) -> popart.SessionOptions:
    """Session options for this replication, under podrun or alone."""
    options = popart.SessionOptions()
    if popdist.isPopdistEnvSet():
        popdist.popart.configureSessionOptions(options)
    elif replication.total > 1:
        options.enableReplicatedGraphs = True
        options.replicatedGraphCount = replication.total
    options.accumulationAndReplicationReductionType = popart.ReductionType.Mean
    return options


def train(
    arguments: argparse.Namespace, data: Digits, replication: Replication, device: popart.DeviceInfo
) -> bytes:
    """Train, and give the trained model as the bytes of an ONNX file."""
    micro_batch = arguments.batch_size // replication.total
    builder, x, probabilities = build(arguments.model, micro_batch, arguments.seed)
    labels = builder.addInputTensor(popart.TensorInfo("INT32", [micro_batch]), "labels")
    loss = builder.aiGraphcore.nllloss([probabilities, labels])
    steps = len(data.train_labels) // arguments.batch_size
    session = popart.TrainingSession(
        fnModel=builder.getModelProto(),
        dataFlow=popart.DataFlow(steps, {loss: popart.AnchorReturnType("All")}),
        loss=loss,
        optimizer=popart.SGD(
            {"defaultLearningRate": (arguments.learning_rate, True), "defaultMomentum": (0.9, True)}
        ),
        deviceInfo=device,
        userOptions=options_for(replication),
    )
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    random = np.random.RandomState(arguments.seed)
    for epoch in range(arguments.epochs):
        chosen = random.permutation(len(data.train_labels))[: steps * arguments.batch_size]
        chosen = chosen.reshape(steps, replication.total, micro_batch)[:, replication.own]
        inputs = {x: data.train_images[chosen], labels: data.train_labels[chosen]}
        started = time.perf_counter()
        session.run(popart.PyStepIO(inputs, anchors))
        seconds = time.perf_counter() - started
        say(
            replication,
            f"epoch {epoch + 1:2d}/{arguments.epochs}  loss {anchors[loss].mean():.4f}  "
            f"{steps * arguments.batch_size / seconds:,.0f} images/s",
        )
    return model_of(session)


def model_of(session: popart.TrainingSession | popart.InferenceSession) -> bytes:
    """A session's model with its weights as they are now."""
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        session.modelToHost(path)
        with open(path, "rb") as file:
            return file.read()


def test(
    arguments: argparse.Namespace,
    data: Digits,
    replication: Replication,
    device: popart.DeviceInfo,
    trained: bytes,
) -> tuple[float, bytes]:
    """Accuracy on the held-out images, and the inference model. Every instance classifies all of them."""
    count = len(data.test_labels)
    micro_batch = -(-count // replication.total)
    builder, x, probabilities = build(arguments.model, micro_batch, arguments.seed)
    builder.addOutputTensor(probabilities)
    steps = -(-count // (micro_batch * replication.local))
    options = options_for(replication)
    options.constantWeights = False
    session = popart.InferenceSession(
        fnModel=builder.getModelProto(),
        dataFlow=popart.DataFlow(steps, {probabilities: popart.AnchorReturnType("All")}),
        deviceInfo=device,
        userOptions=options,
    )
    session.prepareDevice()
    session.resetHostWeights(trained, ignoreWeightsInModelWithoutCorrespondingHostWeight=True)
    session.weightsFromHost()
    slots = np.arange(steps * replication.local * micro_batch) % count
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: data.test_images[slots]}, anchors))
    guesses = anchors[probabilities].reshape(-1, CLASSES).argmax(axis=1)[:count]
    return float((guesses == data.test_labels).mean()), model_of(session)


def save(path: str, model: bytes) -> None:
    """Write an inference model that takes any number of images at a time."""
    import onnx

    proto = onnx.load_from_string(model)
    weights = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in weights]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)  # Weights that are no inputs may be folded by runtimes.
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "images"
    onnx.checker.check_model(proto)
    with open(path, "wb") as file:
        file.write(proto.SerializeToString(deterministic=True))


# --- The program --------------------------------------------------------------------------------


def say(replication: Replication, text: str) -> None:
    """Print, but only from the first instance."""
    if replication.instance == 0:
        print(text, flush=True)


def replication_of(arguments: argparse.Namespace) -> Replication:
    """How podrun launched this program; alone, what ``--replicas`` asks for."""
    if not popdist.isPopdistEnvSet():
        total = arguments.replicas or 1
        return Replication(total, total, 0, 0)
    total = popdist.getNumTotalReplicas()
    if arguments.replicas not in (None, total):
        sys.exit(
            f"error: --replicas {arguments.replicas}, but podrun launched {total} (podrun --num-replicas)."
        )
    return Replication(
        total, popdist.getNumLocalReplicas(), popdist.getReplicaIndexOffset(), popdist.getInstanceIndex()
    )


def positive(text: str) -> int:
    """A whole number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def writable(path: str) -> str:
    """A place for a file, tried before anything is trained for it."""
    try:
        with open(path, "ab"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {error.strerror}") from error


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train on scikit-learn's handwritten digits with PopART.")
    parser.add_argument("--model", choices=sorted(MODELS), default="cnn")
    parser.add_argument("--epochs", type=positive, default=15)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of images")
    parser.add_argument("--batch-size", type=positive, default=64, help="global, over all replicas")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--replicas", type=positive, help="alone: how many; under podrun use --num-replicas")
    parser.add_argument("--save", type=writable, metavar="FILE", help="write the trained model as ONNX")
    return parser.parse_args()


def main() -> None:
    """Train, test, save."""
    arguments = parse()
    replication = replication_of(arguments)
    if arguments.batch_size % replication.total:
        sys.exit(
            f"error: --batch-size {arguments.batch_size} is not divisible by {replication.total} replicas."
        )
    data = load_digits()
    say(
        replication,
        f"{arguments.model} on {len(data.train_labels)} digits, {replication.total} replicas x "
        f"{arguments.batch_size // replication.total} images",
    )
    if popdist.isPopdistEnvSet():
        device = popdist.popart.getDevice()
    else:
        device = popart.DeviceManager().acquireAvailableDevice(replication.total)
    with device:
        trained = train(arguments, data, replication, device)
        accuracy, model = test(arguments, data, replication, device, trained)
    say(replication, f"test accuracy {accuracy:.2%} on {len(data.test_labels)} digits held out")
    if arguments.save and replication.instance == 0:
        save(arguments.save, model)
        say(replication, f"saved {arguments.save}")


if __name__ == "__main__":
    main()
