"""How models are served: an ONNX model becomes one compiled file, a runtime runs it, the genuine Triton serves it.

`compiler` makes a `ServedModel` of an ONNX model, `loaded_model` puts one on IPUs and runs it, `runner` gives
requests of any size to it from any thread; `triton_backend` answers Triton's requests and `triton_server` starts the
server. Protocols, batching and model control are the server's own: only what it lacks may enter.
"""
