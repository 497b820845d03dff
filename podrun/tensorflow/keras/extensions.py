"""What Keras models get under an IPU strategy: their functions on the device, and the SDK's methods."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

from podrun.tensorflow.keras.accumulating_optimizers import (
    Replacement,
    install_accumulation,
    of_program,
    on_ipu,
    replace_method,
)
from podrun.tensorflow.keras.data_rules import check_model_data, install_data_rules, replicas_of
from podrun.tensorflow.keras.model_options import ModelExtension, options_of
from podrun.tensorflow.keras.model_programs import ModelProgram
from podrun.tensorflow.keras.optimizer_names import install_optimizer_names
from podrun.tensorflow.keras.reported_values import BatchCallbacks, held_back, hold_back
from podrun.tensorflow.keras.saved_options import install_saving
from podrun.tensorflow.keras.stage_assignment import is_functional, is_sequential
from podrun.tensorflow.keras.stage_methods import StageExtension
from podrun.tensorflow.keras.stage_tracing import install_stages, may_be_pipelined
from podrun.tensorflow.sdk.ipu_strategy import HOST_ITERATION, IPUStrategyV1

if TYPE_CHECKING:
    from tf_keras import Model
    from tf_keras.callbacks import BackupAndRestore, CallbackList
    from tf_keras.losses import Loss
    from tf_keras.src.backend import RandomGenerator
    from tf_keras.src.engine.base_preprocessing_layer import PreprocessingLayer

KINDS = ("train", "test", "predict")
CALLS = {"fit": "train", "evaluate": "test", "predict": "predict"}
"""Keras' methods and the functions that they run."""
ADDED = tuple(
    name
    for extension in (ModelExtension, StageExtension)
    for name in vars(extension)
    if not name.startswith("__")
)
"""Names that Keras' model class gets."""


@contextlib.contextmanager
def _host_iteration() -> Iterator[None]:
    HOST_ITERATION.append(True)
    try:
        yield
    finally:
        HOST_ITERATION.pop()


def _make_function(kind: str) -> Replacement:
    """``make_train_function`` and its like, for models on IPUs."""
    attribute = f"{kind}_function"

    def make(model: Model, plain: Callable[..., object], force: bool = False) -> object:
        if not on_ipu(model):
            return plain(model, force)
        program = getattr(model, attribute)
        if force or not isinstance(program, ModelProgram):
            program = ModelProgram(model, kind)
            setattr(model, attribute, program)
            if kind == "train":
                model.train_tf_function = program
        return program

    return make


def install_keras() -> None:
    """Give Keras 2's model class the extensions. ImportError, with what to install, without tf_keras."""
    model_class = importlib.import_module("tf_keras.src.engine.training").Model
    losses = importlib.import_module("tf_keras.src.losses")
    callbacks = importlib.import_module("tf_keras.src.callbacks").CallbackList
    if hasattr(model_class, ADDED[0]):
        return
    for extension in (ModelExtension, StageExtension):
        for name, method in vars(extension).items():
            if name in ADDED:
                setattr(model_class, name, method)
    for kind in KINDS:
        replace_method(model_class, f"make_{kind}_function", _make_function(kind))
        plain_end = getattr(callbacks, f"on_{kind}_batch_end")
        replace_method(callbacks, f"on_{kind}_batch_begin", _held_begin(kind, plain_end))
        replace_method(callbacks, f"on_{kind}_batch_end", _held_end)
    replace_method(model_class, "compile", _compiled)
    for name in CALLS:
        replace_method(model_class, name, _checked_call)
    for name in ("train_on_batch", "test_on_batch", "predict_on_batch"):
        replace_method(model_class, name, _batch_call)
    replace_method(model_class, "reset_metrics", _reset_metrics)
    replace_method(model_class, "_validate_and_get_metrics_result", _metrics_result)
    install_data_rules()
    replace_method(losses.Loss, "_get_reduction", _reduction)
    replace_method(model_class, "_validate_target_and_loss", _checked_target)
    generator = importlib.import_module("tf_keras.src.backend").RandomGenerator
    replace_method(generator, "_maybe_init", _follow_global_seed)
    preprocessing = importlib.import_module("tf_keras.src.engine.base_preprocessing_layer")
    replace_method(preprocessing.PreprocessingLayer, "adapt", _on_host)
    backup = importlib.import_module("tf_keras.src.callbacks").BackupAndRestore
    replace_method(backup, "on_train_begin", _backed_up)
    install_stages()
    install_saving()
    install_accumulation()
    install_optimizer_names()


