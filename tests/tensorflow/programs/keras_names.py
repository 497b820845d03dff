"""The names under which programs import Keras, its module for IPUs, and the SDK's layers."""

import ipu_tensorflow_addons
import keras
import keras.ipu
import tensorflow as tf
from ipu_tensorflow_addons.keras.layers import LSTM, PopnnLSTM
from ipu_tensorflow_addons.keras.optimizers.adam_ipu_optimizer import AdamIpuOptimizer
from ipu_tensorflow_addons.layers import rnn_ops
from ipu_tensorflow_addons.v1 import layers
from keras.engine.training import Model
from keras.ipu import PipelineStage
from keras.layers.core import Dense
from keras.optimizer_v2.adam import Adam
from keras.utils import generic_utils, tf_utils
from tensorflow.python import ipu
from tensorflow.python.ipu import keras as ipu_keras
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy
from tensorflow.python.ipu.horovod import popdist_strategy

assert PipelineStage is tf.keras.ipu.PipelineStage is ipu.keras.PipelineStage is ipu_keras.PipelineStage
assert Model is tf.keras.Model is keras.Model
assert Adam is tf.keras.optimizers.Adam
assert Dense is tf.keras.layers.Dense
assert LSTM is PopnnLSTM is ipu_tensorflow_addons.keras.layers.LSTM
assert AdamIpuOptimizer is ipu_tensorflow_addons.keras.optimizers.AdamIpuOptimizer
assert rnn_ops.PopnnLSTM is layers.PopnnLSTM is ipu.rnn_ops.PopnnLSTM
assert PopDistStrategy is popdist_strategy.PopDistStrategy
assert {generic_utils.__name__, tf_utils.__name__} == {
    "tf_keras.src.utils.generic_utils",
    "tf_keras.src.utils.tf_utils",
}
try:
    _ = ipu_tensorflow_addons.keras.layers.EffectiveTransformer
except NotImplementedError as error:
    print("refused:", error)
print("difference 0.0")
