"""Long searches for rare failures; `make test` runs a small fixed part of each."""
