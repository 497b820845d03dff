"""Wire formats of V-IPU and IPUoF: the .proto files and the code generated from them (``make proto``).

Only messages and services may enter, with what every field means. `podrun.partition` and `podrun.device` turn messages
into values and check them; no message travels further.
"""
