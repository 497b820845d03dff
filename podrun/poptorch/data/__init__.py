"""Data for models: `data_loader` forms batches with all the factors that a call takes, `data_accessor` loads them ahead
in a process of its own (`data_feeder`) through shared memory (`shared_ring`), `data_partition` divides a data set over
processes."""
