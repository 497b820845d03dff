"""What holds IPUs and is used in a ``with`` statement: `ClosedAtEnd` gives them back at its end."""

from __future__ import annotations

from typing import Self


class ClosedAtEnd:
    """A context that closes itself. Its users have a ``close``, which may be called twice."""

    def close(self) -> None:
        """Give back what is held. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()
