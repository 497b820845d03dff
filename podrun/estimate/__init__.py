"""Questions about an ONNX model without running it: does it fit, how fast, and what holds it up?

    podrun estimate model.onnx --target pod16 --train --micro-batch 16 --accumulation 8

The model is lowered and traced as the front end would, and costed once per micro-batch by
`podrun.device.tiles` (`tracing`); `layers` sees the trace as a chain of layers. For a `layout`, `split` cuts it over
the IPUs of a replica, `memory` says what each of them holds, and `model` puts it on the system with
`podrun.device.tiles.batch`. `scanning` tries micro-batches, accumulation, pipelines and recomputation. `command` is
the verb.
"""

from podrun.estimate.layout import Layout
from podrun.estimate.model import Estimate, IpuShare, estimate
from podrun.estimate.scanning import scan
from podrun.estimate.tracing import Traced, trace

__all__ = ["Estimate", "IpuShare", "Layout", "Traced", "estimate", "scan", "trace"]
