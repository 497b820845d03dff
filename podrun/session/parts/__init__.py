"""The parts of `podrun.session.session.Session`, a class each.

`state` is what all share; on it `rng`, `reports`, `device` (compile and load), `run`, `weights`, `files` and `ir`.
`forward_only` is the second program of a pipelined training session; `ir_text` and `dot` write graphs out.
"""
