"""Questions about an ONNX model without running it: does it fit, how fast, and what holds it up?

    python -m podrun.estimate model.onnx --target pod16 --train --micro-batch 16

The model is lowered and traced as the front end would, costed once per micro-batch by `podrun.device.tiles`, and put
on the system by `podrun.device.tiles.batch`. `scan` tries micro-batches, accumulation, pipelines and recomputation.
"""

from podrun.estimate.model import Estimate, Layout, Traced, estimate, scan

__all__ = ["Estimate", "Layout", "Traced", "estimate", "scan"]
