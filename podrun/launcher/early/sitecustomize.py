"""Imports ahead what a program is going to import, before podrun knows where the program's IPUs are.

``podrun`` starts the program's own interpreter at once, with the folder of this file first on PYTHONPATH
(`podrun.launcher.early_start`). Python runs this file as it starts. It imports, waits until podrun gives it the
program's environment, and leaves the rest to Python, which then runs the program as ever. podrun ends it if the program
does not start after all.

A program shall not notice. Nothing is imported ahead for one that sets variables which libraries read when they are
imported. Where a file of the program has the name of a module that was imported, as with a ``random.py`` beside it, the
interpreter executes itself anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

JAX = ("podrun.runtime.environment:import_jax",)
COMPILER = (
    *("podrun.runtime.lowering", "podrun.runtime.tracing", "podrun.compiler.compile", "jax.export"),
    *("jaxlib.mlir.dialects.builtin", "jaxlib.mlir.dialects.mhlo", "jaxlib.mlir.dialects.stablehlo"),
)
MACHINES = ("podrun.device.host.remote", "podrun.device.host.partition_config", "podrun.protos.vipu_pb2")
RUNTIME = (*MACHINES, *JAX, *COMPILER)
AHEAD: Mapping[str, tuple[str, ...]] = {
    "numpy": ("numpy",),
    "torch": ("torch",),  # Before JAX, as where a program imports it at its top.
    "poptorch": ("torch", "podrun.poptorch", *RUNTIME, "podrun.poptorch.operators.table:all_operators"),
    "onnx": ("onnx",),
    "popart": (
        *("podrun.popart", "podrun.popart.sessions.instances", *RUNTIME),
        *("podrun.onnx_models.graph_reader", "podrun.onnx_models.model_loader"),
        "podrun.onnx_models.ops.registry:load_onnx_operators",
    ),
    "popxl": ("podrun.popart",),
    "popdist": ("podrun.popdist.core", "podrun.popdist.collectives"),
}
"""What a program imports, and what it imports in the end: modules, and functions that import. TensorFlow is not here:
its own order of imports counts."""
AT_IMPORT = (
    r"\b(?:BLIS|GOTO|GRPC|JAX|KMP|MKL|NPY|OMP|OPENBLAS|PROTOCOL_BUFFERS|PYTORCH|TF_CPP|TORCH|XLA)_[A-Z]"
    r"|\bdotenv\b"
)
"""Names of variables that these libraries read when they are imported, and a library that sets variables."""
MOST_FILES = 100
"""Files of a program that are looked through."""


def main() -> None:
    """Import ahead if podrun asks for it; else only make room for the module of this name that is meant."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != folder]
    of_python = set(sys.modules)
    from podrun.core.environment import PODRUN_EARLY_START

    number = os.environ.pop(PODRUN_EARLY_START, "")
    _run_the_hosts_own()
    if not number:
        return
    script = sys.argv[0]
    import_ahead(modules_ahead(script))
    with open(int(number), "rb") as told:
        text = told.read()
    if not text:
        os._exit(0)  # The program does not start after all.
    os.environ.clear()
    os.environ.update(json.loads(text))
    if shadowed(script, set(sys.modules) - of_python):
        os.execv(sys.executable, sys.orig_argv)


def _run_the_hosts_own() -> None:
    """Run the next module of this name on the path, if there is one, as Python would have."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


def import_ahead(names: Sequence[str]) -> None:
    """Import modules, and call the functions named behind a colon; nearly nothing of it is garbage."""
    import gc
    from importlib import import_module

    gc.disable()
    for name in names:
        module, _, function = name.partition(":")
        with contextlib.suppress(Exception):  # The program's own import reports it.
            imported = import_module(module)
            if function:
                getattr(imported, function)()
    gc.enable()


def modules_ahead(script: str) -> list[str]:
    """What to import for a script: nothing if it, or a file of it, names a variable that libraries read then, or if it
    uses TensorFlow."""
    import re

    names: set[str] = set()
    for text in texts_of(script):
        if re.search(AT_IMPORT, text):
            return []
        names |= set(imported_names(text))
    if {"tensorflow", "keras"} & {name.partition(".")[0] for name in names}:
        return []
    tops = {name.partition(".")[0] for name in names}
    return list(dict.fromkeys(name for top, ahead in AHEAD.items() if top in tops for name in ahead))


def texts_of(script: str) -> Iterator[str]:
    """The text of a script and of the files beside it that it imports, directly or not."""
    folder = os.path.dirname(os.path.abspath(script))
    left, seen = [os.path.abspath(script)], set[str]()
    while left and len(seen) < MOST_FILES:
        file = left.pop()
        seen.add(file)
        try:
            with open(file, encoding="utf-8", errors="replace") as opened:
                text = opened.read()
        except OSError:
            continue
        yield text
        for name in imported_names(text):
            path = os.path.join(folder, *name.split("."))
            left += [there for there in (f"{path}.py", f"{path}/__init__.py") if there not in seen]


def imported_names(text: str) -> Iterator[str]:
    """The modules that a text imports, wherever the line stands."""
    import re

    for names in re.findall(r"^[ \t]*import[ \t]+([\w., \t]+)", text, re.MULTILINE):
        yield from (words.split()[0] for words in names.split(",") if words.split())
    for package, names in re.findall(
        r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import\b[ \t]*\(?([\w, \t]*)", text, re.MULTILINE
    ):
        inner = package.lstrip(".")
        yield inner
        yield from (f"{inner}.{words.split()[0]}" for words in names.split(",") if words.split())


def shadowed(script: str, modules: set[str]) -> bool:
    """Whether a file or folder beside the script has the name of one of the modules: the program means its own."""
    try:
        beside = os.listdir(os.path.dirname(os.path.abspath(script)))
    except OSError:
        return False
    tops = {name.partition(".")[0] for name in modules}
    return any(name.partition(".")[0] in tops for name in beside)


if __name__ == "sitecustomize":
    main()
