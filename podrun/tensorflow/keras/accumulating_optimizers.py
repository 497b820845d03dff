"""Keras' optimizers for models on IPUs: gradient accumulation.

It changes the family that Keras now calls ``keras.optimizers.legacy``, that which programs for IPUs were written with,
and the wrapper of optimizers of version 1; others are refused where gradients accumulate.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.private_apis.tensorflow import private_module
from podrun.tensorflow.capture.places import PipelineShape, pipeline_of, shape_pipeline
from podrun.tensorflow.capture.program_graphs import IpuGraph, innermost_program
from podrun.tensorflow.sdk.gradient_accumulation import Accumulation, GradientPairs
from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1, reduced_already, reduced_over_replicas
from podrun.tensorflow.sdk.pipeline_rules import state_storage

if TYPE_CHECKING:
    from tf_keras import Model
    from tf_keras.optimizers.legacy import Optimizer

WhichAccumulation = Callable[[], Accumulation | None]
_ACCUMULATING: dict[int, WhichAccumulation] = {}
"""Optimizer -> the accumulation of the model whose step is being traced."""
Replacement = Callable[..., object]
REPLACED: list[tuple[type, str, object]] = []
"""What `replace_method` has changed: class, name, and what the class itself had under the name."""


def on_ipu(model: Model) -> bool:
    """Whether a model was made under an IPU strategy with the extensions."""
    strategy = getattr(model, "_distribution_strategy", None) or getattr(model, "distribute_strategy", None)
    return isinstance(strategy, IPUStrategyV1) and strategy._enable_keras_extensions


def replace_method(owner: type, name: str, function: Replacement) -> None:
    """Let ``function(self, plain, ...)`` stand for a method, which it gets as ``plain``."""
    plain = getattr(owner, name)
    REPLACED.append((owner, name, vars(owner).get(name)))

    def call(self: object, *args: object, **kwargs: object) -> object:
        return function(self, plain, *args, **kwargs)

    call.__name__, call.__doc__ = name, plain.__doc__
    # Loops of Python are turned into loops of the graph in what programs write, not in Keras' own methods.
    call.__module__ = getattr(plain, "__module__", owner.__module__)
    call.__wrapped__ = plain  # type: ignore[attr-defined]  # Whoever asks for the signature gets Keras' own.
    if getattr(plain, "_is_default", False):  # Keras asks whether a class has a method of its own.
        call._is_default = True  # type: ignore[attr-defined]
    setattr(owner, name, call)


def of_program(method: object) -> bool:
    """Whether a program defined a method, not Keras or podrun."""
    while isinstance(method, functools.partial):
        method = method.func
    module = getattr(getattr(method, "__func__", method), "__module__", None) or ""
    return not module.startswith(("tf_keras.", "keras.", "podrun.tensorflow."))


@contextlib.contextmanager
def accumulating(model: Model, which: WhichAccumulation | None) -> Iterator[None]:
    """While the step of a model is traced, its optimizer accumulates as ``which`` says when gradients are applied.
    ValueError for an optimizer that overrides ``minimize``, NotImplementedError for one of Keras' new family.
    """
    optimizer = getattr(model, "optimizer", None)
    if which is None or optimizer is None:
        yield
        return
    _ACCUMULATING[id(optimizer)] = functools.partial(_checked, optimizer, which)
    plain = optimizer.apply_gradients  # On the object, where programs may have set another one.
    own = "apply_gradients" in vars(optimizer) or of_program(plain)
    standing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if isinstance(optimizer, accumulating_families()) and own:
        # The method of a program is called once for an update, with what is accumulated.
        update = functools.partial(_own_update, optimizer, plain)
        update.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
        standing = standing_in(optimizer, update)
    try:
        with standing:
            yield
    finally:
        del _ACCUMULATING[id(optimizer)]


@contextlib.contextmanager
def standing_in(optimizer: Optimizer, update: Replacement) -> Iterator[None]:
    """While ``update`` stands for the method ``apply_gradients`` of an optimizer."""
    before = vars(optimizer).get("apply_gradients")
    object.__setattr__(optimizer, "apply_gradients", update)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(optimizer, "apply_gradients")
        else:
            object.__setattr__(optimizer, "apply_gradients", before)


def _checked(optimizer: Optimizer, which: WhichAccumulation) -> Accumulation | None:
    accumulation = which()
    if accumulation is not None:
        check_accumulates(optimizer)
    return accumulation


def check_accumulates(optimizer: Optimizer) -> None:
    """ValueError or NotImplementedError for an optimizer whose gradients cannot be accumulated."""
    legacy, scaled = accumulating_families()
    if isinstance(optimizer, _version_1()):
        return
    if not issubclass(type(optimizer), (legacy, scaled)):
        raise NotImplementedError(
            f"podrun does not accumulate gradients for {type(optimizer).__name__}: use an optimizer of "
            "keras.optimizers.legacy, or set no gradient accumulation."
        )
    own = type(optimizer).minimize
    if own not in (legacy.minimize, scaled.minimize):
        raise ValueError(
            "When using Gradient Accumulation or Pipelining, the provided optimizer must not override "
            f"OptimizerV2.minimize: let {type(optimizer).__name__} override `apply_gradients` or `get_gradients`."
        )


def accumulating_families() -> tuple[type[Optimizer], type[Optimizer]]:
    """Keras' optimizers that accumulate: the base class, and the one that scales the loss of such an optimizer."""
    legacy = importlib.import_module("tf_keras.src.optimizers.legacy.optimizer_v2").OptimizerV2
    scaled = importlib.import_module("tf_keras.src.mixed_precision.loss_scale_optimizer").LossScaleOptimizer
    return legacy, scaled


