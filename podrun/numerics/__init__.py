"""What operators compute, once for all front ends: one file for each family, pure functions of arrays.

Only functions may enter that take JAX arrays and plain Python values (numbers, tuples, names of a mode) and give
arrays. They know no front end: no node, context, call or attribute. A front end's operator reads its attributes, calls
a function of this room and shapes the result as its own definition asks.

Functions have no side effects, work under ``jax.vmap`` and ``jax.vjp``, and look only at shapes and dtypes. Unless a
docstring says otherwise they compute in the type they are given: callers widen halves (`podrun.numerics.precision`)
and round the result once. Where two front ends differ in bits, a parameter keeps both, and the docstring says why.
Inputs that do not fit raise `podrun.core.errors.InputMismatch`.

The room imports JAX when it is imported: `import_jax` must have run before (the front ends' operator folders do so).
"""
