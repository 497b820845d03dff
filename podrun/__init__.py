"""podrun: an IPU-POD you can run without IPUs.

``docs/design.md`` has the table of rooms, from the ground up: what each is for and which it may import.

This file imports nothing, so that the commands that only look at things start fast. PYTEST_DONT_REWRITE: podrun holds
a plugin of pytest, and is imported before pytest under ``podrun.compat -m pytest``.
"""

__version__ = "0.1.0"
