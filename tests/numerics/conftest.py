"""JAX is imported as podrun needs it before any module of the room is."""

from podrun.runtime.environment import import_jax
from tests.quick_programs import programs_of_tests_compile_quickly as programs_of_tests_compile_quickly

import_jax()
