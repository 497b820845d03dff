"""Programs that tests compile, for one run over a few numbers: compiling is what takes time.

What podrun compiles for a machine has options of its own (`podrun.device.xla.compiler_options`), in tests as for users.
This is about what tests and front ends compute with JAX themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from podrun.device.xla.compiler_options import WITHOUT_MLIR

FIXTURE = "programs_of_tests_compile_quickly"
BY_DEFAULT = "programs_of_default_tests_compile_quickly"
QUICK: Mapping[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    **WITHOUT_MLIR,
}
"""Options with which XLA compiles in a third of the time."""


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


def forget_programs(done: pytest.Item, following: pytest.Item | None) -> None:
    """Between tests whose programs compile with `QUICK` options and tests whose do not, drop what JAX keeps compiled:
    else a test would compute with programs of the others, or not, by the order of tests.
    """
    jax = sys.modules.get("jax")
    if jax is not None and following is not None and is_quick(done) != is_quick(following):
        jax.clear_caches()


def is_quick(item: pytest.Item) -> bool:
    return not {FIXTURE, BY_DEFAULT}.isdisjoint(getattr(item, "fixturenames", ()))
