"""JAX is imported as podrun needs it before any module of the room is."""

from podrun.runtime.environment import import_jax

import_jax()
