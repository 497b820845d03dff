"""Whether ``import tensorflow`` is to give version 1 (``tf.compat.v1``): ``PODRUN_TENSORFLOW``, or what a program uses.

A script, and the modules beside it that it imports, are read and not run. Where they leave a doubt, TensorFlow stays
as it is.
"""

from __future__ import annotations

import ast
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from podrun.core.environment import PODRUN_TENSORFLOW, environment

_VERSION_1 = {
    "AUTO_REUSE", "ConfigProto", "GPUOptions", "GraphKeys", "InteractiveSession", "Session", "app", "assign", "contrib",
    "disable_eager_execution", "disable_v2_behavior", "enable_eager_execution", "estimator", "flags", "get_collection",
    "get_variable", "global_variables", "global_variables_initializer", "layers", "local_variables_initializer",
    "logging", "placeholder", "placeholder_with_default", "random_normal", "random_uniform", "reset_default_graph",
    "set_random_seed", "to_float", "to_int32", "trainable_variables", "truncated_normal_initializer", "variable_scope",
}  # fmt: skip
"""Names that plain ``tensorflow`` has in version 1 alone."""
MOST_FILES = 100
"""Most files of a program that are looked at for these names."""


def wants_version_1(tensorflow: object) -> bool:
    """Whether ``import tensorflow`` is to give version 1: as PODRUN_TENSORFLOW says, else as the script uses it.

    ``tensorflow`` is the module as it is installed.
    """
    chosen = environment().get(PODRUN_TENSORFLOW, "")
    if chosen:
        return chosen.startswith("1")
    script = sys.argv[0] if sys.argv else ""
    if not script.endswith(".py") or not os.path.isfile(script):
        return False
    trees = list(_program_files(Path(script)))
    return (
        any(uses_version_1(tree) for tree in trees)
        or uses_rarer_names(trees, tensorflow)
        or uses_sessions_alone(trees)
    )


def _program_files(script: Path) -> Iterator[ast.AST]:
    """A script and the modules beside it that it imports, parsed."""
    waiting, seen = [script], {script}
    while waiting and len(seen) <= MOST_FILES:
        path = waiting.pop(0)
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        yield tree
        for name in _imported(tree):
            base = script.parent.joinpath(*name.split("."))
            for candidate in (base.with_suffix(".py"), base / "__init__.py"):
                if candidate not in seen and candidate.is_file():
                    seen.add(candidate)
                    waiting.append(candidate)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def uses_version_1(tree: ast.AST) -> bool:
    """Whether a program uses names of version 1 of a module that it imports as plain ``tensorflow``, or a module that
    only version 1 has.
    """
    return any(attribute in _VERSION_1 for attribute in _used_names(tree, "tensorflow")) or any(
        f"{name}.".startswith("tensorflow.contrib.") for name in _imported(tree)
    )


_EAGER = {
    "function", "GradientTape", "IPUStrategy", "enable_v2_behavior", "enable_eager_execution", "numpy", "fit",
    "as_numpy_iterator",
}  # fmt: skip
"""Names of whatever object that a program which is built before it runs does not have."""


def uses_rarer_names(trees: Sequence[ast.AST], tensorflow: object) -> bool:
    """Whether a program for IPUs, in which nothing may be of version 2, uses a name of plain ``tensorflow``, or of a
    module in it (``train.AdamOptimizer``), that the installed TensorFlow has in ``compat.v1`` alone.
    """
    version_1 = getattr(getattr(tensorflow, "compat", None), "v1", None)
    if not _is_for_ipus(trees) or _attributes(trees) & _EAGER:
        return False

    def rare(chain: Sequence[str]) -> bool:
        old, new = version_1, tensorflow
        for name in chain[:2]:
            old, new = getattr(old, name, None), getattr(new, name, None)
            if old is None or new is None or not isinstance(old, types.ModuleType):
                return old is not None and new is None
        return False

    chains = (chain for tree in trees for chain in _used_chains(tree, "tensorflow"))
    return any(rare(chain) for chain in chains if chain[0] not in ("compat", "keras", "python"))


_SESSIONS = {"Session", "placeholder", "InteractiveSession"}
_VERSION_2 = _EAGER | {"IPUStrategyV1", "keras"}
"""Names of whatever object that only programs have in which something runs eagerly."""
_WITHOUT_RESULTS = {
    "compat", "python", "errors", "DType", "Tensor", "TensorShape", "version", "__version__", "bool",
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "string", "bfloat16",
    "Graph", "control_dependencies", "custom_gradient", "device", "distribute", "group", "name_scope", "no_op",
}  # fmt: skip
"""Names of plain ``tensorflow`` that mean the same in both versions: nothing that they give has a value."""
_SDK_PACKAGES = ("tensorflow.python.ipu", "tensorflow.compiler.plugin.poplar")


def uses_sessions_alone(trees: Sequence[ast.AST]) -> bool:
    """Whether a program for IPUs has sessions of ``tensorflow.compat.v1`` and nothing that may be of version 2: in the
    SDK's TensorFlow 1 nothing runs eagerly there.
    """
    sessions = {name for tree in trees for name in _used_names(tree, "tensorflow.compat.v1")} & _SESSIONS
    imported = {name + "." for tree in trees for name in _imported(tree)}
    if not sessions or not _is_for_ipus(trees):
        return False
    plain = {name for tree in trees for name in _used_names(tree, "tensorflow")}
    plain |= {name.split(".")[1] for name in imported if name.startswith("tensorflow.")} - {""}
    return not _attributes(trees) & _VERSION_2 and plain <= _WITHOUT_RESULTS | {"compiler"}


def _is_for_ipus(trees: Sequence[ast.AST]) -> bool:
    imported = {name + "." for tree in trees for name in _imported(tree)}
    return any(name.startswith(f"{package}.") for name in imported for package in _SDK_PACKAGES)


def _attributes(trees: Sequence[ast.AST]) -> set[str]:
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _used_names(tree: ast.AST, module: str) -> Iterator[str]:
    """The attributes that a program uses of a module that it imports by name."""
    yield from (chain[0] for chain in _used_chains(tree, module))


def _used_chains(tree: ast.AST, module: str) -> Iterator[tuple[str, ...]]:
    """The same with the attributes of these attributes: ``("train", "Saver")``, and ``("train",)`` beside it."""
    names = set()
    for alias in (a for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names):
        bound = alias.name if alias.asname or "." in module else alias.name.partition(".")[0]
        if bound == module:
            names.add(alias.asname or bound)
    for node in ast.walk(tree):
        chain, base = [], node
        while isinstance(base, ast.Attribute):
            chain.append(base.attr)
            base = base.value
        if chain and isinstance(base, ast.Name) and base.id in names:
            yield tuple(reversed(chain))
