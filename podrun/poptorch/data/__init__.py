"""Data for models: `data_loader` forms batches with all the factors that a call takes, `data_accessor` divides a data
set over processes and loads ahead, in a process of its own (`data_feeder`) through shared memory."""
