"""What a front end's users call the calls and options that the runtime's messages are about.

The runtime says what happened in neutral words. A front end whose users know their own names for a call or an option
(PopART's ``weightsFromHost``) hands in a `Words` with its settings; fields that it leaves out stay neutral. Fields are
templates of ``str.format``; the comment behind a field names the values that it may use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import Enum

from podrun.core.quick_dataclass import dataclass


class SessionCall(Enum):
    """What a program asks of a session. The values name it in neutral words."""

    RUN = "run"
    SEND_WEIGHTS = "sending weights to the device"
    FETCH_WEIGHTS = "fetching weights from the device"
    WRITE_WEIGHTS = "changing weights"
    RESET_WEIGHTS = "taking weights from another model"
    SET_SEED = "setting the random seed"
    READ_SEED = "reading the random seed"
    SET_RANDOM_STATE = "setting the random state"
    READ_RANDOM_STATE = "reading the random state"
    REPORT = "a report"
    SAVE_PROGRAM = "saving the compiled program"
    SAVE_CHECKPOINT = "a checkpoint's save"
    RESUME_CHECKPOINT = "a checkpoint's resume"
    CONNECT_STREAM = "connecting a function to a stream"
    UPDATE_CACHE = "writing the program to the cache"


@dataclass(frozen=True, slots=True)
class Words:
    """What a front end's users call the calls and options that the runtime's messages are about. ``calls``: the front
    end's own names of calls.
    """

    calls: Mapping[SessionCall, str] = field(default_factory=dict, hash=False)

    # Order of calls
    not_compiled: str = "The program is not compiled: {call} comes afterwards."  # call
    compile_first: str = "Compile the program first."
    no_report: str = "There is no report before the program is compiled."
    nothing_to_load: str = "There is no compiled program that could be loaded onto the device."
    compiled_already: str = "A compiled program can be read from a file only before the session has one."
    weights_not_sent: str = "The weights were not sent to the device before the run"
    constant_weights: str = "The weights are constants of the program, which rules out {call}."  # call

    # Random numbers
    no_random_state: str = "The session does not keep its random state, which rules out {call}."  # call
    random_state_size: str = "The random state has {size} words instead of {expected}"  # size, expected
    unused_seed: str = "The program draws no random numbers: a seed does nothing."

    # Cycles
    cycles_not_counted: str = "The program was compiled without cycle counters."
    cycles_before_run: str = "Cycles are known after the first run."
    counters_option: str = "Choose the counters before the program is compiled."

    # Data of a run
    step_data: str = "data of a run"
    last_value_only: str = "Return its last value, with gradient accumulation in a pipeline."
    input_shape: str = "give its shape"
    folder_option: str = "Name another folder."

    # Training
    pipeline_recomputation: str = "Recomputation by stages"
    serial_clipping: str = "Gradient clipping of a pipelined program cannot follow the accumulation serially."
    accumulate: str = "Accumulate gradients."
    wide_loss_scale: str = "a loss scale in float32"

    def name(self, call: SessionCall) -> str:
        """What the front end's users call a call."""
        return self.calls.get(call, call.value)


NEUTRAL = Words()
"""Of a front end without names of its own."""
