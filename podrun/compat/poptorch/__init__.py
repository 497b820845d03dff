"""``import poptorch`` for programs written for the SDK: all of `podrun.poptorch`, under PopTorch's name."""

from __future__ import annotations

import sys
from typing import Any

from podrun.compat._error_reports import install as _install

_install()  # First, so that a missing PyTorch is told as an error of podrun's.

from podrun import poptorch as _poptorch  # noqa: E402
from podrun.compat._numpy_1 import give_back as _give_back  # noqa: E402
from podrun.onnx_models.ops import registry as _registry  # noqa: E402, F401  # Offers its operators to custom_op.
from podrun.popart.operators.cpp_operators import explain_compilers as _explain_compilers  # noqa: E402
from podrun.popart.operators.custom import explain_libraries as _explain_libraries  # noqa: E402
from podrun.popart.operators.custom import load_files as _load_files  # noqa: E402
from podrun.poptorch import *  # noqa: E402, F403
from podrun.poptorch import __version__ as __version__  # noqa: E402
from podrun.poptorch.api import enums, ops, optim, options, profiling  # noqa: E402
from podrun.poptorch.api.logs import start_log as _start_log  # noqa: E402
from podrun.poptorch.executor.wrappers import print as print  # noqa: E402

_give_back()
_explain_libraries()
_explain_compilers()
_start_log()
for _module in (enums, ops, optim, options, profiling):
    sys.modules.setdefault(f"poptorch.{_module.__name__.rpartition('.')[2]}", _module)
_load_files()

from . import poptorch_core as poptorch_core  # noqa: E402
from . import testing as testing  # noqa: E402


def __getattr__(name: str) -> Any:
    return getattr(_poptorch, name)
