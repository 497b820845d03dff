"""What reading of a graph, and of an update, leaves behind: places of late operations, and state after an error."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


def test_an_error_leaves_an_importer_as_it_was() -> None:
    import tensorflow as tf

    from podrun.core.errors import UnsupportedError
    from podrun.tensorflow.graph.builder import GraphBuilder, ProgramFacts
    from podrun.tensorflow.graph.importer import Importer

    graph = tf.Graph()
    with graph.as_default():
        result = tf.raw_ops.Sqrt(x=tf.constant(2.0))

    class Refusing(Importer):
        def operation(self, operation: tf.Operation, inputs: list[object]) -> Sequence[str]:
            raise UnsupportedError("refused")

    importer = Refusing(GraphBuilder("program", ProgramFacts()))
    before = importer.values
    with pytest.raises(UnsupportedError, match="refused"):
        importer.read(graph, {}, [result])
    assert importer.values is before
    assert not importer.reading
    assert not importer._open


def test_a_late_operation_lies_at_its_own_place() -> None:
    """A gradient function of stage 1 reads a value of stage 0 which nothing else needs."""
    import tensorflow as tf

    from podrun.runtime.graph import Place
    from podrun.tensorflow.capture.places import at_place
    from podrun.tensorflow.graph.builder import GraphBuilder, ProgramFacts
    from podrun.tensorflow.graph.importer import Importer

    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [2])
        with at_place(0, 0):
            late = tf.raw_ops.Sqrt(x=x)
    builder = GraphBuilder("program", ProgramFacts())
    importer = Importer(builder)
    importer.reading.append((graph, {x.name: "x"}))
    builder.place = Place(1, 1)
    name = importer.value_in(late)
    assert builder.facts.places[str(name)] == Place(0, 0)
    assert builder.place == Place(1, 1)


def test_a_transformation_that_a_program_sets_is_kept() -> None:
    from podrun.tensorflow.keras.accumulating_optimizers import _leaving_gradients

    def own(pairs: object) -> str:
        return "own"

    optimizer = SimpleNamespace(_transform_gradients=own)
    with _leaving_gradients(optimizer):
        assert optimizer._transform_gradients("pairs") == "pairs"
    assert vars(optimizer) == {"_transform_gradients": own}
