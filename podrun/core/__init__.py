"""What all rooms talk about: errors and their codec, the Executable, layouts, the POD, environment, access, telemetry.

Only values, their checks and their file formats enter here: nothing that starts a process, opens a connection or
imports a heavy library. Every other room imports from here; this room imports no other. Front ends and the compiler
fill these values, and devices, services and tools read them.
"""
