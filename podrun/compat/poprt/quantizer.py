"""8-bit floats by data."""

from podrun.serving.convert.quantizer import FP8Quantizer, quantize

__all__ = ["FP8Quantizer", "quantize"]
