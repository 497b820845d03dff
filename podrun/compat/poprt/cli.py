"""``python -m poprt.cli``: the command ``poprt``."""

import sys

from podrun.serving.poprt_command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
