"""``python -m podrun.compat SCRIPT [ARGS...]``: run a script written for the SDK, alone, on emulated
machines inside its own process.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from podrun.compat import COMPAT_PATH


def main(arguments: list[str]) -> int:
    """Run the script as ``__main__`` with popart and popdist on the path, for it and for its child
    processes.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m podrun.compat SCRIPT [ARGS...]", file=sys.stderr)
        return 0 if arguments else 2
    script = Path(arguments[0])
    if not script.is_file():
        print(f"error: there is no script {arguments[0]!r}.", file=sys.stderr)
        return 2
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    # Before site-packages, so that the names are ours; podrun itself is importable already.
    sys.path.insert(1, COMPAT_PATH)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = COMPAT_PATH + (os.pathsep + inherited if inherited else "")
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
