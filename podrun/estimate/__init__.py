"""Questions about an ONNX model without running it: does it fit, how fast, and what holds it up?

    podrun estimate model.onnx --target pod16 --train --micro-batch 16 --accumulation 8

The model is lowered and traced as the front end would, and costed once per micro-batch by
`podrun.device.tiles` (`model`); `layers` sees the trace as a chain of layers, `split` cuts it over the IPUs
of a replica, `memory` says what each of them holds, and `podrun.device.tiles.batch` puts it on the system.
`layouts` tries micro-batches, accumulation, pipelines and recomputation. `command` is the verb.
"""

from podrun.estimate.layouts import scan
from podrun.estimate.model import Estimate, IpuShare, Layout, Traced, estimate, trace

__all__ = ["Estimate", "IpuShare", "Layout", "Traced", "estimate", "scan", "trace"]
