"""One program loaded on one machine.

`check` says whether it may be loaded, `engine` holds it. `interpreter` follows its instruction lists, with `closing`
for what one machine does for all at their end; `buffers`, `operands` and `residents` are the memory behind its names,
`streams` the host's data. Other machines of the program: `positions` (who does what of a replica), `team` (the groups),
`fabric` (how they find each other), `mail` (what they send each other). `cores` says where it computes.
"""
