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
        yield from _imported_by(node)


def _imported_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


_MISSING_NAMES = {"AttributeError", "ImportError", "ModuleNotFoundError"}
"""What a program that is for both versions catches where a name or a module is of the other one."""


def _is_choice(node: ast.AST, imports: bool) -> bool:
    """Whether a statement is how programs do without a name or module of one version: `try` with an ``ImportError`` or
    ``AttributeError`` after it, ``if hasattr(tf, ...)``, ``if tf.__version__ ...``. ``imports``: for an import any
    condition and any error counts.
    """
    if isinstance(node, ast.Try):
        caught = [part for handler in node.handlers if handler.type for part in ast.walk(handler.type)]
        names = {getattr(part, "id", "") or getattr(part, "attr", "") for part in caught}
        every = "Exception" in names or any(handler.type is None for handler in node.handlers)
        return bool(names & _MISSING_NAMES) or (imports and every)
    if not isinstance(node, (ast.If, ast.IfExp)):
        return False
    parts = [getattr(p, "id", "") or getattr(p, "attr", "") for p in ast.walk(node.test)]
    if imports:
        return "__name__" not in parts
    return any(part == "hasattr" or "version" in part.lower() for part in parts)


def _certain(tree: ast.AST, imports: bool = False) -> Iterator[ast.AST]:
    """The nodes of a program that are in no such choice between versions."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not _is_choice(child, imports)]


def uses_version_1(tree: ast.AST) -> bool:
    """Whether a program uses names of version 1 of a module that it imports as plain ``tensorflow``, or a module that
    only version 1 has, and does not try first which version it has.
    """
    if any(chain[0] in _VERSION_1 for chain in _used_chains(tree, "tensorflow", certain=True)):
        return True
    names = (name for node in _certain(tree, imports=True) for name in _imported_by(node))
    return any(f"{name}.".startswith("tensorflow.contrib.") for name in names)


_EAGER = {
    "function", "GradientTape", "IPUStrategy", "enable_v2_behavior", "enable_eager_execution", "numpy", "fit",
    "as_numpy_iterator",
}  # fmt: skip
"""Names of whatever object that a program which is built before it runs does not have."""


_PACKAGES = ("compat", "keras", "python", "compiler", "core", "tools")
"""Parts of plain ``tensorflow`` that say nothing about its version."""


def uses_rarer_names(trees: Sequence[ast.AST], tensorflow: object) -> bool:
    """Whether a program for IPUs, in which nothing may be of version 2, uses a name of plain ``tensorflow``, or of a
    module in it (``train.AdamOptimizer``), that the installed TensorFlow has in ``compat.v1`` alone. A name that
    ``compat.v1`` lacks (``optimizers``) is of version 2.
    """
    version_1 = getattr(getattr(tensorflow, "compat", None), "v1", None)
    if not _is_for_ipus(trees) or _attributes(trees) & _EAGER:
        return False

    def version(chain: Sequence[str]) -> int | None:
        """The version that alone has a name; None where both have it, or neither."""
        old, new = version_1, tensorflow
        for name in chain[:2]:
            old, new = getattr(old, name, None), getattr(new, name, None)
            if old is None or new is None:
                return None if old is new else 2 if old is None else 1
            if not isinstance(old, types.ModuleType):
                return None
        return None

    chains = (chain for tree in trees for chain in _used_chains(tree, "tensorflow", certain=True))
    return {version(chain) for chain in chains if chain[0] not in _PACKAGES} - {None} == {1}


_SESSIONS = {"Session", "placeholder", "InteractiveSession"}
_VERSION_2 = _EAGER | {"IPUStrategyV1"}
"""Names of whatever object that only programs have in which something runs eagerly."""
_KERAS_RUNS = {
    "callbacks", "evaluate", "load_model", "predict", "predict_on_batch", "test_on_batch", "train_on_batch",
}  # fmt: skip
"""The same beside ``keras``; its layers and initializers alone are as often built into a session's graph."""
_ESTIMATORS = {"Estimator", "IPUEstimator", "IPUPipelineEstimator"}
"""Whose methods ``evaluate`` and ``predict`` are in programs that have one, and which build graphs."""
_WITHOUT_RESULTS = {
    "compat", "python", "errors", "DType", "Tensor", "TensorShape", "version", "__version__", "bool",
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "string", "bfloat16",
    "Graph", "control_dependencies", "custom_gradient", "device", "distribute", "group", "keras", "name_scope", "no_op",
}  # fmt: skip
"""Names of plain ``tensorflow`` that mean the same in both versions: nothing that they give has a value."""
_SDK_PACKAGES = ("tensorflow.python.ipu", "tensorflow.compiler.plugin.poplar")


