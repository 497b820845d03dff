"""PopTorch programs of several instances: `launched` is what ``popdist.poptorch`` and ``horovod.torch`` give them.

The layout of the launcher enters through the environment; options for one instance, and tensors reduced over all of
them, leave.
"""
