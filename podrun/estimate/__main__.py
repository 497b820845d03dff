"""``python -m podrun.estimate`` is ``podrun estimate``."""

from __future__ import annotations

import sys

from podrun import commands
from podrun.estimate.command import main

if __name__ == "__main__":
    sys.exit(commands.run(main, command="podrun.estimate"))
