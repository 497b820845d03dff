"""A detector in half precision: EfficientNet's blocks, two levels of features, heads for classes and boxes."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

SIDE, CLASSES = 32, 2
keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
images, kinds, boxes = (
    np.zeros((64, SIDE, SIDE, 3), np.float32),
    np.zeros((64, 8, 8, 2)),
    np.zeros((64, 8, 8, 4)),
)
for image, kind, box in zip(images, kinds, boxes, strict=True):
    image += 0.1 * random.randn(SIDE, SIDE, 3)
    which, y, x, height, width = (random.randint(*r) for r in ((0, 2), (4, 28), (4, 28), (3, 9), (3, 9)))
    image[max(y - height, 0) : y + height, max(x - width, 0) : x + width, which] += 1.0
    kind[y // 4, x // 4, which] = 1.0
    box[y // 4, x // 4] = (y % 4) / 4, (x % 4) / 4, height / 8, width / 8
targets = np.concatenate([kinds, boxes], -1).astype(np.float32)


def block(x, filters, stride, name):
    """An inverted bottleneck with squeeze and excitation."""
    layers, wide = keras.layers, 2 * x.shape[-1]
    h = layers.Conv2D(wide, 1, use_bias=False, name=name + "_expand")(x)
    h = layers.Activation("swish")(layers.BatchNormalization(momentum=0.8, name=name + "_norm_1")(h))
    h = layers.DepthwiseConv2D(3, stride, "same", use_bias=False, name=name + "_depthwise")(h)
    h = layers.Activation("swish")(layers.BatchNormalization(momentum=0.8, name=name + "_norm_2")(h))
    mean = layers.GlobalAveragePooling2D(keepdims=True)(h)
    gate = layers.Conv2D(4, 1, activation="swish", name=name + "_squeeze")(mean)
    h = h * layers.Conv2D(wide, 1, activation="sigmoid", name=name + "_excite")(gate)
    h = layers.BatchNormalization(momentum=0.8, name=name + "_norm_3")(
        layers.Conv2D(filters, 1, use_bias=False, name=name + "_project")(h)
    )
    return layers.add([h, x]) if stride == 1 and filters == x.shape[-1] else h


class FastFusion(keras.layers.Layer):
    """A sum of feature maps with positive weights that add up to one."""

    def build(self, shapes):
        self.shares = self.add_weight("shares", (len(shapes),), initializer="ones")

    def call(self, maps):
        shares = tf.nn.relu(self.shares)
        shares /= tf.reduce_sum(shares) + 1e-3
        return tf.add_n([m * shares[i] for i, m in enumerate(maps)])


def create_model():
    layers = keras.layers
    image = keras.Input((SIDE, SIDE, 3), name="image")
    x = layers.Conv2D(8, 3, 2, "same", activation="swish", name="stem")(image)
    fine = block(block(x, 12, 2, "first"), 12, 1, "second")
    coarse = block(fine, 12, 2, "third")
    down = layers.UpSampling2D(2, name="up")(coarse)
    fused = layers.Activation("swish")(FastFusion(name="fusion")([fine, down]))
    fused = layers.SeparableConv2D(16, 3, padding="same", activation="swish", name="mix")(fused)
    prior = keras.initializers.Constant(-3.0)
    scores = layers.Conv2D(CLASSES, 3, padding="same", bias_initializer=prior, name="classes")(fused)
    sides = layers.Conv2D(4, 3, padding="same", name="boxes")(fused)
    together = layers.Concatenate()([scores, sides])
    return keras.Model(image, layers.Activation("linear", dtype="float32", name="found")(together))


def detection_loss(target, found):
    """Focal loss of all cells, and Huber's loss of the boxes in those with an object; each by object."""
    classes, scores = target[..., :CLASSES], found[..., :CLASSES]
    entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=classes, logits=scores)
    chance = tf.exp(-entropy)
    focal = tf.reduce_sum(tf.where(classes > 0.5, 0.75, 0.25) * (1 - chance) ** 1.5 * entropy, [1, 2, 3])
    here = tf.reduce_max(classes, -1)
    distance = tf.abs(target[..., CLASSES:] - found[..., CLASSES:])
    huber = tf.where(distance < 0.1, 5 * distance**2, distance - 0.05)
    return focal + tf.reduce_sum(here[..., None] * huber, [1, 2, 3])


def compiled(model):
    model.compile(keras.optimizers.Adam(0.01), detection_loss, steps_per_execution=8)


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
keras.mixed_precision.set_global_policy("mixed_float16")
data = tf.data.Dataset.from_tensor_slices((images, targets)).batch(8, drop_remainder=True)
with ipu.ipu_strategy.IPUStrategy().scope():
    model = create_model()
    model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=2)
    compiled(model)
    print("loss", *model.fit(data.repeat(), steps_per_epoch=8, epochs=24, verbose=0).history["loss"])
    found = model.predict(images[:32], batch_size=8)
weights = model.get_weights()
host = create_model()
host.set_weights(weights)
print("difference", float(np.abs(host.predict(images[:8], verbose=0) - found[:8]).max()))
cells = found[..., :CLASSES].reshape(32, -1).argmax(1)
print("right", float((cells == kinds[:32].reshape(32, -1).argmax(1)).mean()))
