"""Programs of version 1 that tests write: a graph with an IPU, queues, a loop, a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

VALUES = np.arange(12, dtype=np.float32)


class Program:
    """A graph of version 1 with one IPU device."""

    def __init__(self, ipu: Any, ipus: int = 1) -> None:
        import tensorflow.compat.v1 as tf

        self.ipu, self.tf = ipu, tf
        config = ipu.config.IPUConfig()
        config.auto_select_ipus = ipus
        config.configure_ipu_system()

    def infeed(self, data: Any = VALUES, **options: Any) -> Any:
        """A queue of slices."""
        return self.ipu.ipu_infeed_queue.IPUInfeedQueue(
            self.tf.data.Dataset.from_tensor_slices(data), **options
        )

    def outfeed(self, *args: Any) -> Any:
        """A queue of results."""
        return self.ipu.ipu_outfeed_queue.IPUOutfeedQueue(*args)

    def compiled(self, function: Callable[..., Any], inputs: Any = None) -> Any:
        """The program on the IPU."""
        with self.ipu.scopes.ipu_scope("/device:IPU:0"):
            return self.ipu.ipu_compiler.compile(function, inputs)

    def looped(self, count: Any, body: Callable[..., Any], infeed: Any = None, inputs: Any = None) -> Any:
        """A loop on the IPU."""
        return self.compiled(lambda: self.ipu.loops.repeat(count, body, inputs, infeed))

    def session(self, *queues: Any) -> Any:
        """A session with variables and queues started."""
        session = self.tf.Session()
        session.run([self.tf.global_variables_initializer(), *(q.initializer for q in queues)])
        return session


@pytest.fixture
def program(ipu: Any) -> Iterator[Program]:
    """An empty graph."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        yield Program(ipu)
