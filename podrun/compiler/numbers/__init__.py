"""What a batch computes, for all replicas of a machine at once: functions over named buffers.

`chunk` is forward and backward of some micro-batches: `fold` makes replicas and micro-batches one axis, `differentiate`
gives the gradients. `update` turns reduced gradients into new weights; of updates that are `alike` one is traced.
`host_streams` are what comes from the host and goes to it.
"""
