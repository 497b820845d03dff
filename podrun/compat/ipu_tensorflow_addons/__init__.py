"""``import ipu_tensorflow_addons``: the SDK's layers and optimizers, also before ``import tensorflow``."""

import sys

import tensorflow as _tensorflow  # noqa: F401 - serves what the SDK adds

from podrun.compat._keras_names import ADDONS_ROOT, own_module

_module = own_module(ADDONS_ROOT)
if _module is not None:
    sys.modules[__name__] = _module
