"""What a program may ask of a session: `session_options`, whose groups are in `settings`.

`memory_options` turns those about memory into places and recomputation; `checks` refuses what contradicts itself or
the device.
"""
