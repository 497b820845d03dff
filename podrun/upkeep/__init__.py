"""Verbs that look after an installation: `podrun doctor`, `cache`, `ps` and `stop`.

A verb may enter that looks at this host and this user; it starts no POD and needs no program. Each is a ``click``
command in `verbs`, and its work is in a module of its own that imports nothing heavy. Findings go to people as text or
JSON. Only a process that `doctor` starts loads JAX.
"""
