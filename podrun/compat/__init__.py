"""Folders with the SDK's names, such as ``popart``, ``poptorch`` and ``popdist``, that re-export podrun's packages.

Only re-exports under a foreign name may enter; programs import them.

``podrun`` puts this folder on PYTHONPATH of what it launches, so programs written for the SDK run unmodified and
nothing shadows a real SDK in site-packages. ``python -m podrun.compat train.py`` does the same for one script.
"""

from __future__ import annotations

import os
import sys

if sys.argv[:1] == ["-m"] and "podrun.compat" in sys.orig_argv[:-1]:
    # Python looks for modules in the working directory first: a random.py there would take the place of Python's own
    # before podrun could say so. `podrun.compat.__main__` puts the program's folder here.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from pathlib import Path

COMPAT_PATH = str(Path(__file__).resolve().parent)
"""The folder to put on PYTHONPATH."""
