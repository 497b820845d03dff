"""Folders with the SDK's names, such as ``popart``, ``poptorch`` and ``popdist``, that re-export podrun's packages.

Only re-exports under a foreign name may enter; programs import them.

``podrun`` puts this folder on PYTHONPATH of what it launches, so programs written for the SDK run
unmodified and nothing shadows a real SDK in site-packages. ``python -m podrun.compat train.py`` does the
same for one script.
"""

from __future__ import annotations

from pathlib import Path

COMPAT_PATH = str(Path(__file__).resolve().parent)
"""The folder to put on PYTHONPATH."""
