"""``saved_model_test_utils``: graphs of version 1 that tests of conversions describe, frozen and saved."""

from __future__ import annotations

import abc
import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from podrun.tensorflow.execution.placed_devices import placed_on

_SIGNATURE = "serving_default"


def declare_signature(
    input_name_keys: Sequence[str] | None = None, output_name_keys: Sequence[str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of ``create`` that names inputs and outputs in the signature, in the order of their tensors."""

    def decorate(create: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(create)
        def named(self: ModelForTest, *args: object, **kwargs: object) -> Any:
            self.input_name_keys, self.output_name_keys = input_name_keys, output_name_keys
            return create(self, *args, **kwargs)

        return named

    return decorate


class ModelForTest(abc.ABC):
    """A graph that ``create`` describes: it makes placeholders, and gives the outputs. ``freeze``: variables become
    constants; ``save``: a SavedModel is written to a folder of its own, ``model_path``.
    """

    def __init__(
        self,
        tag: str | None = None,
        signature_def_key: str | None = None,
        freeze: bool = False,
        auto_infer_inputs_and_outputs: bool = True,
        input_name_keys: Sequence[str] | None = None,
        output_name_keys: Sequence[str] | None = None,
        save: bool = False,
    ) -> None:
        self.input_name_keys, self.output_name_keys = input_name_keys, output_name_keys
        self._tag, self._key = tag or "serve", signature_def_key or _SIGNATURE
        self._inputs: list[tf.Tensor] = []
        self._graph = tf.Graph()
        with self._graph.as_default():
            outputs = self.create()
            if outputs is None:
                raise ValueError("No outputs here.")
            self._outputs = [outputs] if isinstance(outputs, tf.Tensor) else list(outputs)
            self.graph_def = self._frozen() if freeze else self._graph.as_graph_def()
            for node in self.graph_def.node:
                ordinal = placed_on(self._graph.get_operation_by_name(node.name))
                if ordinal is not None:
                    node.device = f"/device:IPU:{ordinal}"
        if auto_infer_inputs_and_outputs:
            placeholders = [o.outputs[0] for o in self._graph.get_operations() if o.type == "Placeholder"]
            self._inputs = sorted(placeholders, key=lambda t: str(t.name))
        with self._graph.as_default():
            self.signature_def = tf.compat.v1.saved_model.predict_signature_def(
                self._named(self._inputs, self.input_name_keys),
                self._named(self._outputs, self.output_name_keys),
            )
        self.meta_graph_def = tf.compat.v1.MetaGraphDef()
        self.meta_graph_def.meta_info_def.tags.append(self._tag)
        self.meta_graph_def.signature_def[self._key].CopyFrom(self.signature_def)
        self.model_path: str | None = None
        if save:
            self.save()

    @abc.abstractmethod
    def create(self) -> Any:
        """Make the graph, and give its output or outputs."""

    def regist_inputs(self, *args: tf.Tensor, **kwargs: tf.Tensor) -> None:
        """Say which tensors are inputs."""
        self._inputs = [*self._inputs, *args, *kwargs.values()]

    def _frozen(self) -> Any:
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            names = [t.op.name for t in self._outputs]
            graph_def = self._graph.as_graph_def()
            return tf.compat.v1.graph_util.convert_variables_to_constants(session, graph_def, names)

    @staticmethod
    def _named(tensors: Sequence[tf.Tensor], keys: Sequence[str] | None) -> dict[str, tf.Tensor]:
        return dict(zip(keys or [t.op.name for t in tensors], tensors, strict=False))

    def save(self) -> None:
        """Write a SavedModel to a new folder."""
        self.model_path = tempfile.mkdtemp(dir=tf.compat.v1.test.get_temp_dir())
        builder = tf.compat.v1.saved_model.builder.SavedModelBuilder(self.model_path)
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tf.graph_util.import_graph_def(self.graph_def, name="")
            builder.add_meta_graph_and_variables(
                session, [self._tag], signature_def_map={self._key: self.signature_def}
            )
        builder.save()
