"""What operations of TensorFlow compute, in JAX: one module for each family."""