def _checked_target(model: Model, plain: Callable[..., object], y: object, loss: object) -> None:
    """A model that adds losses of its own trains without a target, also where it was compiled with a loss."""
    if y is not None or not on_ipu(model) or not model.losses:
        plain(model, y, loss)


def _follow_global_seed(generator: RandomGenerator, plain: Callable[..., object]) -> None:
    """Under an IPU strategy initial values without a seed of their own follow ``tf.random.set_seed``, as in the SDK's
    Keras. Elsewhere they are Keras' own.
    """
    if not isinstance(tf.distribute.get_strategy(), IPUStrategyV1):
        plain(generator)
        return
    chosen = importlib.import_module("tf_keras.src.backend")._SEED_GENERATOR
    if not generator._built and generator._rng_type == generator.RNG_STATEFUL:
        generator._rng_type = (
            generator.RNG_LEGACY_STATEFUL
        )  # Its variable is the host's: a device draws itself.
    unseeded = generator._seed is None and getattr(chosen, "generator", None) is None
    if unseeded and not generator._built and generator._rng_type == generator.RNG_STATELESS:
        generator._rng_type = generator.RNG_LEGACY_STATEFUL
    plain(generator)


def _on_host(
    layer: PreprocessingLayer, plain: Callable[..., object], *args: object, **kwargs: object
) -> object:
    """A layer's own pass over data, for which Keras iterates on the host."""
    with _host_iteration():
        return plain(layer, *args, **kwargs)


def _backed_up(callback: BackupAndRestore, plain: Callable[..., object], logs: object = None) -> object:
    """Keras' callback that goes on after an interruption, which knows a few strategies. Instances of one launch would
    write the same files, so theirs is not added.
    """
    known = IPUStrategyV1 in callback._supported_strategies
    if type(callback.model.distribute_strategy) is IPUStrategyV1 and not known:
        callback._supported_strategies = (*callback._supported_strategies, IPUStrategyV1)
    return plain(callback, logs)


def _reset_metrics(model: Model, plain: Callable[..., object]) -> None:
    plain(model)
    options_of(model).resets += 1


def _metrics_result(model: Model, plain: Callable[..., object], logs: object) -> object:
    """The values that the device reported: the metrics' variables on the host are those of one replica."""
    return logs if on_ipu(model) else plain(model, logs)


