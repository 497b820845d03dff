"""How an ONNX model becomes one for IPUs: passes over the model, its precision, its shapes, its places.

`graph_edit` is what passes work with, `pass_manager` keeps them by name, the ``*_passes`` files hold them by what they
are for, and `converter` runs those that a conversion's options ask for. A pass takes a model and gives a model that
computes the same; only those of precision may change numbers, by what their own text states.
"""
