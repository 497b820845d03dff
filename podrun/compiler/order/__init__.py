"""The instruction lists of the IPUs of a replica, for one batch.

`schedule` for replicas that are whole on an IPU. For those over several, `chain` makes a micro-batch segments, and
`sharding` puts them in turn or in a pipeline. `meetings` cut pieces where machines meet for a collective of the model;
`gathering` is what one machine of a replica does with what others hold.
"""
