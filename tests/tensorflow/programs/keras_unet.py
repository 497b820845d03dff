"""A U-Net whose skips are cropped, in a pipeline of four stages that layers' names say, beside training on the host."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers
from tensorflow.python import ipu

SIZE, COUNT, STEPS = 44, 8, 16
STAGE_AFTER = {"down_0_pool": 1, "up_0_transpose": 2, "up_1_transpose": 3}


def centre(x, size):
    edge = (x.shape[1] - size) // 2
    return x[:, edge : edge + size, edge : edge + size, :]


class Crop(layers.Layer):
    def __init__(self, size, **options):
        super().__init__(**options)
        self.size = size

    def call(self, inputs):
        return centre(inputs, self.size)


def block(x, width, name):
    for i in range(2):
        x = layers.Conv2D(width, 3, activation="relu", kernel_initializer="he_normal", name=f"{name}_{i}")(x)
    return x


def create_model():
    x = inputs = keras.Input((SIZE, SIZE, 1))
    skips = []
    for i, width in enumerate((4, 8)):
        x = block(x, width, f"down_{i}")
        skips.append(Crop(8, name=f"crop_{i}")(x))
        x = layers.MaxPooling2D(2, name=f"down_{i}_pool")(x)
    x = block(x, 16, "bottom")
    for i, width in enumerate((8, 4)):
        x = layers.Conv2DTranspose(
            width, 2, 2, padding="same", activation=tf.nn.relu, name=f"up_{i}_transpose"
        )(x)
        x = tf.concat([x, skips.pop()], -1)
        x = block(x, width, f"up_{i}")
    return keras.Model(inputs, layers.Conv2D(2, 1, name="classes")(x))


def flat(values):
    return tf.reshape(tf.cast(values, tf.float32), [tf.shape(values)[0], -1, 2])


def dice(y_true, y_pred):
    truth, chance = flat(y_true), tf.nn.softmax(flat(y_pred))
    both = tf.reduce_sum(truth * chance, 1)
    return tf.reduce_mean((2 * both + 1e-6) / (tf.reduce_sum(truth * truth + chance * chance, 1) + 1e-6))


def cost(y_true, y_pred):
    entropy = tf.nn.softmax_cross_entropy_with_logits(flat(y_true), flat(y_pred))
    return tf.reduce_mean(entropy) + 1 - dice(y_true, y_pred)


def mean_of(count):
    return lambda pairs: [(gradient / count, variable) for gradient, variable in pairs]


keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
with ipu.ipu_strategy.IPUStrategy().scope():
    shape = create_model().output_shape
images = random.rand(STEPS, SIZE, SIZE, 1).astype(np.float32)
bright = tf.nn.avg_pool2d(images, 5, 1, "SAME").numpy() > 0.5
masks = centre(np.concatenate([bright, ~bright], -1).astype(np.float32), shape[1])
config = ipu.config.IPUConfig()
config.auto_select_ipus = 4
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = create_model()
    stage, assignments = 0, model.get_pipeline_stage_assignment()
    for assignment in assignments:
        assignment.pipeline_stage = stage
        stage = STAGE_AFTER.get(assignment.layer.name, stage)
    model.set_pipeline_stage_assignment(assignments)
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=COUNT,
        recomputation_mode=ipu.ops.pipelining_ops.RecomputationMode.Auto,
        pipeline_schedule=ipu.pipelining_ops.PipelineSchedule.Interleaved,
        offload_weight_update_variables=False,
    )
    adam = keras.optimizers.Adam(1e-2, epsilon=1e-4, gradient_transformers=[mean_of(COUNT)])
    model.compile(adam, cost, metrics=[dice], steps_per_execution=STEPS)
    start = model.get_weights()
    data = tf.data.Dataset.from_tensor_slices((images, masks)).repeat().batch(1, drop_remainder=True)
    model.fit(data, steps_per_epoch=STEPS, epochs=3, verbose=0)
    measured = model.evaluate(data, steps=STEPS, verbose=0)
    outputs = model.predict(images, batch_size=1, verbose=0)

host = create_model()
host.set_weights(start)
host.compile(
    keras.optimizers.Adam(1e-2, epsilon=1e-4),
    lambda t, p: tf.map_fn(
        lambda pair: cost(pair[0][tf.newaxis], pair[1][tf.newaxis]), (t, p), fn_output_signature=tf.float32
    ),
)
host.fit(images, masks, batch_size=COUNT, epochs=3, shuffle=False, verbose=0)
expected = host(images).numpy()
costs = [float(cost(masks[i : i + 1], expected[i : i + 1])) for i in range(STEPS)]
pairs = [*zip(model.get_weights(), host.get_weights(), strict=True), (outputs, expected)]
print("stages", stage + 1, "shape", outputs.shape)
print("loss", measured[0], "dice", measured[1])
print("difference", max(float(np.abs(a - b).max()) for a, b in [*pairs, (measured[0], np.mean(costs))]))
