"""ATen operators as JAX functions, one short function for each, one file for each family.

`table` finds the function of an operator by its name; `replay` runs a captured graph with them. Nothing here imports
torch: an operator is known by name, its arguments are JAX arrays and plain Python values.
"""
