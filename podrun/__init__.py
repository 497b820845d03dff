"""podrun: an IPU-POD you can run without IPUs.

``docs/design.md`` has the table of rooms, from the ground up: what each is for and which it may import.

This file imports nothing, so that the commands that only look at things start fast.
"""

__version__ = "0.1.0"
