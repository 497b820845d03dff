"""The values of `podrun.report.analysis`: names of the SDK's analysis library (libpva), content of the tile model.

`compilation` is what is known before anything runs; `execution` is one modelled batch and its programs, what a report
says about itself, and the refusal by name of what the tile model does not know.
"""
