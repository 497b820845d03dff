"""Owners of one program on one machine doing something together: all come, the last one does it, all get the
outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from podrun.errors import PoplarError


@dataclass(slots=True)
class Meeting:
    """One load or one run. ``arrivals``: what each owner brought, by owner id. Guarded by the
    machine's lock.
    """

    arrivals: dict[int, Any] = field(default_factory=dict)
    started: bool = False
    done: bool = False
    result: Any = None
    error: PoplarError | None = None

    def fail(self, error: PoplarError) -> None:
        """End the meeting with an error for all; the first one stands."""
        if not self.done:
            self.error = self.error or error
            self.done = True

    def hold(
        self, work: Callable[[dict[int, Any]], Any], explain: Callable[[BaseException], PoplarError]
    ) -> None:
        """Do the work, without the lock; whatever it raises becomes the outcome."""
        try:
            self.result = work(self.arrivals)
        except BaseException as error:
            self.error = explain(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.done = True

    def outcome(self) -> Any:
        """The result, or the error raised anew in the calling thread."""
        if self.error is not None:
            raise _fresh(self.error)
        return self.result


def _fresh(error: PoplarError) -> PoplarError:
    """An equal error with a traceback of its own: several threads may raise it at once."""
    from podrun.errors import error_from_dict

    return error_from_dict(error.to_dict())
