"""``import popart_core`` for programs that name PopART's binding itself: what `podrun.popart` has, and the
functions by which tests of recovery code raise the SDK's exceptions (``_throw_recoverable_runtime_error("...")``).
"""

from __future__ import annotations

from typing import Any, NoReturn

from podrun import popart as _popart
from podrun.popart import *  # noqa: F403

_THROWN = {
    "popart_error": "popart_exception",
    "popart_internal_error": "popart_internal_exception",
    "popart_runtime_error": "popart_runtime_error",
    "poplibs_error": "poplibs_exception",
    "poplar_error": "poplar_exception",
    "poplar_runtime_error": "poplar_runtime_error",
    "application_runtime_error": "poplar_application_runtime_error",
    "system_runtime_error": "poplar_system_runtime_error",
    "recoverable_runtime_error": "poplar_recoverable_runtime_error",
    "unrecoverable_runtime_error": "poplar_unrecoverable_runtime_error",
    "unknown_runtime_error": "poplar_unknown_runtime_error",
}


def __getattr__(name: str) -> Any:
    exception = _THROWN.get(name.removeprefix("_throw_")) if name.startswith("_throw_") else None
    if exception is None:
        return getattr(_popart, name)

    more = {"recovery_action": _popart.RecoveryAction.IPU_RESET} if "_recoverable" in exception else {}

    def throw(message: str) -> NoReturn:
        raise getattr(_popart, exception)(message, **more)

    return throw
