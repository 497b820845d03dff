"""Programs that tests compile, for one run over a few numbers: compiling is what takes time.

What podrun compiles for a machine has options of its own (`podrun.device.xla.pieces.COMPILER_OPTIONS`). It keeps
them but in the folders whose ``conftest.py`` says so, and there too in one file and where slow tests run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

FIXTURE = "programs_of_tests_compile_quickly"
BY_DEFAULT = "programs_of_default_tests_compile_quickly"
QUICK: Mapping[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options with which XLA compiles in a third of the time. Without the last two it passes each fusion through MLIR and
each part of a program through LLVM by itself, which is most of the time."""
AS_PODRUN_DOES = ("test_optimizers.py", "test_poptorch_checkpoints.py", "test_popart_optimizers.py")
"""Files of those folders, one of each, whose programs are compiled for machines as for users."""


@pytest.fixture(scope="module", autouse=True)
def programs_of_tests_compile_quickly() -> Iterator[None]:
    """Compile what has no options with `QUICK` ones, in the files of a room whose ``conftest.py`` imports this."""
    with _quick_programs():
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_of_default_tests_compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same in a file that imports this, while no slow tests run: `make test-all` compiles as XLA does by itself."""
    with _quick_programs() if "not slow" in request.config.option.markexpr else nullcontext():
        yield


@contextmanager
def _quick_programs() -> Iterator[None]:
    from podrun.runtime.environment import import_jax

    import_jax()
    from jax._src import compiler

    options = compiler.get_compile_options

    def quick_options(*args: Any, env_options_overrides: Any = None, **named: Any) -> Any:
        return options(*args, env_options_overrides=env_options_overrides or dict(QUICK), **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", quick_options)
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_of_machines_compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Add `QUICK` options to those of machines, in the files of a folder whose ``conftest.py`` imports this: what a
    front end makes of a program does not depend on them. The files of `AS_PODRUN_DOES`, and those of which slow tests
    run, compile as podrun does.

    The options are part of the name of a compiled piece, so no other test or program gets one of these.
    """
    from podrun.device.xla.pieces import COMPILER_OPTIONS

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {} if _compiles_as_podrun_does(request) else QUICK.items():
            patch.setitem(COMPILER_OPTIONS, name, value)
        yield


def _compiles_as_podrun_does(request: pytest.FixtureRequest) -> bool:
    own = (item for item in request.session.items if item.path == request.path)
    return request.path.name in AS_PODRUN_DOES or any(item.get_closest_marker("slow") for item in own)


def forget_programs(done: pytest.Item, following: pytest.Item | None) -> None:
    """Between tests whose programs compile with `QUICK` options and tests whose do not, drop what JAX keeps compiled:
    else a test would compute with programs of the others, or not, by the order of tests.
    """
    jax = sys.modules.get("jax")
    if jax is not None and following is not None and is_quick(done) != is_quick(following):
        jax.clear_caches()


def is_quick(item: pytest.Item) -> bool:
    return not {FIXTURE, BY_DEFAULT}.isdisjoint(getattr(item, "fixturenames", ()))
