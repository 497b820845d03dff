"""From a program's Python to graphs of TensorFlow: traces, operations of IPUs in them, and gradients that are cut."""
