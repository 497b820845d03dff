"""How a program makes a model operator by operator: the builder, the graph as it grows, attributes of nodes, a method
for each operator, types and shapes while building. Sessions know nothing of it.
"""
