"""Data for models: batches, and loading in advance.

A data set or torch's loader enters; tensors with all samples of a call leave for wrapped models. `data_loader` forms
batches with all the factors that a call takes; `data_accessor` divides a data set over processes and loads in advance,
in a process of its own (`data_feeder`) through shared memory.
"""
