"""Weights and optimizer state of a session: the host's copy, and its transfer to the device and ONNX files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from podrun.compiler.program import FACTOR, PHASE, ParameterSpec
from podrun.compiler.replica_groups import rule_state
from podrun.core.errors import CallError, PoplarError, UsageError
from podrun.core.executable import Executable, VariableRole, numpy_dtype
from podrun.runtime.device_program import ProgramLoader
from podrun.runtime.graph import Model
from podrun.runtime.operators import Form
from podrun.runtime.own_steps import check_alike
from podrun.runtime.random_state import WORDS, RandomState
from podrun.runtime.replica_check import ReplicaCheck
from podrun.runtime.replica_groups import ReplicaStateRows, given, regrouped, retrieved
from podrun.runtime.words import SessionCall

if TYPE_CHECKING:
    from podrun.runtime.building import BuiltModel
    from podrun.runtime.optimizers.rules import Rule

Side = Literal["program", "model"]


class HostWeights:
    """Weights (whether or not the program uses them) and optimizer state on the host.

    ``constant``: weights that no run changes and the program starts with. ``device_is_ahead`` is True after a run,
    until the host's copy is updated or sent again. Values are replaced, never written over: their arrays are read-only,
    so that a machine of this process keeps them without a copy until it runs.
    """

    def __init__(self, model: Model, built: BuiltModel, *, constant: bool = False) -> None:
        self._model = model
        self.built = built
        self.constant = constant
        self._replica_state = built.replica_state
        self._weights = _read_only(
            {name: self._as_host(name, value, "model") for name, value in built.weights.items()}
        )
        self._state = _read_only(self._first_state())
        self.device_is_ahead = False

    def _first_state(self) -> dict[str, np.ndarray]:
        """State from the model, and state whose start depends on its weight."""
        rule, state = self.built.rule, dict[str, np.ndarray]()
        if rule is None:
            return {}
        if rule.context.automatic:
            starts = {FACTOR: np.ones((), np.float32), PHASE: np.zeros((), np.float32)}
            state |= {n: _fitting(n, self.built.state.get(n, v), (), v.dtype) for n, v in starts.items()}
        for name in self.built.trained:
            parameter = self.built.program.parameters[name]
            computed = _initial_state(rule, parameter, self._weights[name])
            for prefix, (spec, initial) in rule_state(rule, parameter).items():
                dtype = numpy_dtype(spec.dtype)
                if spec.name in self.built.state:
                    state[spec.name] = _fitting(spec.name, self.built.state[spec.name], spec.shape, dtype)
                elif prefix in computed:
                    state[spec.name] = computed[prefix].astype(dtype)
                else:
                    state[spec.name] = np.full(spec.shape, initial, dtype)
        return state

    def get(self, name: str) -> np.ndarray | None:
        """A weight or a piece of optimizer state, or None."""
        return self._weights.get(name, self._state.get(name))

    def get_all(self) -> dict[str, np.ndarray]:
        """All weights and all optimizer state."""
        return {**self._weights, **self._state}

    def put(self, name: str, array: np.ndarray) -> None:
        """Replace a weight's value. UsageError for an unknown one, CallError for another size."""
        held = self.get(name)
        if held is None:
            raise UsageError(f"The session has no weight {name!r}; it has {sorted(self._weights)}.")
        if array.nbytes != held.nbytes:
            raise CallError(
                f"Differing sizes for weight {name!r}: the array has {array.nbytes} bytes, the weight {held.nbytes}."
            )
        target = self._weights if name in self._weights else self._state
        value = np.ascontiguousarray(array).reshape(-1).view(held.dtype).reshape(held.shape).copy()
        target |= _read_only({name: value})

    def device_values(self) -> dict[str, np.ndarray]:
        """The weights as the device takes them, by name."""
        return {name: self._from_host(name, value, "program") for name, value in self._weights.items()}

    def state_values(self) -> dict[str, np.ndarray]:
        """The optimizer's state as the device takes it, by name."""
        return dict(self._state)

    def take_device(self, values: Mapping[str, np.ndarray]) -> None:
        """Take what was read from the device. ApplicationRuntimeError if replicas differ that must not."""
        self.check_alike(values)
        for name, value in values.items():
            target = self._weights if name in self._weights else self._state
            target |= _read_only({name: np.array(self._as_host(name, value, "program"))})
        self.device_is_ahead = False

    def check_alike(self, values: Mapping[str, np.ndarray]) -> None:
        """ApplicationRuntimeError if replicas hold different values, as read, of what the model's own step writes."""
        check_alike(self._model.stepped & self._replica_state.keys(), values)

    def reset(self, source: Mapping[str, np.ndarray], ignore_unknown: bool, call: str) -> None:
        """Take the initial values of another model by name. UsageError for unknown ones (unless ignored)
        and for another type or shape.
        """
        values = {}
        for name, value in source.items():
            held = self.get(name)
            if held is None:
                if ignore_unknown or name in self._model.graph.initializers:
                    continue
                raise UsageError(
                    f"resetWeights, no tensor '{name}' in tensors",
                    hint="ignoreWeightsInModelWithoutCorrespondingHostWeight=True leaves such weights out.",
                )
            if value.dtype != held.dtype and value.dtype.kind == held.dtype.kind == "i":
                value = value.astype(held.dtype)
            stored = self._from_host(name, held, "model")
            if value.shape != stored.shape or value.dtype != held.dtype:
                raise UsageError(
                    f"{call}: weight {name!r} is {form_of(value)} in the model, but {form_of(stored)} in this session."
                )
            values[name] = self._as_host(name, value, "model")
        for name, value in values.items():
            (self._weights if name in self._weights else self._state)[name] = value

    def _as_host(self, name: str, value: np.ndarray, side: Side) -> np.ndarray:
        """A weight in the form of the host's copy, from the form of the model or the program."""
        rows = self._replica_state.get(name)
        return value if rows is None else regrouped(value, _rows(rows, side), rows.host)

    def _from_host(self, name: str, value: np.ndarray, side: Side) -> np.ndarray:
        """A weight in the form of the model or the program, from the form of the host's copy."""
        rows = self._replica_state.get(name)
        return value if rows is None else regrouped(value, rows.host, _rows(rows, side))

    def stored_values(self) -> dict[str, np.ndarray]:
        """The weights as a model stores them."""
        return {name: self._from_host(name, value, "model") for name, value in self._weights.items()}

    def model(self) -> Model:
        """This session's model with the weights as they are."""
        return self._model.with_values(self.stored_values())