def uses_sessions_alone(trees: Sequence[ast.AST]) -> bool:
    """Whether a program for IPUs has sessions of ``tensorflow.compat.v1`` and nothing that may be of version 2: in the
    SDK's TensorFlow 1 nothing runs eagerly there. Names that mean something else in version 2 (``random``) are no doubt
    where the program compiles for an IPU outside of graphs of its own.
    """
    sessions = {name for tree in trees for name in _used_names(tree, "tensorflow.compat.v1")} & _SESSIONS
    imported = {name + "." for tree in trees for name in _imported(tree)}
    if not sessions or not _is_for_ipus(trees):
        return False
    plain = {name for tree in trees for name in _used_names(tree, "tensorflow")}
    plain |= {name.split(".")[1] for name in imported if name.startswith("tensorflow.")} - {""}
    used = _attributes(trees)
    runs = _KERAS_RUNS - {"evaluate", "predict"} if used & _ESTIMATORS else _KERAS_RUNS
    if used & _VERSION_2 or ("keras" in used | plain and used & runs):
        return False
    return plain <= _WITHOUT_RESULTS | {"compiler"} or (_compiles(trees) and not used & _GRAPHS)


_GRAPHS = {"as_default", "disable_eager_execution", "disable_v2_behavior"}
"""With what a program of version 2 lets `ipu_compiler.compile` work, which does not where operations run eagerly."""


def _compiles(trees: Sequence[ast.AST]) -> bool:
    """Whether a program calls the SDK's `ipu_compiler.compile`."""
    imported = {name for tree in trees for name in _imported(tree)}
    return "tensorflow.python.ipu.ipu_compiler.compile" in imported or any(
        isinstance(node, ast.Attribute)
        and node.attr == "compile"
        and (getattr(node.value, "attr", "") or getattr(node.value, "id", "")) == "ipu_compiler"
        for tree in trees
        for node in ast.walk(tree)
    )


def _is_for_ipus(trees: Sequence[ast.AST]) -> bool:
    imported = {name + "." for tree in trees for name in _imported(tree)}
    return any(name.startswith(f"{package}.") for name in imported for package in _SDK_PACKAGES)


def _attributes(trees: Sequence[ast.AST]) -> set[str]:
    """Names that programs use of whatever object, and those that they import from modules of TensorFlow."""
    imported = (name for tree in trees for name in _imported(tree) if name.startswith("tensorflow."))
    names = {
        name.rpartition(".")[2]
        for name in imported
        if not name.endswith((".eager.function", ".framework.function"))
    }
    return names | {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _used_names(tree: ast.AST, module: str) -> Iterator[str]:
    """The attributes that a program uses of a module that it imports by name."""
    yield from (chain[0] for chain in _used_chains(tree, module))


def _used_chains(tree: ast.AST, module: str, certain: bool = False) -> Iterator[tuple[str, ...]]:
    """The same with the attributes of these attributes: ``("train", "Saver")``, and ``("train",)`` beside it.
    ``certain``: without those in a choice between versions.
    """
    names = set()
    for alias in (a for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names):
        bound = alias.name if alias.asname or "." in module else alias.name.partition(".")[0]
        if bound == module:
            names.add(alias.asname or bound)
    for node in _certain(tree) if certain else ast.walk(tree):
        chain, base = [], node
        while isinstance(base, ast.Attribute):
            chain.append(base.attr)
            base = base.value
        if chain and isinstance(base, ast.Name) and base.id in names:
            yield tuple(reversed(chain))
