"""Values that all rooms share: errors and their codec, the Executable, layouts, the POD, environment, access and so on.

Only values, their checks and their file formats may enter: nothing that starts a process or imports a heavy library at
start-up. The ways in and out that all rooms share are here too: the doors of servers (`gate`) and what clients knock
with (`proven_channel`), which import gRPC on first use. Every other room imports from here; this room imports no other.
Front ends and the compiler fill these values, and devices, services and tools read them.
"""
