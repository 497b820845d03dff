"""Write a published network as an ONNX model with a fixed batch and random weights, ready to be compiled and served.

    python examples/serving/write_model.py resnet50 --batch 4 resnet50-b4.onnx
    python examples/serving/write_model.py bert_base --batch 4 --size 128 bert-b4.onnx

Weights are drawn, not trained: what it costs to serve a network does not depend on their values.
"""

import argparse
from pathlib import Path

import onnx
from onnx import numpy_helper

from podrun.models import build
from podrun.models.network import Random
from podrun.onnx_models.tensor_proto import unpack

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("network", help="resnet50, bert_base, bert_large, vit_base ...")
parser.add_argument("file", type=Path, help="the ONNX file")
parser.add_argument("--batch", type=int, default=1, help="samples of a run")
parser.add_argument("--size", type=int, default=0, help="side of images, or tokens of a text")
parser.add_argument("--dtype", choices=["float16", "float32"], default="float16", help="type of the weights")
arguments = parser.parse_args()

network = build(
    arguments.network, batch=arguments.batch, size=arguments.size, weights=Random(dtype=arguments.dtype)
)
model = onnx.load_from_string(network.model)
for tensor in model.graph.initializer:  # As raw bytes, which every reader of ONNX takes, and fast.
    unpack(tensor)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
onnx.save(model, arguments.file)
print(f"{arguments.file}: {arguments.file.stat().st_size / 1e6:.0f} MB, inputs {', '.join(network.inputs)}")
