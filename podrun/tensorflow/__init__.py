"""The front end of TensorFlow: programs of version 1 and 2 for IPUs, on the runtime.

`sdk` has the names that programs use, `capture` makes graphs of what they compute on an IPU, `graph` turns these into
models of the runtime with the functions in `operators`, and `execution` runs them. docs/tensorflow.md is the design.
TensorFlow is imported by modules of this room only, and by the folder in `podrun.compat` that serves them.
"""
