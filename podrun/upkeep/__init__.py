"""Verbs that look after an installation: `podrun doctor`, `cache`, `ps`, `stop` and `completion`.

What enters looks at this host and this user: it starts no POD and needs no program. Each verb is a ``click`` command in
`commands`; what it does is in a module of its own that imports nothing heavy. JAX is only loaded by a process that
`doctor` starts.
"""
