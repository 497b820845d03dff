"""The model's forward function as a jaxpr, and its cut by place.

`trace` makes the jaxpr, once; `unroll` writes out what stands around collectives inside loops and branches, and
`stochastic` rounds what operators compute. `placement` reads which IPU and stage each operator belongs to, and `split`
cuts a trace into segments that each lie on one.
"""
