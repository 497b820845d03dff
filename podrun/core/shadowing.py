"""Scripts with the name of a module: every ``import`` of that module, in libraries too, reads the script instead.

Python puts the folder of a script first on its path. So ``random.py`` takes Python's own module from NumPy, and a
program called ``popart.py`` imports itself.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from podrun.core.errors import UsageError

SDK = (
    "gcipuinfo",
    "horovod",
    "ipu_tensorflow_addons",
    "keras",
    "libpvti",
    "model_runtime",
    "mpi4py",
    "popart",
    "popart_core",
    "popdist",
    "popef",
    "poprt",
    "poptorch",
    "pva",
    "tensorflow",
    "tensorflow_core",
)
"""What programs import from the SDK. A test compares it with the folders of ``podrun/compat``."""
LIBRARIES = (
    "argon2", "click", "flatbuffers", "google", "grpc", "jax", "jaxlib", "jsonschema", "numpy", "onnx", "podrun",
    "prometheus_client", "psutil", "pydantic", "ray", "rich", "sklearn", "textual", "torch", "transformers",
    "xxhash", "yaml",
)  # fmt: skip
"""What programs and podrun import besides."""


def check_script_name(script: Path) -> None:
    """Raise UsageError for a script with the name of a module that it, or what it imports, needs: the SDK's, a
    library's, or one of Python's own that podrun has imported, as programs then do as well.
    """
    name = script.stem
    if script.suffix != ".py":
        return
    own = name in sys.stdlib_module_names and name in sys.modules
    if name in SDK or name in LIBRARIES or own:
        whose = "Python's" if own else "the SDK's" if name in SDK else "a library's"
        raise UsageError(
            f"the script {script} has the name of {whose} module {name}: import {name} would read the script",
            hint=f"Rename it: mv {script} {script.with_name(f'my_{name}.py')}",
        )


def shadowing_file(error: BaseException, folder: Path) -> Path | None:
    """The file or package in ``folder``, a program's own, which was read for a module of the SDK or of a library, if an
    error of an import or of a missing name comes of it; else None.
    """
    if not isinstance(error, (AttributeError, ImportError)):
        return None
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    files.append(getattr(getattr(error, "obj", None), "__file__", None) or "")
    own = folder.resolve()
    for path in map(Path, files):
        module = path.parent if path.name == "__init__.py" else path
        if module.stem in (*SDK, *LIBRARIES) and module.resolve().parent == own:
            return module
    return None
