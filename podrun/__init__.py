"""podrun: an IPU-POD you can run without IPUs.

The rooms, from the ground up (``docs/design.md`` says what each is for and which may import which): errors, cluster,
telemetry, executable, faults, collectives, device, compiler, popart and popdist, partition, monitor, launcher, compat.

This file imports nothing, so that the commands that only look at things start fast.
"""

__version__ = "0.1.0"
