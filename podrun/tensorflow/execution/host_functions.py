"""Operations of a program's graph that the host computes: conditions of loops, `outside_compilation_scope`.

They are copied into a graph of their own, whose inputs are placeholders: what ran before on a device is neither
computed again nor waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.tensorflow.capture.program_graphs import FunctionGraph


class HostFunction:
    """The operations between ``inputs`` and ``results``, and ``targets``, as a function of arrays by the names of
    tensors. What variables hold is an input too: see ``entering``.
    """

    def __init__(
        self,
        graph: FunctionGraph,
        results: Sequence[tf.Tensor],
        inputs: Sequence[tf.Tensor],
        targets: Sequence[tf.Operation] = (),
    ) -> None:
        known = {t.name for t in inputs}
        operations = _operations_between([*(t.op for t in results), *targets], known)
        read = {t.name: t for o in operations for t in o.inputs if t.op.type == "ReadVariableOp"}
        read |= {t.name: t for t in results if t.op.type == "ReadVariableOp"}
        operations = [o for o in operations if o.type != "ReadVariableOp"]
        self.entering = list(
            {t.name: t for t in (*inputs, *read.values()) if t.dtype != tf.resource}.values()
        )
        self._names = {t.name: f"entering_{i}" for i, t in enumerate(self.entering)}
        self._results = [f"{self._names[t.name]}:0" if t.name in self._names else t.name for t in results]
        self._targets = [o.name for o in targets]
        self._kept = graph
        """The functions of Python that operations call live as long as the graph in which they were made."""
        self._graph = self._copy(graph, operations)
        self._session: tf.compat.v1.Session | None = None

    def _copy(self, graph: FunctionGraph, operations: Collection[tf.Operation]) -> tf.Graph:
        definition = tf.compat.v1.GraphDef()
        whole = graph.as_graph_def()
        definition.versions.CopyFrom(whole.versions)
        definition.library.CopyFrom(whole.library)
        for tensor in self.entering:
            node = definition.node.add(name=self._names[tensor.name], op="Placeholder")
            node.attr["dtype"].type = tensor.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
        for operation in operations:
            node = definition.node.add()
            node.CopyFrom(operation.node_def)
            node.device = ""
            del node.input[:]
            node.input.extend(self._names.get(t.name, t.name) for t in operation.inputs)
            node.input.extend(f"^{c.name}" for c in operation.control_inputs if c in operations)
        copied = tf.Graph()
        with copied.as_default():
            tf.import_graph_def(definition, name="")
        return copied

    def __call__(self, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The results. ``values``: of all that is ``entering``."""
        if self._session is None:
            self._session = tf.compat.v1.Session(graph=self._graph)
        fed = {
            f"{self._names[t.name]}:0": np.asarray(values[t.name], t.dtype.as_numpy_dtype)
            for t in self.entering
        }
        options = tf.compat.v1.RunOptions(inter_op_thread_pool=-1)
        outcome = self._session.run([*self._results, *self._targets], fed, options=options)
        return [np.asarray(value) for value in outcome[: len(self._results)]]

    def of_rows(self, rows: Mapping[str, np.ndarray]) -> list[list[np.ndarray]]:
        """The results for each replica. ``rows``: name of an input -> its values, one per replica or one for all."""
        count = max((len(value) for value in rows.values()), default=1)
        return [self({name: value[row % len(value)] for name, value in rows.items()}) for row in range(count)]


def _operations_between(starts: Sequence[tf.Operation], known: Collection[str]) -> list[tf.Operation]:
    """The operations behind which there are only known tensors, variables and constants."""
    operations: dict[Any, None] = {}
    waiting = list(starts)
    while waiting:
        operation = waiting.pop()
        if operation in operations or operation.type == "Placeholder":
            continue
        operations[operation] = None
        if operation.type != "ReadVariableOp":
            waiting += [t.op for t in operation.inputs if t.name not in known]
    return list(operations)
