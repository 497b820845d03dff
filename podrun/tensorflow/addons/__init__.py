"""Layers and optimizers of the SDK beside TensorFlow: `ipu_tensorflow_addons` and `keras.ipu`."""
