"""ONNX models in PopART's words: read and checked (`loader`), rewritten by programs (`transformer`), written again with
trained weights (`model_files`), shapes inferred by ONNX (`onnx_inference`).
"""