def _refused_families() -> tuple[type[Optimizer], type[Optimizer]]:
    """Keras' new optimizers, which are refused where gradients accumulate (`_checked`)."""
    plain = importlib.import_module("tf_keras.src.optimizers.optimizer").Optimizer
    scaled = importlib.import_module("tf_keras.src.mixed_precision.loss_scale_optimizer").LossScaleOptimizerV3
    return plain, scaled


def install_accumulation() -> None:
    """Optimizers accumulate where the model that is being traced says so, or are refused."""
    for family in (*accumulating_families(), *_refused_families()):
        if "apply_gradients" in vars(family):
            replace_method(family, "apply_gradients", accumulated)
    replace_method(_version_1(), "apply_gradients", _accumulated_of_version_1)
    for kind in (_version_1(), accumulating_families()[0]):
        replace_method(kind, "minimize", _minimized)


def _version_1() -> type[Optimizer]:
    """Keras' wrapper of optimizers of version 1."""
    kind: type[Optimizer] = importlib.import_module("tf_keras.src.optimizers.optimizer_v1").TFOptimizer
    return kind


def _minimized(
    optimizer: Optimizer, plain: Replacement, loss: object, var_list: object, *args: object, **kwargs: object
) -> object:
    """Keras' step, or, where the model that is traced accumulates, one with the gradients that the optimizer itself
    computes: ``compute_gradients`` of version 1, or a program's own ``get_gradients``, as in the SDK.
    """
    if id(optimizer) in _ACCUMULATING and not callable(loss):
        variables = tf.nest.flatten(var_list)
        if isinstance(optimizer, _version_1()):
            own = optimizer.optimizer.compute_gradients
            if getattr(own, "__func__", None) is not tf.compat.v1.train.Optimizer.compute_gradients:
                return optimizer.apply_gradients(own(loss, variables))
        elif of_program(optimizer.get_gradients):
            gradients = optimizer.get_gradients(loss, variables)
            return optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return plain(optimizer, loss, var_list, *args, **kwargs)


def _accumulated_of_version_1(
    optimizer: Optimizer, plain: Replacement, grads_and_vars: GradientPairs
) -> object:
    def run(
        wrapper: Optimizer, grads_and_vars: GradientPairs, experimental_aggregate_gradients: bool = True
    ) -> object:
        if experimental_aggregate_gradients:
            return plain(wrapper, grads_and_vars)
        with reduced_already():
            return wrapper.optimizer.apply_gradients(grads_and_vars, global_step=wrapper.iterations)

    return accumulated(optimizer, run, grads_and_vars)


def accumulated(
    optimizer: Optimizer,
    plain: Replacement,
    grads_and_vars: GradientPairs,
    *args: object,
    reduces_itself: bool = False,
    **kwargs: object,
) -> object:
    """``plain``'s update, or, where a model that is traced accumulates with this optimizer, with whole gradients.
    ``reduces_itself``: whether the update sums them over replicas. ``captured_grads`` in ``kwargs`` accumulate beside
    the gradients where the accumulation says so.
    """
    which = _ACCUMULATING.get(id(optimizer))
    accumulation = None if which is None else which()
    if accumulation is None:
        return plain(optimizer, grads_and_vars, *args, **kwargs)
    del _ACCUMULATING[id(optimizer)]  # The update itself is made with the accumulated gradients.
    try:
        if kwargs.get("captured_grads"):
            kwargs["captured_grads"] = accumulation.captured(kwargs["captured_grads"])  # type: ignore[arg-type]

        def update(ready: GradientPairs, experimental_aggregate_gradients: bool) -> object:
            options = {**kwargs, "experimental_aggregate_gradients": experimental_aggregate_gradients}
            return plain(optimizer, ready, *args[:1], **options)  # After the name comes what the option says.

        return accumulated_update(
            optimizer, accumulation, grads_and_vars, update, reduces_itself=reduces_itself
        )
    finally:
        _ACCUMULATING[id(optimizer)] = which  # type: ignore[assignment]


def _own_update(
    optimizer: Optimizer, plain: Replacement, grads_and_vars: GradientPairs, *args: object, **kwargs: object
) -> object:
    """An update by a program's own ``apply_gradients``, as it stands on the object: gradients of this replica come to
    it, as in the SDK, and are summed over replicas where it calls Keras' own.
    """

    def run(
        own: Optimizer,
        grads_and_vars: GradientPairs,
        experimental_aggregate_gradients: bool = True,
        **captured: object,
    ) -> object:
        return plain(grads_and_vars, *args, **{**kwargs, **captured})

    captured = {name: value for name, value in kwargs.items() if name == "captured_grads"}
    return accumulated(optimizer, run, grads_and_vars, reduces_itself=True, **captured)


