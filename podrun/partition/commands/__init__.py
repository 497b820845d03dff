"""The commands `vipu`, `vipu-admin` and `vipu-server`.

Only options, their texts and what is printed may enter; `--help` imports neither gRPC nor Ray nor NumPy.
"""
