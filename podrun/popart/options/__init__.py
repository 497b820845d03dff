"""What a program sets for a session: its options, their groups, and patterns. Names, defaults and types alone:
`podrun.popart.sessions` checks options against each other and translates them.
"""
