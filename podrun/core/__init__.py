"""Values that all rooms share: errors and their codec, the Executable, layouts, the POD, environment, access and so on.

Only values, their checks and their file formats may enter: nothing that starts a process, opens a connection or imports
a heavy library. Every other room imports from here; this room imports no other. Front ends and the compiler fill these
values, and devices, services and tools read them.
"""
