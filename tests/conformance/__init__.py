"""Numbers against independent references: the conformance suite of the onnx wheel, run through our backend."""
