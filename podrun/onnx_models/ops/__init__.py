"""ONNX and ai.graphcore operators as JAX functions: one file per family, one function per operator.

Only such functions may enter: ``f(ctx, node, *inputs) -> array or tuple of arrays``, registered with
`podrun.onnx_models.ops.registry.operator`; `podrun.onnx_models.lowering` calls them. Inputs are ``jax.Array``; inputs
of operators that fold (``folds=True``) may all be ``numpy.ndarray``, and then the result must be too. A missing
optional input is None. A returned tuple is the operator's outputs; one sequence is returned as ``(sequence,)``.
Functions have no side effects except through ``ctx``, work under ``jax.vmap`` and ``jax.vjp``, and look only at shapes
and dtypes of inputs: ``ctx.constant`` gives values that they need while tracing.

Nothing here knows sessions, devices or schedules.
"""
