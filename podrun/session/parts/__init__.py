"""The parts of `podrun.session.session.Session`: objects that the session holds, each with what it needs.

A model, options and a device enter, and `assembly` makes the parts of them. `device_program` compiles and loads, `run`
runs batches, `weights` holds and moves the host's copy, `rng` is the random state, `replica_check` compares replicas,
`files` writes files and reports, `ir` shows the graph. `forward_only` is the second program of a pipelined training
session. Executables and step data go to `podrun.device`.
"""
