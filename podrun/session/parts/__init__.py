"""The parts of `podrun.session.session.Session`: objects that the session holds, each with what it needs.

A model, options and a device enter; `assembly` makes the parts of them. `device_program` compiles and loads, `run` runs
batches, `weights` has and moves the host's copy, `rng` is the random state, `replica_check` compares replicas,
`files` and `ir` go out to files, reports and people. `forward_only` is the second program of a pipelined training
session. Executables and step data go to `podrun.device`.
"""
