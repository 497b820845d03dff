"""The model's forward function as a jaxpr, and its cut by place.

`forward_trace` makes the jaxpr, once; `unroll` writes out loops and branches that have collectives inside, and
`stochastic` rounds what operators compute. `ipu_placement` reads which IPU and stage each operator belongs to, and
`segments` cuts a trace into parts that each lie on one.
"""
