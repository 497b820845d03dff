"""ONNX and ai.graphcore operators as JAX functions: one file per family, one function per operator.

Only such functions may enter: ``f(ctx, node, *inputs) -> array or tuple of arrays``, registered with
`podrun.onnx_models.ops.registry.operator`. Inputs are ``jax.Array``; of operators that fold (``folds=True``)
they may all be ``numpy.ndarray``, and then the result must be too. A missing optional input is None. A
tuple returned is the operator's outputs; one sequence is returned as ``(sequence,)``. Functions have no
side effects
but through ``ctx``, work under ``jax.vmap`` and ``jax.vjp``, and never look at more than shapes and dtypes
of inputs: values they need while tracing they take from ``ctx.constant``.

Nothing here knows sessions, devices or schedules.
"""
