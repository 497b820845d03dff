"""From a torch module to a `CapturedGraph`: one run of ``forward`` on tensors that have shapes and no data.

`graph` holds the values that come out and flattens nested arguments, which needs no torch; `recorder` sees every
operator that ``forward`` calls; `aliasing` turns views and writes in place into values.
"""
