"""``python -m podrun.compat SCRIPT [ARGS...]`` (or ``-m MODULE``): run a program written for the SDK,
alone, on emulated machines inside its own process.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from podrun import commands
from podrun.compat import COMPAT_PATH

USAGE = """\
Usage: python -m podrun.compat SCRIPT [arguments of the script]
       python -m podrun.compat -m MODULE [arguments of the module]

Runs a program written for the SDK alone, on IPU-M2000s emulated inside its own process: no partition, no server, the
same results. podrun starts it on a POD of machine processes instead: podrun --num-replicas 16 SCRIPT

Examples: python -m podrun.compat examples/digits/train.py --replicas 16
          python -m podrun.compat -m pytest tests"""


def main(arguments: list[str]) -> int:
    """Run the script (or module) as ``__main__`` with popart and popdist on the path, for it and for its
    child processes.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    module = arguments[0] == "-m"
    if module and len(arguments) == 1:
        return _wrong("-m needs the name of a module", "As in: python -m podrun.compat -m pytest tests")
    if module:
        # As for Python's own -m: the working directory comes first.
        name, sys.argv, sys.path[0] = arguments[1], arguments[1:], os.getcwd()
    else:
        name, sys.argv = arguments[0], arguments
        if not Path(name).is_file():
            hint = "Check the path. This command has no options but -m; those of the script follow its name."
            return _wrong(f"there is no script {name}", hint)
        sys.path[0] = str(Path(name).resolve().parent)
    # Before site-packages, so that the names are ours; podrun itself is importable already.
    sys.path.insert(1, COMPAT_PATH)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = COMPAT_PATH + (os.pathsep + inherited if inherited else "")
    if not module:
        runpy.run_path(name, run_name="__main__")
    elif _is_there(name):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        return _wrong(f"there is no module {name}", f"Check the name: {sys.executable} -m {name}")
    return 0


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _wrong(message: str, hint: str) -> int:
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    # The script has done its work, whatever becomes of what it prints; podrun says the same of its instances.
    sys.exit(commands.run(lambda: main(sys.argv[1:]), command="podrun.compat", loss_fails=False))
