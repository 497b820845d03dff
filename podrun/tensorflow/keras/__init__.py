"""Keras models under an IPU strategy: fit, evaluate and predict as programs on IPUs."""
