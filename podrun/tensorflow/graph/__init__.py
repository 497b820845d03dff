"""From a graph of TensorFlow to a graph of the runtime: names instead of edges, values instead of variables."""
