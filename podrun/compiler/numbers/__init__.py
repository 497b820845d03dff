"""What a batch computes, for all replicas of a machine at once: functions over named buffers.

`chunk` is forward and backward of some micro-batches; for it `fold` makes replicas and micro-batches one axis and takes
the gradients. `update` turns reduced gradients into new weights. `host_streams` describes what enters from the host and
returns to it.
"""
