"""Answers about an ONNX model without running it: does it fit, how fast is it, and what limits it?

    podrun estimate model.onnx --target pod16 --train --micro-batch 16 --accumulation 8

An ONNX model, a target and a `ProgramLayout` enter. `tracing` lowers and traces the model as the front end would, and
lets `podrun.costmodel` cost one micro-batch; `layout` sees the trace as a chain of layers. `podrun.costmodel` cuts that
chain over a replica's IPUs, `layout` says what each IPU holds, and `model` adds up time and memory. An `Estimate` goes
to the verb (`command`) and to callers; `scan` tries many layouts.
"""

from podrun.estimate.layout import ProgramLayout
from podrun.estimate.model import Estimate, IpuShare, estimate, scan
from podrun.estimate.tracing import Traced, trace

__all__ = ["Estimate", "IpuShare", "ProgramLayout", "Traced", "estimate", "scan", "trace"]
