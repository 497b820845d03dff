"""Answers about an ONNX model without running it: does it fit, how fast is it, and what limits it?

    podrun estimate model.onnx --target pod16 --train --micro-batch 16 --accumulation 8

An ONNX model, a target and a `ProgramLayout` enter. `tracing` lowers and traces the model as the front end would, and
lets `podrun.costmodel` cost one micro-batch; `layout` sees the trace as a chain of layers. `podrun.costmodel` cuts that
chain over a replica's IPUs, `layout` says what each IPU holds, and `model` adds up time and memory. An `Estimate` goes
to callers; `scan` tries many layouts. The verb is `command` (options), `answer` (what they ask for) and `text`.

What traces models takes a second to import: names are looked up when they are used, so that the verb's --help and a
shell's completion answer at once.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podrun.estimate.layout import ProgramLayout
    from podrun.estimate.model import Estimate, IpuShare, estimate, scan
    from podrun.estimate.tracing import Traced, trace_model

__all__ = ["Estimate", "IpuShare", "ProgramLayout", "Traced", "estimate", "scan", "trace_model"]

_MODULES = {"ProgramLayout": "layout", "Traced": "tracing", "trace": "tracing"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'model')}"), name)
