"""The names that programs use: what `tensorflow.python.ipu` has. One module for each of the SDK's."""
