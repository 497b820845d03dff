"""The random seed, and the state of the generator that rounds stochastically: read, written, started from a seed.

On an IPU every worker context of every tile has 128 bits of state. Here the state is one 64-bit number (two words) for
the whole program, because all replicas round alike. Operators draw and round with a second generator, the seed; where a
program has it the state is four words, and setting a state repeats a run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from podrun.compiler.program import RNG
from podrun.core.errors import CallError, UsageError
from podrun.core.executable import Executable, VariableRole
from podrun.runtime.device_program import DeviceProgram
from podrun.runtime.settings import RunSettings, SyntheticData
from podrun.runtime.words import SessionCall

WORDS = 2

_log = logging.getLogger("podrun.runtime")


class RandomState:
    """The seed and the RNG state of a session, on the host and on its device."""

    def __init__(self, program: DeviceProgram, settings: RunSettings) -> None:
        self._program, self._settings = program, settings
        self._seed: int | None = None
        self._rng = [0] * WORDS

    def rng_state(self) -> list[int]:
        """The state that updates round with, then that of the operators, if any uses one."""
        self._check_rng(SessionCall.READ_RANDOM_STATE)
        if self._is_synthetic:
            return []
        seed = self.seed()
        return [*self.read_rng(), *([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF] if self._has_seed else [])]

    def read_rng(self) -> list[int]:
        """The present RNG state, 32-bit words."""
        executable = self._program.prepared(SessionCall.READ_RANDOM_STATE)
        if RNG in executable.variables and self._program.on_device:
            self._rng = [int(word) for word in self._program.read([RNG])[RNG]]
        return list(self._rng)

    def set_rng_state(self, words: Iterable[int]) -> None:
        """Continue from a state that `rng_state` returned. CallError for a state of another size."""
        self._check_rng(SessionCall.SET_RANDOM_STATE)
        words = [int(word) for word in words]
        size = 0 if self._is_synthetic else WORDS * (1 + self._has_seed)
        if len(words) != size or any(not 0 <= word < 1 << 32 for word in words):
            text = self._program.words.random_state_size.format(size=len(words), expected=size)
            raise CallError(f"{text} (32-bit words).")
        if not words:
            return
        self._rng = words[:WORDS]
        if self._has_seed:
            self._seed = words[WORDS] << 32 | words[WORDS + 1]
        if self._program.on_device:
            self._program.write(self.values())

    def set_seed(self, seed: int) -> None:
        """Restart the random numbers from a seed."""
        executable = self._program.prepared(SessionCall.SET_SEED)
        self._rng = [seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF]
        if self._program.on_device:
            self._program.write(self._rng_value())
        if _seed_variable(executable) is None:
            if self._settings.stochastic_rounding:
                return
            _log.info("%s", self._program.words.unused_seed)
            return
        self._seed = seed
        if self._program.on_device:
            self._program.write(self._seed_value())

    def seed(self) -> int:
        """The seed that random operators draw from now; 0 for a program without any."""
        name = _seed_variable(self._program.prepared(SessionCall.READ_SEED))
        if name is None:
            return 0
        if not self._program.on_device:
            return self._seed or 0
        high, low = (int(word) for word in self._program.read([name])[name])
        return high << 32 | low

    def restore(self, seed: int, rng: Iterable[int]) -> None:
        """Continue from a seed and an RNG state; `values` returns what the device needs."""
        self._seed, self._rng = seed, [int(word) for word in rng]

    def values(self) -> dict[str, np.ndarray]:
        """The variables that a program on the device starts with, if it draws numbers or rounds stochastically."""
        return self._seed_value() | self._rng_value()

    @property
    def _has_seed(self) -> bool:
        """Whether operators use a seed: dropout, random tensors, and stochastic rounding."""
        return _seed_variable(self._program.prepared(SessionCall.READ_RANDOM_STATE)) is not None

    @property
    def _is_synthetic(self) -> bool:
        """With synthetic data nothing travels between host and device, so the state is empty."""
        return self._settings.synthetic is not SyntheticData.OFF

    def _check_rng(self, call: SessionCall) -> None:
        self._program.prepared(call)
        if not self._settings.keeps_random_state:
            words = self._program.words
            raise UsageError(words.no_random_state.format(call=words.name(call)))

    def _rng_value(self) -> dict[str, np.ndarray]:
        if RNG not in self._program.prepared(SessionCall.SET_RANDOM_STATE).variables:
            return {}
        return {RNG: np.array(self._rng, np.uint32)}

    def _seed_value(self) -> dict[str, np.ndarray]:
        name = _seed_variable(self._program.prepared(SessionCall.SET_SEED))
        if name is None or self._seed is None:
            return {}
        words = self._seed & (1 << 64) - 1
        return {name: np.array([words >> 32, words & 0xFFFFFFFF], np.uint32)}


def _seed_variable(executable: Executable) -> str | None:
    roles = {v.role: name for name, v in executable.variables.items()}
    return roles.get(VariableRole.RANDOM_SEED)
