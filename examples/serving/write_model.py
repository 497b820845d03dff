"""Write a published network as an ONNX model with a fixed batch and random weights, ready to be compiled and served.

    python examples/serving/write_model.py resnet50 --batch 4 resnet50-b4.onnx
    python examples/serving/write_model.py bert_base --batch 4 --size 128 bert-b4.onnx

Weights are drawn, not trained: what it costs to serve a network does not depend on their values.
"""

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

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
for output in list(model.graph.output):  # Servers divide a batch along the first dimension of outputs.
    rows, *rest = (dimension.dim_value for dimension in output.type.tensor_type.shape.dim)
    if rows == arguments.batch:
        continue
    shape = [arguments.batch, rows // arguments.batch, *rest]
    model.graph.initializer.append(numpy_helper.from_array(np.array(shape), "shape_of_samples"))
    model.graph.node.append(
        helper.make_node("Reshape", [output.name, "shape_of_samples"], ["samples"], "samples")
    )
    model.graph.output.remove(output)
    kind = output.type.tensor_type.elem_type
    model.graph.output.append(helper.make_tensor_value_info("samples", kind, shape))
onnx.save(model, arguments.file)
print(f"{arguments.file}: {arguments.file.stat().st_size / 1e6:.0f} MB, inputs {', '.join(network.inputs)}")
