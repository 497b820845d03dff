"""Update rules: the arithmetic of optimizers, in the compiler's form. Front ends have the optimizers' classes.

A front end gives a rule its `hyperparameters.Hyperparameters` and a form (`SgdForm`, `AdamForm`, `AdaptiveForm`).
"""
