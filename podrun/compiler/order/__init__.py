"""The instruction lists of the IPUs of a replica, for one batch.

`schedule` writes them for replicas that lie on one IPU. For those over several, `chain` cuts a micro-batch into
segments, and `timetable` runs these in turn or as a pipeline. `collective_cuts` cuts pieces where machines exchange
data for a collective of the model; `joint_update` does updates and gradient statistics across a replica's machines.
"""
