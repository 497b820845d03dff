"""``tensorflow_core``: the name that TensorFlow 1.15 has inside."""

import sys

import tensorflow as _tensorflow

sys.modules[__name__] = _tensorflow
