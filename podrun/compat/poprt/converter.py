"""Conversion, sharding, model fusion."""

from podrun.serving.convert.converter import Converter
from podrun.serving.convert.model_fusion import MFConverter
from podrun.serving.convert.sharder import Sharder

__all__ = ["Converter", "MFConverter", "Sharder"]
