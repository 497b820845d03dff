"""One program loaded on one machine.

`check` says whether it may be loaded, `engine` holds it. `interpreter` follows its instruction lists, with `closing`
for what one machine does for all at their end. `buffers` is the memory behind its names (`arenas`, `operands`), some of
which XLA writes over (`residents`, `passing`); `streams` the host's data, `kept` what replicas keep for themselves.
Other machines of the program: `positions` (who does what of a replica), `team` (the groups), `fabric` (how they find
each other), `mail` (what they send each other). `cores` says where it computes.
"""
