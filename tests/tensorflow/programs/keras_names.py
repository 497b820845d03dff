"""The names under which programs import Keras, its module for IPUs, and the SDK's layers."""

import ipu_tensorflow_addons
import keras
import keras.ipu
import numpy as np
import tensorflow as tf
from ipu_tensorflow_addons.keras.layers import LSTM, PopnnLSTM
from ipu_tensorflow_addons.keras.layers.normalization import GroupNorm
from ipu_tensorflow_addons.keras.optimizers.adam_ipu_optimizer import AdamIpuOptimizer
from ipu_tensorflow_addons.layers import rnn_ops
from ipu_tensorflow_addons.test_utils import ReportHelper
from ipu_tensorflow_addons.v1 import layers
from ipu_tensorflow_addons.v1.layers import rnn_ops as rnn_ops_of_version_1
from keras import combinations, keras_parameterized, optimizer_v2, testing_utils
from keras.engine.training import Model
from keras.ipu import PipelineStage
from keras.ipu.extensions import data_adapter, pipeline_stage_assignment, sequential_extensions
from keras.ipu.optimizers.als_optimizer import ALSOptimizer
from keras.layers import recurrent
from keras.layers.core import Dense
from keras.optimizer_v2 import learning_rate_schedule
from keras.optimizer_v2.adam import Adam
from keras.saving import hdf5_format
from keras.utils import generic_utils, tf_utils
from tensorflow.python import ipu
from tensorflow.python import keras as internal_keras
from tensorflow.python.framework import ops
from tensorflow.python.ipu import keras as ipu_keras
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy
from tensorflow.python.ipu.horovod import popdist_strategy
from tensorflow.python.ipu.keras.layers.embedding_lookup import Embedding
from tensorflow.python.ipu.keras.optimizers.cross_replica_optimizer import CrossReplicaOptimizer
from tensorflow.python.ipu.keras.optimizers.ipu_wrappers import IpuOptimizer
from tensorflow.python.keras import backend as internal_backend
from tensorflow.python.keras.engine import base_layer
from tensorflow.python.keras.layers import Dense as InternalDense
from tensorflow.python.keras.optimizer_v2.gradient_descent import SGD as InternalSGD
from tensorflow.python.layers import normalization
from tensorflow.python.ops import control_flow_ops
from tensorflow.python.training import training_ops
from tensorflow.python.training.tracking import util as tracking

assert PipelineStage is tf.keras.ipu.PipelineStage is ipu.keras.PipelineStage is ipu_keras.PipelineStage
assert Model is tf.keras.Model is keras.Model
assert Adam is tf.keras.optimizers.Adam
assert Dense is tf.keras.layers.Dense
assert LSTM is PopnnLSTM is ipu_tensorflow_addons.keras.layers.LSTM
assert AdamIpuOptimizer is ipu_tensorflow_addons.keras.optimizers.AdamIpuOptimizer
assert Embedding is ipu_tensorflow_addons.keras.layers.Embedding
assert issubclass(CrossReplicaOptimizer, IpuOptimizer)
assert ReportHelper is ipu.test_utils.ReportHelper
assert rnn_ops_of_version_1.PopnnLSTM is layers.PopnnLSTM
assert rnn_ops.PopnnLSTM is layers.PopnnLSTM is ipu.rnn_ops.PopnnLSTM is ipu.ops.rnn_ops.PopnnLSTM
assert PopDistStrategy is popdist_strategy.PopDistStrategy
assert {generic_utils.__name__, tf_utils.__name__} == {
    "tf_keras.src.utils.generic_utils",
    "tf_keras.src.utils.tf_utils",
}
assert keras.optimizer_v2.gradient_descent.SGD is optimizer_v2.gradient_descent.SGD is keras.optimizers.SGD
assert learning_rate_schedule.ExponentialDecay is keras.optimizers.schedules.ExponentialDecay
assert keras.testing_utils.run_v2_only is testing_utils.run_v2_only
assert issubclass(keras_parameterized.TestCase, tf.test.TestCase)
assert callable(combinations.generate)
assert recurrent.RNN is keras.layers.RNN
assert internal_keras.Model is Model
assert InternalDense is internal_keras.layers.Dense is Dense
assert InternalSGD is keras.optimizers.SGD
assert base_layer.Layer is keras.layers.Layer
assert internal_backend.set_floatx is keras.backend.set_floatx
assert internal_backend.set_session is tf.compat.v1.keras.backend.set_session
assert callable(internal_backend.in_train_phase)
assert keras.engine.training.Model is Model
assert callable(hdf5_format.save_model_to_hdf5)
assert tracking.Checkpoint is tf.train.Checkpoint
assert training_ops.resource_apply_momentum.__module__.endswith("gen_training_ops")
assert GroupNorm is ipu_tensorflow_addons.keras.layers.GroupNorm
assert ALSOptimizer is keras.ipu.optimizers.ALSOptimizer
assert pipeline_stage_assignment.PipelineStage is PipelineStage
assert ops.Tensor is tf.Tensor
assert control_flow_ops.cond is tf.compat.v1.cond
assert callable(normalization.batch_normalization)


def refusal(action):
    """What a call that is refused says."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


assert not isinstance(keras.Sequential(), sequential_extensions.SequentialExtension)
with ipu.ipu_strategy.IPUStrategy().scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    assert isinstance(model, sequential_extensions.SequentialExtension)
    model.compile("sgd", "mse")

    @tf.function
    def fit():
        model.fit(np.zeros((2, 1)), np.zeros((2, 1)))

    print("fit in a function:", refusal(fit))

batches = tf.data.Dataset.from_tensor_slices(np.arange(8.0)).batch(2, drop_remainder=True)
three = tf.Variable(3)
handler = data_adapter.IPUDataHandler(batches, steps_per_execution=three, replication_factor=None)
handler.set_replication_factor(3)
for factor in (8, 1):
    print(
        refusal(
            lambda: data_adapter.IPUDataHandler(batches, steps_per_execution=three, replication_factor=factor)  # noqa: B023
        )
    )
first = next(data_adapter.IPUDataHandler(batches).enumerate_epochs())[1]
print("element", next(first).numpy())
try:
    _ = ipu_tensorflow_addons.keras.layers.Dense
except NotImplementedError as error:
    print("refused:", error)
print("difference 0.0")
