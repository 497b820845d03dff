"""A transformer on a POD16: four replicas of four IPUs, each cut by what its operators cost.

    podrun --num-replicas 4 --ipus-per-replica 4 examples/transformer/sharded.py
    python -m podrun.compat examples/transformer/sharded.py [--replicas 4] [--ipus 4] [--steps 30]

VirtualGraphMode.Auto places the operators; replicas share one set of weights and reduce their gradients; each replica
holds a part of Adam's state (replicated tensor sharding). None of this changes what is computed.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from network import Sizes, popart, transformer
from training import replicas, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ipus", type=int, help="IPUs of a replica (default: podrun's, alone 4)")
    parser.add_argument("--replicas", type=int, default=4, help="without podrun: replicas (default: 4)")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches in a batch (default: 2)")
    parser.add_argument("--steps", type=int, default=30, help="batches to train on (default: 30)")
    arguments = parser.parse_args()

    sizes = Sizes(samples=8)
    own, options, device = replicas(arguments.replicas, arguments.ipus, 4)
    if own.ipus > 1:
        options.virtualGraphMode = popart.VirtualGraphMode.Auto
    options.enableGradientAccumulation = True
    options.accumulationFactor = arguments.accumulation
    where = popart.TensorLocation(popart.TensorStorage.OnChip, popart.ReplicatedTensorSharding.On)
    options.optimizerStateTensorLocationSettings = popart.TensorLocationSettings(where)

    net = transformer(sizes, lambda builder, part: nullcontext())
    train(net, sizes, own, options, device, arguments.steps, learning_rate=6e-3)


if __name__ == "__main__":
    main()
