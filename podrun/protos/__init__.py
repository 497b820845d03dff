"""Wire formats of V-IPU and IPUoF: the .proto files and the messages generated from them (``make proto``).

`services` makes clients and servers of the services that the files describe. Only messages and services may enter, with
what every field means. `podrun.partition` and `podrun.device` turn messages into values and check them; no message
travels further.
"""
