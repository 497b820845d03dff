"""How models are served: an ONNX model becomes one compiled file, a runtime runs it, the genuine Triton serves it.

`convert` makes a model for IPUs of an ONNX model, `compiler` a `ServedModel` of that, `loaded_model` puts one on IPUs
and runs it, `runner` gives requests of any size to it from any thread; `triton_backend` answers Triton's requests and
`triton_server` starts the server. Protocols, batching and model control are the server's own: only what it lacks may
enter.
"""