def accumulated_update(
    optimizer: Optimizer,
    accumulation: Accumulation,
    grads_and_vars: GradientPairs,
    update: Replacement,
    *,
    reduces_itself: bool = False,
) -> object:
    """Accumulate the gradients of this step, and call ``update`` with the sums over replicas when they are complete,
    or with this replica's if it ``reduces_itself``, which ``experimental_aggregate_gradients`` tells it. Where the
    accumulation says so, the gradients of each step are summed over replicas, clipped and transformed before. A program
    whose iterations are mini-batches is modelled as so many of them to an update, unless it is a pipeline.
    """
    if not getattr(tf.distribute.get_strategy(), "adds_reductions", True):
        raise UnsupportedError(
            "PopDistStrategy(add_ipu_cross_replica_reductions=False) reduces gradients of Keras models on the host, "
            "which podrun does not do: IPUs reduce them over all replicas of all instances.",
            hint="Leave the argument out.",
        )
    program = _program_of_mini_batches()
    if program is not None and pipeline_of(program) is None:
        storage = state_storage(accumulation.storage)
        shape_pipeline(program, PipelineShape(accumulation.count, None, (0,), storage=storage))
    pairs = [(g, v) for g, v in grads_and_vars if g is not None]
    with tf.init_scope():
        _ = optimizer.iterations
        if not isinstance(optimizer, _version_1()):
            optimizer._create_all_weights([v for _, v in pairs])
    transformed = accumulation.transforms_each and _transforms(optimizer)
    if transformed:
        pairs = optimizer._transform_unaggregated_gradients(pairs)
        pairs = optimizer._transform_gradients(optimizer._aggregate_gradients(pairs))
    summed = reduces_itself or transformed

    def total(gradient: tf.Tensor) -> tf.Tensor:
        return gradient if summed else reduced_over_replicas(tf.distribute.ReduceOp.SUM, gradient)

    def now(ready: GradientPairs) -> object:
        with _leaving_gradients(optimizer) if transformed else contextlib.nullcontext():
            return update(ready, experimental_aggregate_gradients=reduces_itself and not transformed)

    return accumulation.apply(pairs, now, total)


_TRANSFORMS = ("_transform_unaggregated_gradients", "_transform_gradients")
"""What an optimizer of Keras does with gradients before the sum over replicas, and after it."""


def _transforms(optimizer: Optimizer) -> bool:
    """Whether an optimizer, or the one that it wraps, clips gradients or transforms them in another way. One that
    scales losses does so after it has divided them by the factor, in the update.
    """
    if hasattr(optimizer, "get_scaled_loss"):
        return False
    while (inner := getattr(optimizer, "_opt", None)) is not None:
        optimizer = inner
    options = ("clipvalue", "clipnorm", "global_clipnorm")
    if any(getattr(optimizer, name, None) is not None for name in options):
        return True
    own = any(of_program(getattr(optimizer, name, None)) for name in _TRANSFORMS)
    return own or bool(getattr(optimizer, "gradient_transformers", None))


@contextlib.contextmanager
def _leaving_gradients(optimizer: Optimizer) -> Iterator[None]:
    """While an optimizer, or the one that it wraps, takes gradients as they are."""
    while (inner := getattr(optimizer, "_opt", None)) is not None:
        optimizer = inner
    own = {name: vars(optimizer)[name] for name in _TRANSFORMS if name in vars(optimizer)}
    for name in _TRANSFORMS:
        object.__setattr__(optimizer, name, lambda pairs: pairs)
    try:
        with reduced_already():
            yield
    finally:
        for name in _TRANSFORMS:
            object.__delattr__(optimizer, name)
        for name, function in own.items():
            object.__setattr__(optimizer, name, function)


def takes_reduced(optimizer: Optimizer) -> bool:
    """Whether ``apply_gradients`` of an optimizer can be told that gradients are summed over replicas already."""
    parameters = inspect.signature(optimizer.apply_gradients).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return every or "experimental_aggregate_gradients" in parameters


def wrapped_update(
    optimizer: Optimizer, grads_and_vars: GradientPairs, *, experimental_aggregate_gradients: bool
) -> object:
    """The update of an optimizer in another one: Keras' own, or one of a program, which need not take the option."""
    if takes_reduced(optimizer):
        return optimizer.apply_gradients(
            grads_and_vars, experimental_aggregate_gradients=experimental_aggregate_gradients
        )
    with contextlib.nullcontext() if experimental_aggregate_gradients else reduced_already():
        return optimizer.apply_gradients(grads_and_vars)


def _program_of_mini_batches() -> IpuGraph | None:
    """The program that is being traced, unless this is a loop of TensorFlow in it."""
    loop_body = private_module("ops.control_flow_v2_func_graphs").WhileBodyFuncGraph
    program, graph = innermost_program(), tf.compat.v1.get_default_graph()
    while program is not None and graph is not program:
        if isinstance(graph, loop_body):
            return None
        graph = graph.outer_graph
    return program
