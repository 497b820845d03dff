"""Predictions of published measurements, one file per kind of record.

Each predictor takes a `Record` and computes its figure with podrun's own models from the record's kind,
target, metric and parameters. None looks at a record's id or value.
"""
