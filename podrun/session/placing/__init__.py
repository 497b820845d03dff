"""Which IPU, pipeline stage or phase each operator of a model belongs to.

`placement` brings annotations into the form that lowering reads, `auto_placement` makes them from costs, `phases` and
`pipelining` have the rules of execution phases and of pipelines.
"""
