"""The data of a step: which tensors come back and how often (`dataflow`), and the arrays and callbacks that carry data
(`stepio`). Nothing else may enter.
"""
