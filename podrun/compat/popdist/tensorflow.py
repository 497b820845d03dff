"""``import popdist.tensorflow``: `podrun.tensorflow.sdk.config`."""

from podrun.tensorflow.sdk.config import set_ipu_config

__all__ = ["set_ipu_config"]
