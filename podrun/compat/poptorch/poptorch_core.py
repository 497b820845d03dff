"""``poptorch.poptorch_core``, the SDK's compiled part, as programs and tests name it: errors and checks of options."""

from __future__ import annotations

from typing import Any

from podrun.poptorch.api.annotations import isRunningOnIpu as isCompilingWithDispatcher
from podrun.poptorch.compile.popart_options import check_popart_options
from podrun.poptorch.errors import Error, RecoverableError, TestErrorType, UnrecoverableError
from podrun.poptorch.errors import throw_test_error as _throwTestError

__all__ = [
    "Error",
    "RecoverableError",
    "TestErrorType",
    "UnrecoverableError",
    "_throwTestError",
    "_validateOptions",
    "isCompilingWithDispatcher",
]


def _validateOptions(options: dict[str, Any]) -> None:
    """Error for PopART options in ``Options.toDict()`` that sessions do not have."""
    check_popart_options(options.get("popart_options", {}))
