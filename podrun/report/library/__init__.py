"""The values of `podrun.report.analysis`: names of the SDK's analysis library (libpva), content of the tile model.

A `Profile` enters, and objects with the library's names leave, for programs that read reports. `compilation` has the
facts known before anything runs; `execution` has one modelled batch and its programs, facts about the report itself,
and refuses by name what the tile model does not know.
"""
