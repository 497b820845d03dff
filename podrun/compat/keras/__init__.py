"""``import keras`` for programs written for the SDK: Keras 2, which ``tf_keras`` has."""

import sys

import tensorflow as _tensorflow  # noqa: F401 - serves what the SDK adds
import tf_keras as _tf_keras

sys.modules[__name__] = _tf_keras
