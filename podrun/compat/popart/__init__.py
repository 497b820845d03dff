"""``import popart`` for scripts written for the SDK: all of `podrun.popart`, under PopART's name."""

from __future__ import annotations

import sys
from typing import Any

from podrun.core.garbage import without_garbage_collection as _without_garbage_collection

with _without_garbage_collection():
    from podrun import popart as _popart
    from podrun.compat._error_reports import install as _install
    from podrun.compat._numpy_1 import give_back as _give_back
    from podrun.popart import *  # noqa: F403
    from podrun.popart import __all__ as __all__
    from podrun.popart.operators.cpp_operators import explain_compilers as _explain_compilers
    from podrun.popart.operators.custom import explain_libraries as _explain_libraries
    from podrun.popart.operators.custom import load_files as _load_files
    from podrun.popart.sessions import session as session
    from podrun.popart.values.debug import POPART_VERSION

__version__ = POPART_VERSION
_install()
_give_back()
_explain_libraries()
_explain_compilers()
sys.modules.setdefault("popart.session", session)
_load_files()


def __getattr__(name: str) -> Any:
    return getattr(_popart, name)
