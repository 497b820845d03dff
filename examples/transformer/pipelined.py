"""A transformer in a pipeline of 8 stages on 8 IPUs: embedding, six blocks, head.

    podrun --num-replicas 2 --ipus-per-replica 8 examples/transformer/pipelined.py
    python -m podrun.compat examples/transformer/pipelined.py [--ipus 4] [--replicas 1] [--steps 30]

A replica of 8 IPUs lies on two machines: activations and gradients travel between them. On fewer IPUs stages hold
more parts of the network each; the trained weights differ by no more than rounding.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from network import Sizes, popart, transformer
from training import replicas, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ipus", type=int, help="IPUs of a replica, at most 8 of them used (default: podrun's, alone 8)"
    )
    parser.add_argument("--replicas", type=int, default=1, help="without podrun: replicas (default: 1)")
    parser.add_argument("--accumulation", type=int, default=16, help="micro-batches in a batch (default: 16)")
    parser.add_argument("--steps", type=int, default=30, help="batches to train on (default: 30)")
    parser.add_argument("--recompute", action="store_true", help="stash inputs of stages only")
    arguments = parser.parse_args()

    sizes = Sizes()
    own, options, device = replicas(arguments.replicas, arguments.ipus, 8)
    stages = min(own.ipus, sizes.parts)
    options.virtualGraphMode = popart.VirtualGraphMode.Manual
    options.enablePipelining = True
    options.enableGradientAccumulation = True
    options.accumulationFactor = arguments.accumulation
    if arguments.recompute:
        options.autoRecomputation = popart.RecomputationType.Pipeline

    def place(builder: popart.Builder, part: int) -> ExitStack:
        scopes = ExitStack()
        stage = part * stages // sizes.parts
        scopes.enter_context(builder.virtualGraph(stage * own.ipus // stages))
        scopes.enter_context(builder.pipelineStage(stage))
        return scopes

    net = transformer(sizes, place)
    train(net, sizes, own, options, device, arguments.steps, learning_rate=6e-3)


if __name__ == "__main__":
    main()
