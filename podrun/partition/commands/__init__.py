"""The commands `vipu`, `vipu-admin` and `vipu-server`: `vipu`, `vipu_admin` and `vipu_server` put them together.

Only options, their texts and what is printed may enter, by verbs: `create`, `listing` (list), `get` (and explain),
`reset`, `remove`; `agent_verbs` (cordon, drain, return, power-cycle, restart, inject, of few lines each); of the server
`serve`, `stop`, `state_files` (check, repair). What verbs share: `shared_options`, `context`,
`which_server`, `rows`. ``--help`` imports neither gRPC nor Ray nor NumPy.
"""
