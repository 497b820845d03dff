"""What Ray starts for a machine instead of its own worker: that worker, without what machines have no use for.

Every machine's process pays for it, on cores that all of them share (docs/partition.md, *Machines are processes*). No
garbage is looked for until the machine is there: there is next to none in libraries that are imported once. Libraries
that Ray imports and machines never call are read when first used. What crosses are plain values, for which Ray need not
import pydantic and Arrow. Should a future Ray name things otherwise, its worker starts as it would by itself.
"""

from __future__ import annotations

import gc
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

SELDOM = ("requests", "jsonschema")
"""What Ray imports to ask clouds for accelerators and to check environments of tasks."""


class ReadWhenUsed:
    """A finder of modules whose code runs when something in them is first asked for."""

    def __init__(self, names: Sequence[str]) -> None:
        self._left = set(names)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name not in self._left:
            return None
        self._left.discard(name)  # So that the other finders are asked.
        from importlib.util import LazyLoader, find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def main() -> None:
    """Be Ray's worker. `MachineActor.start` has garbage looked for again."""
    # The folder of this file, whose modules have names of the standard library's, is no place to import from.
    sys.path[:] = [path for path in sys.path if path != __file__.rpartition("/")[0]]
    gc.disable()
    import runpy

    sys.meta_path.insert(0, ReadWhenUsed(SELDOM))
    from ray.util import serialization_addons

    serialization_addons.apply = lambda serialization_context: None
    runpy.run_module("ray._private.workers.default_worker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
