"""Tests of `podrun.onnx_models`: reading models, each operator, and what the SDK refuses of them."""
