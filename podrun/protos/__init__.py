"""Wire formats: the .proto files and the code generated from them (``make proto``). Anyone may import this room."""
