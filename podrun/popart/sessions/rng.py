"""The random seed, and the state of the generator that rounds stochastically: read, written, started from a seed.

On an IPU every worker context of every tile has 128 bits of it. Here it is one 64-bit number for the whole program,
because all replicas round alike; so the state is two words.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from podrun.compiler.program import RNG
from podrun.executable import Executable, VariableRole
from podrun.popart.errors import popart_exception, popart_runtime_error, surfaced
from podrun.popart.sessions.state import SessionState

WORDS = 2

_log = logging.getLogger("podrun.popart.session")


class SessionRng(SessionState):
    """The part of a session that knows the seed and the RNG state."""

    def getRNGState(self) -> list[int]:
        """The RNG state as it stands now, 32-bit words; `setRNGState` continues from it.

        popart_exception without enableLoadAndOffloadRNGState, or before prepareDevice.
        """
        executable = self._rng_ready("getRNGState")
        if RNG in executable.variables and self._device._loaded is self:
            with surfaced():
                values = self._device.connection.read_variables([RNG])[RNG]
            self._rng = [int(word) for word in values]
        return list(self._rng)

    def setRNGState(self, rngValue: Iterable[int]) -> None:
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

    def _rng_ready(self, call: str) -> Executable:
        executable = self._prepared(call)
        if not self._options.enableLoadAndOffloadRNGState:
            raise popart_exception(f"{call} needs SessionOptions.enableLoadAndOffloadRNGState.")
        return executable

    def _rng_value(self) -> dict[str, np.ndarray]:
        """What the device has to have, if the program rounds stochastically."""
        if RNG not in self._prepared("setRNGState").variables:
            return {}
        return {RNG: np.array(self._rng, np.uint32)}

    def setRandomSeed(self, seedValue: int) -> None:
        """Start the sequence of random numbers anew from a seed."""
        executable = self._prepared("Devicex::setRandomSeedFromHost(uint64_t)")
        self._rng = [seedValue >> 32 & 0xFFFFFFFF, seedValue & 0xFFFFFFFF]
        if self._device._loaded is self:
            self._write(self._rng_value())
        if self._seed_variable(executable) is None:
            if self._options.enableStochasticRounding:
                return
            _log.warning("The program draws no random numbers: setRandomSeed does nothing.")
            return
        self._seed = seedValue
        if self._device._loaded is self:
            self._write(self._seed_value(seedValue))

    def getRandomSeed(self) -> int:
        """The seed as it stands now; setting it again later continues the sequence from here."""
        executable = self._prepared("getRandomSeed")
        name = self._seed_variable(executable)
        if name is None:
            return 0
        if self._device._loaded is not self:
            return self._seed or 0
        with surfaced():
            high, low = (int(word) for word in self._device.connection.read_variables([name])[name])
        return high << 32 | low

    @staticmethod
    def _seed_variable(executable: Executable) -> str | None:
        roles = {v.role: name for name, v in executable.variables.items()}
        return roles.get(VariableRole.RANDOM_SEED)

    def _seed_value(self, seed: int) -> dict[str, np.ndarray]:
        name = self._seed_variable(self._prepared("setRandomSeed"))
        if name is None:
            return {}
        words = seed & (1 << 64) - 1
        return {name: np.array([words >> 32, words & 0xFFFFFFFF], np.uint32)}