def _read_only(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same arrays, which nobody may write from now on."""
    for value in values.values():
        value.flags.writeable = False
    return values


def _rows(rows: ReplicaStateRows, side: Side) -> tuple[int, ...]:
    return rows.program if side == "program" else rows.model


def _initial_state(rule: Rule, parameter: ParameterSpec, value: np.ndarray) -> dict[str, np.ndarray]:
    """State whose start depends on the stored value of the weight: for each group of replicas, if the weight has
    groups.
    """
    if not parameter.group_of:
        return rule.initial_state(parameter.spec, value)
    states = [rule.initial_state(parameter.spec, row) for row in value]
    return {prefix: np.stack([state[prefix] for state in states]) for prefix in states[0]}


def form_of(value: np.ndarray) -> str:
    """Type and shape of an array for messages."""
    return Form(value.dtype, value.shape).described


def _fitting(name: str, value: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray:
    if value.size != int(np.prod(shape, dtype=np.int64)):
        raise UsageError(
            f"The model's optimizer state {name!r} has shape {list(value.shape)}; this session's has {list(shape)}."
        )
    return value.reshape(shape).astype(dtype)


_log = logging.getLogger("podrun.runtime")


class WeightTransfer:
    """Moves weights and optimizer state between a session's host copy, its device and ONNX files."""

    def __init__(
        self,
        loader: ProgramLoader,
        weights: HostWeights,
        random: RandomState,
        check: ReplicaCheck,
    ) -> None:
        self._program, self._loader, self._weights = loader.program, loader, weights
        self._random, self._check = random, check

    def from_host(self) -> None:
        """Send weights and optimizer state to the device."""
        self._program.prepared(SessionCall.SEND_WEIGHTS)
        self._loader.ensure_loaded()
        self._program.write(self._weights.device_values() | self._weights.state_values())
        self._weights.device_is_ahead = False
        self._loader.weights_sent = True

    def to_host(self) -> None:
        """Bring weights and optimizer state from the device into the host's copy."""
        executable = self._program.prepared(SessionCall.FETCH_WEIGHTS)
        if not self._program.on_device:
            # Another program has the device, so the values there are gone: the host keeps its copy.
            return
        if self._weights.constant or not self._weights.device_is_ahead:
            return
        self._weights.take_device(self._program.read(_of_training(executable)))

    def read(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy the host's weights into arrays. CallError for an array of another size."""
        built = self._weights.built
        for name, array in arrays.items():
            value = self._weights.get(name)
            if value is None:
                continue
            if name not in built.replica_state:
                value = retrieved(built.groups, name, value, built.program.replicas)
            if array.nbytes != value.nbytes:
                raise CallError(
                    f"Differing sizes for weight {name!r}: the array has {array.nbytes} bytes ({array.dtype}, shape "
                    f"{list(array.shape)}), the weight {value.nbytes} ({value.dtype}, shape {list(value.shape)})."
                )
            array.reshape(-1).view(value.dtype)[...] = value.reshape(-1)

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Change the host's weights; names that the session does not have are passed over."""
        if self._weights.constant:
            raise self._constant(SessionCall.WRITE_WEIGHTS)
        built, call = self._weights.built, self._program.words.name(SessionCall.WRITE_WEIGHTS)
        strange = [name for name in arrays if self._weights.get(name) is None]
        if strange:
            _log.warning(
                "%s: the session has no weight or state %s: passed over",
                call,
                ", ".join(strange),
            )
        for name, array in arrays.items():
            held = self._weights.get(name)
            if held is not None:
                if name not in built.replica_state:
                    array = given(built.groups, name, array, held, built.program.replicas, call)
                self._weights.put(name, array)

    def reset(self, values: Mapping[str, np.ndarray], ignore_unknown: bool) -> None:
        """Take weights by name from ``values``. UsageError for constant weights, and for unknown ones."""
        if self._weights.constant:
            raise self._constant(SessionCall.RESET_WEIGHTS)
        self._weights.reset(values, ignore_unknown, self._program.words.name(SessionCall.RESET_WEIGHTS))
        self._loader.weights_sent = False

    def broadcast(self, root: int) -> None:
        """Copy the weights and optimizer state of one instance to the host's copies of all instances."""
        from podrun import popdist

        popdist.init()
        for name, value in sorted(self._weights.get_all().items()):
            self._weights.put(name, popdist.broadcast(np.array(value, order="C"), root))
        self._loader.weights_sent = False

    def checkpoint(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The program's weights and optimizer state, the replica state and the states of the random numbers. The caller
        owns the arrays.
        """
        executable = self._program.prepared(SessionCall.SAVE_CHECKPOINT)
        self._compare_replicas(executable)
        held = self._weights.device_values() | self._weights.state_values()
        values = {name: np.array(value) for name, value in held.items()}
        if self._program.on_device and self._weights.device_is_ahead and not self._weights.constant:
            changed = self._program.read(_of_training(executable))
            self._weights.check_alike(changed)
            values |= changed
        return values, {"seed": self._random.seed(), "rng": self._random.read_rng()}

    def _constant(self, call: SessionCall) -> UsageError:
        words = self._program.words
        return UsageError(words.constant_weights.format(call=words.name(call)))

    def _compare_replicas(self, executable: Executable) -> None:
        """Refuse to save a checkpoint of replicas that differ, where replicas are compared."""
        if self._program.on_device and self._weights.device_is_ahead:
            replicas = self._weights.built.program.replicas
            try:
                self._check.before_save(executable, self._program.device, replicas)
            except PoplarError:
                self._program.on_device = False
                raise

    def restore(self, tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        """Continue from what `checkpoint` returned. UsageError for the state of another program."""
        self._program.prepared(SessionCall.RESUME_CHECKPOINT)
        if self._weights.constant:
            raise self._constant(SessionCall.RESUME_CHECKPOINT)
        _check_same(self._weights.device_values() | self._weights.state_values(), tensors)
        self._weights.take_device(tensors)
        seed, rng = values.get("seed"), values.get("rng")
        if not isinstance(seed, int) or not isinstance(rng, list) or len(rng) != WORDS:
            raise UsageError("The checkpoint was not saved by a session: it has no random state.")
        self._random.restore(seed, rng)
        self._loader.ensure_loaded()
        self._program.write(dict(tensors) | self._random.values())
        self._loader.weights_sent = True


def _of_training(executable: Executable) -> list[str]:
    """The variables that training changes: weights and optimizer state."""
    roles = (VariableRole.WEIGHT, VariableRole.OPTIMIZER_STATE)
    return [name for name, variable in executable.variables.items() if variable.role in roles]


def _check_same(held: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> None:
    """UsageError that names the first tensor that is missing in one of the two, or differs in type or shape."""
    for name in sorted({*held, *new}):
        ours, theirs = (
            None if n not in m else f"{m[n].dtype}{list(m[n].shape)}" for n, m in ((name, held), (name, new))
        )
        if ours != theirs:
            raise UsageError(
                f"The checkpoint is of another program: {name!r} is {theirs or 'not'} in the checkpoint and "
                f"{ours or 'not'} in this session.",
                hint="Use the model, optimizer and replication that the checkpoint was saved with.",
            )
