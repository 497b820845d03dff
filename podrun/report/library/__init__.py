"""The values of `podrun.report.analysis`: names of the SDK's analysis library (libpva), content of the tile model.

`compilation` is what is known before anything runs, `execution` one modelled batch, `programs` what both speak of, and
`about` what a report says of itself. `partial` refuses by name what the tile model does not know.
"""
