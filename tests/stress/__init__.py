"""Long searches for what goes wrong rarely; `make test` runs a small fixed part of each."""