def _compiled(model: Model, plain: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Keras' compile, which takes numbers of steps alone: programs give tensors too, as of a dataset's cardinality."""
    bound = inspect.signature(plain).bind(model, *args, **kwargs)
    steps = bound.arguments.get("steps_per_execution")
    if isinstance(steps, tf.Tensor):
        bound.arguments["steps_per_execution"] = int(steps)
    return plain(*bound.args, **bound.kwargs)


def _checked_call(model: Model, plain: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Keras' fit, evaluate or predict, once model and data fit."""
    if not on_ipu(model) or not tf.executing_eagerly():  # Keras itself refuses the call inside of a function.
        return plain(model, *args, **kwargs)
    if model.run_eagerly:
        raise RuntimeError(
            "Keras models cannot run eagerly when using `IPUStrategy`. Set `run_eagerly=False` when calling `compile`."
        )
    _check_overrides(model, CALLS[plain.__name__])
    check_model_data(args[0] if args else kwargs.get("x"))
    steps = model._steps_per_execution
    before = None if steps is None else int(steps.numpy())
    try:
        with _host_iteration():
            return plain(model, *args, **kwargs)
    finally:
        hold_back(model, None)
        if steps is not None and int(steps.numpy()) != before:
            steps.assign(before)


def _batch_call(model: Model, plain: Callable[..., object], *args: object, **kwargs: object) -> object:
    """One step with a batch: Keras iterates over it on the host. OutOfRangeError where an execution takes more."""
    if not on_ipu(model) or not tf.executing_eagerly():
        return plain(model, *args, **kwargs)
    steps = 1 if model._steps_per_execution is None else int(model._steps_per_execution.numpy())
    replicas = replicas_of(model)
    if steps * replicas > 1:
        raise tf.errors.OutOfRangeError(
            None,
            None,
            f"`{plain.__name__}` takes one batch, but an execution of the model {model.name} takes {steps * replicas}: "
            f"`steps_per_execution` is {steps}, and {replicas} replicas run. Give the batches as a dataset to `fit`, "
            "`evaluate` or `predict`, or compile with `steps_per_execution=1` and configure the IPUs of one replica.",
        )
    with _host_iteration():
        return plain(model, *args, **kwargs)


def _overrides(model: Model, name: str) -> bool:
    """Whether a class of a program, not one of Keras, defines a method."""
    return of_program(getattr(type(model), name))


def _check_overrides(model: Model, kind: str) -> None:
    """RuntimeError for methods that a program must not define for models on IPUs."""
    if _overrides(model, f"make_{kind}_function"):
        raise RuntimeError(
            f"The function `make_{kind}_function` for the model {model.name} has been overridden. This is not "
            "supported when using Keras within an IPUStrategy. Either remove the override from your model definition "
            "or set `enable_keras_extensions=False` when creating the IPUStrategy."
        )
    if type(model).call is importlib.import_module("tf_keras.src.engine.training").Model.call:
        raise RuntimeError(f"The function `call` for the model {model.name} has not been implemented.")
    if not may_be_pipelined(model):
        steps = options_of(model).accumulation_steps if kind == "train" else None
        if steps is not None and steps > 1 and _overrides(model, "train_step"):
            raise RuntimeError(
                f"The function `train_step` for the model {model.name} has been overridden. This is not supported for "
                "Keras models with gradient accumulation enabled: accumulate in a loop of your own, with "
                "`keras.ipu.optimizers.GradientAccumulationOptimizer`, or set no gradient accumulation options."
            )
        return
    if _overrides(model, f"{kind}_step"):
        raise RuntimeError(
            f"The function `{kind}_step` for the model {model.name} has been overridden. This is not supported for "
            "pipelined Keras models."
        )
    if (is_sequential(model) or is_functional(model)) and _overrides(model, "call"):
        raise RuntimeError(
            f"The function `call` for the model {model.name} has been overridden. This is not supported for pipelined "
            "Keras models."
        )


def _held_begin(kind: str, plain_end: Callable[..., object]) -> Replacement:
    """``on_<kind>_batch_begin``: holds callbacks back that are to be called for every step."""

    def begin(callbacks: CallbackList, plain: Callable[..., object], batch: int, logs: object = None) -> None:
        model = callbacks.model
        if model is None or not on_ipu(model) or not _asynchronous(model, kind):
            plain(callbacks, batch, logs)
            return
        held = BatchCallbacks(
            batch, functools.partial(plain, callbacks), functools.partial(plain_end, callbacks)
        )
        hold_back(model, held)

    return begin


def _asynchronous(model: Model, kind: str) -> bool:
    """Whether callbacks are called for every step: not where a pipeline adds the steps of an update up."""
    options = options_of(model)
    if not options.asynchronous or kind == "predict" or not options.accumulates_outfeed:
        return options.asynchronous
    together = options.pipeline_steps if kind == "train" else model._steps_per_execution.numpy()
    return together == 1 or not may_be_pipelined(model)


def _held_end(callbacks: CallbackList, plain: Callable[..., object], batch: int, logs: object = None) -> None:
    model = callbacks.model
    if model is not None and held_back(model) is not None:
        hold_back(model, None)
        return
    plain(callbacks, batch, logs)


def _reduction(loss: Loss, plain: Callable[..., object]) -> object:
    """A loss that a program calls itself is averaged over its batch, as without a strategy."""
    if isinstance(tf.distribute.get_strategy(), IPUStrategyV1) and str(loss.reduction) == "auto":
        return "sum_over_batch_size"
    return plain(loss)
