"""podrun against ONNX's own suite, generated nodes and real models, with ONNX's implementations as peers."""
