"""The states of machines and IPUs that reports carry; the values are what tools and the reports' JSON say.

Faults leave IPUs in these states (`podrun.core.fault_effects`); a machine says which, and the partition service says it
of machines that cannot.
"""

from __future__ import annotations

import enum


class MachineState(enum.StrEnum):
    """What is known of a machine."""

    UP = "up"
    """Its process answers."""
    STANDBY = "standby"
    """No partition uses it, and no process runs."""
    NO_ANSWER = "no answer"
    """Its process does not answer in time."""
    LOST = "lost"
    """Its process is gone."""

    @property
    def is_silent(self) -> bool:
        """True iff the machine is in use and nobody can reach it."""
        return self in (MachineState.NO_ANSWER, MachineState.LOST)


class IpuErrorState(enum.StrEnum):
    """Why an IPU cannot be used. Those of whole machines are podrun's own spelling, as the real tools have none."""

    NO_ERRORS = "no errors"
    """Nothing to report."""
    NOT_READY = "not ready"
    """Its machine is on its way into its partition."""
    NO_ANSWER = "no answer"
    """Its machine does not answer."""
    MACHINE_LOST = "machine lost"
    """Its machine is gone."""
    UNRECOVERABLE = "unrecoverable error"
    """Its machine has to be replaced."""
    OTHER = "another error"
    """One that this release of podrun does not know; it came from a machine of another release."""
    TILE_PARITY = "tile parity error"
    """A tile's memory lost its contents."""
    SOC_SOFT_ERROR = "SoC soft error"
    """The IPU noticed a soft error in itself."""
    EXCHANGE_ERROR = "exchange error"
    """Data between tiles was lost or changed."""
    TILE_EXCEPTION = "tile exception"
    TRAP = "tile exception (trap)"
    INVALID_OPERATION = "floating-point exception (invalid operation)"
    DIVIDE_BY_ZERO = "floating-point exception (division by zero)"
    OVERFLOW = "floating-point exception (overflow)"
    """The last of those of floating-point numbers, which a program may switch on."""
    BANK_CONFLICT = "tile exception (memory bank conflict)"
    EXCHANGE_CONFIGURATION = "tile exception (exchange configuration)"
    INVALID_OPERAND = "tile exception (operand)"
    INVALID_PROGRAM_COUNTER = "tile exception (program counter)"
    INVALID_INSTRUCTION = "tile exception (instruction)"
    """The last of the exceptions with which tiles stop themselves; loading the program again clears them."""
    HOST_SYNC_TIMEOUT = "host sync timeout"
    SYNC_TIMEOUT = "sync timeout"
    UNKNOWN = "unknown error"
    LINK_DOWN = "IPU-Link down"
    GW_LINK_DOWN = "GW-Link down"
    GATEWAY_LOST = "gateway lost"
    """The gateway of its machine does not answer, so that hosts and streaming memory are out of reach."""
    STREAMING_MEMORY = "streaming memory error"
    """What the streaming memory of its machine held is lost."""
    POWER = "power fault"
    """Its machine reported a power fault; its IPUs do not answer."""
