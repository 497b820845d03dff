"""ATen operators as JAX functions, one short function for each, one file for each family.

Functions may enter that compute one operator from JAX arrays and plain Python values; nothing here imports torch,
because an operator is known by its name. `table` finds an operator's function by its name; `run_aten` runs one node
of a captured graph, for `podrun.poptorch.compile.session_model`.
"""

from podrun.runtime.environment import import_jax

import_jax()  # Before any module here imports it in JAX's own way.
