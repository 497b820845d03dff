"""One program loaded on one machine: its memory, its instruction lists, and its part of the program's groups.

An `Executable` enters through `check`, and host data through `streams`; `engine` holds the loaded program and
`interpreter` runs its lists. Results go to the host as anchors, to other machines through `machine_groups` and
`replica_messages`, and stay in `buffers` between runs.
"""
