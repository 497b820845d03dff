"""``python -m podrun.compat SCRIPT [ARGS...]``: run a script written for the SDK, alone, on emulated
machines inside its own process.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from podrun import commands
from podrun.compat import COMPAT_PATH

USAGE = """\
Usage: python -m podrun.compat SCRIPT [arguments of the script]

Runs a program written for the SDK alone, on IPU-M2000s emulated inside its own process: no partition, no server, the
same results. podrun starts it on a POD of machine processes instead: podrun --num-replicas 16 SCRIPT

Example: python -m podrun.compat examples/digits/train.py --replicas 16"""


def main(arguments: list[str]) -> int:
    """Run the script as ``__main__`` with popart and popdist on the path, for it and for its child
    processes.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    script = Path(arguments[0])
    if not script.is_file():
        print(f"error: there is no script {arguments[0]}", file=sys.stderr)
        print(
            "hint: Check the path. This command has no options; those of the script follow its name.",
            file=sys.stderr,
        )
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
    # The script has done its work, whatever becomes of what it prints; podrun says the same of its instances.
    sys.exit(commands.run(lambda: main(sys.argv[1:]), command="podrun.compat", loss_fails=False))
