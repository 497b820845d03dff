"""``python -m podrun``: the command ``podrun``, where no script of that name is on the path."""

from __future__ import annotations

import os
import sys

# As for the command itself: a random.py in the working directory does not take the place of Python's own module.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from podrun.commands import podrun  # noqa: E402 - after the line above

if __name__ == "__main__":
    sys.argv[0] = "podrun"
    sys.exit(podrun())
