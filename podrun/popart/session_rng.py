"""The state of the generator that rounds stochastically: read, written, and started from a seed.

On an IPU every worker context of every tile has 128 bits of it. Here it is one 64-bit number for the whole program,
because all replicas round alike; so the state is two words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from podrun.compiler.program import RNG
from podrun.popart.errors import popart_exception, popart_runtime_error, surfaced

if TYPE_CHECKING:
    from podrun.executable import Executable
    from podrun.popart.session import Session

WORDS = 2


class SessionRng:
    """The part of a session that knows the RNG state."""

    _rng: list[int]

    def getRNGState(self: Session) -> list[int]:  # type: ignore[misc]
        """The RNG state as it stands now, 32-bit words; `setRNGState` continues from it.

        popart_exception without enableLoadAndOffloadRNGState, or before prepareDevice.
        """
        executable = self._rng_ready("getRNGState")
        if RNG in executable.variables and self._device._loaded is self:
            with surfaced():
                values = self._device.connection.read_variables([RNG])[RNG]
            self._rng = [int(word) for word in values]
        return list(self._rng)

    def setRNGState(self: Session, rngValue: Iterable[int]) -> None:  # type: ignore[misc]
        """Continue from a state that `getRNGState` gave. popart_runtime_error for one of another size."""
        self._rng_ready("setRNGState")
        words = [int(word) for word in rngValue]
        if len(words) != WORDS or any(not 0 <= word < 1 << 32 for word in words):
            raise popart_runtime_error(
                f"Devicex::setRngStateValue received rngState of size {len(words)}; was expecting size {WORDS} "
                "(32-bit words)."
            )
        self._rng = words
        if self._device._loaded is self:
            self._write(self._rng_value())

    def _rng_ready(self: Session, call: str) -> Executable:  # type: ignore[misc]
        executable = self._prepared(call)
        if not self._options.enableLoadAndOffloadRNGState:
            raise popart_exception(f"{call} needs SessionOptions.enableLoadAndOffloadRNGState.")
        return executable

    def _rng_value(self: Session) -> dict[str, np.ndarray]:  # type: ignore[misc]
        """What the device has to have, if the program rounds stochastically."""
        if RNG not in self._prepared("setRNGState").variables:
            return {}
        return {RNG: np.array(self._rng, np.uint32)}
