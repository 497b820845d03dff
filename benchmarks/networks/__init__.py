"""The published networks as JAX functions, for the cost model: shapes only, no weights are ever made."""
