"""One emulated IPU-M2000: four IPUs that run an Executable, alone or with other machines, for one or more host
processes.

Host processes enter through a `connection`, which goes through `host` and a machine's `service`, or straight to an
in-process `machine`. There `owners` of one `job` load a `program` and run it; `xla` computes its pieces. Results
return the same way, reports go to the partition service, and error messages (`error_messages`) to everyone concerned;
this room neither places nor starts machines.
"""
