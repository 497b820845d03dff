"""A voice in two stages: letters become spectra as long as durations say; losses with masks, a warm-up, and an
optimizer of the program that decays weights, beside the same training on the host.
"""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers
from tensorflow.python import ipu

LETTERS, FRAMES, BANDS, WIDTH, BATCH, COUNT, STEPS, EPOCHS = 10, 24, 6, 16, 2, 4, 16, 4


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate, steps, after):
        super().__init__()
        self.rate, self.steps, self.after = rate, steps, after

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        return tf.cond(step < self.steps, lambda: self.rate * step / self.steps, lambda: self.after(step))

    def get_config(self):
        return {"rate": self.rate, "steps": self.steps, "after": self.after}


class Decaying(keras.optimizers.Adam):
    def __init__(self, *args, decayed=0.01, **options):
        super().__init__(*args, **options)
        self.decayed = decayed

    def _prepare_local(self, device, dtype, state):
        super()._prepare_local(device, dtype, state)
        state[device, dtype]["decayed"] = tf.constant(self.decayed, dtype)

    def _resource_apply_dense(self, grad, var, apply_state=None):
        state = apply_state[var.device, var.dtype.base_dtype]
        plain = "bias" in var.name or "norm" in var.name
        decay = tf.no_op() if plain else var.assign_sub(state["lr_t"] * var * state["decayed"])
        with tf.control_dependencies([decay]):
            return super()._resource_apply_dense(grad, var, apply_state)

    def apply_gradients(self, grads_and_vars, **options):
        gradients, variables = zip(*grads_and_vars, strict=True)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        return super().apply_gradients(zip(gradients, variables, strict=True), **options)


class Stretch(layers.Layer):
    """Each letter as often as its duration says; frames behind the last one are empty."""

    def call(self, inputs):
        letters, durations = inputs
        ends = tf.cumsum(durations, axis=1)[:, tf.newaxis]
        frame = tf.range(FRAMES, dtype=durations.dtype)[tf.newaxis, :, tf.newaxis]
        share = tf.cast((frame < ends) & (frame >= ends - durations[:, tf.newaxis]), letters.dtype)
        return tf.matmul(share, letters), tf.reduce_sum(share, -1)


def block(x, width, name):
    x = layers.Conv1D(width, 3, padding="same", activation=tf.nn.relu, name=f"{name}_conv")(x)
    return layers.LayerNormalization(name=f"{name}_norm")(x)


def predictor(x, mask, name):
    values = layers.Dense(1, name=f"{name}_dense")(block(x, WIDTH, f"{name}_block"))
    return layers.Lambda(lambda v: tf.squeeze(v[0], -1) * v[1], name=name)([values, mask])


def create_model(stage):
    with stage(0):
        text = keras.Input((LETTERS,), BATCH, dtype=tf.int32, name="text")
        durations = keras.Input((LETTERS,), BATCH, name="durations")
        pitches = keras.Input((LETTERS,), BATCH, name="pitches")
        mask = layers.Lambda(lambda x: tf.cast(tf.not_equal(x, 0), tf.float32))(text)
        x = block(layers.Embedding(12, WIDTH, name="embedding")(text), WIDTH, "encoder")
        duration, pitch = predictor(x, mask, "duration"), predictor(x, mask, "pitch")
        x = x + layers.Conv1D(WIDTH, 3, padding="same")(tf.expand_dims(pitches, 2))
        x, heard = Stretch()([x, durations])
    with stage(1):
        x = x + layers.MultiHeadAttention(2, 8)(x, x, attention_mask=heard[:, tf.newaxis])
        first = layers.Dense(BANDS, name="first")(block(x, WIDTH, "decoder"))
        rest = layers.Dense(BANDS)(block(first, WIDTH, "last"))
        spectrum = layers.Add(name="spectrum")([first, rest * heard[:, :, tf.newaxis]])
    outputs = {"duration": duration, "pitch": pitch, "first": first, "spectrum": spectrum}
    return keras.Model([text, durations, pitches], outputs)


def masked(of):
    def loss(truth, prediction):
        there = tf.reduce_mean(tf.cast(tf.not_equal(truth, 0), tf.float32))
        return tf.reduce_mean(of(truth, prediction), list(range(1, len(truth.shape)))) / there

    return loss


def logarithms(truth, prediction):
    return (tf.math.log(truth + 1) - prediction) ** 2


LOSSES = {
    "duration": masked(logarithms),
    "pitch": masked(tf.math.squared_difference),
    "first": masked(lambda truth, prediction: tf.abs(truth - prediction)),
    "spectrum": masked(lambda truth, prediction: tf.abs(truth - prediction)),
}


def optimizer():
    decay = keras.optimizers.schedules.PolynomialDecay(0.02, 40, 1e-3)
    return Decaying(WarmUp(0.02, 3.0, decay), epsilon=1e-4)


keras.utils.set_random_seed(3)
random = np.random.RandomState(0)
text = random.randint(1, 12, (BATCH * STEPS, LETTERS)).astype(np.int32)
text[:, 8:] = 0
durations = (np.where(text > 0, 1 + text % 3, 0)).astype(np.float32)
pitches = np.where(text > 0, text / 12, 0).astype(np.float32)
sound = random.rand(12, BANDS).astype(np.float32)
spectra = np.zeros((BATCH * STEPS, FRAMES, BANDS), np.float32)
for spoken, letters, often in zip(spectra, text, durations.astype(int), strict=True):
    spoken[: often.sum()] = sound[np.repeat(letters, often)]
inputs = {"text": text, "durations": durations, "pitches": pitches}
targets = {"duration": durations, "pitch": pitches, "first": spectra, "spectrum": spectra}
data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(BATCH, drop_remainder=True).repeat()
config = ipu.config.IPUConfig()
config.auto_select_ipus = 2
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = create_model(ipu.keras.PipelineStage)
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=COUNT, gradient_accumulation_reduction_method="mean"
    )
    model.compile(optimizer(), LOSSES, steps_per_execution=STEPS)
    start = model.get_weights()
    history = model.fit(data, epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0).history

host = create_model(lambda _: tf.name_scope("host"))
host.set_weights(start)
update, batches = optimizer(), iter(data)
for _ in range(EPOCHS * STEPS // COUNT):
    with tf.GradientTape() as tape:
        total = 0.0
        for _ in range(COUNT):
            given, truth = next(batches)
            answer = host(given, training=True)
            total += sum(tf.reduce_mean(LOSSES[k](truth[k], answer[k])) for k in LOSSES) / COUNT
    gradients = map(tf.convert_to_tensor, tape.gradient(total, host.trainable_variables))
    update.apply_gradients(zip(gradients, host.trainable_variables, strict=True))
print("outputs", sorted(name for name in history if name != "loss"))
print("loss", *history["loss"])
pairs = zip(model.get_weights(), host.get_weights(), strict=True)
print("difference", max(float(np.abs(a - b).max()) for a, b in pairs))
