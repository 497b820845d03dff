"""Drills: a hidden fault on an emulated POD with running jobs, to be found with the tools that operators have.

`scenario` reads what a drill is, from files that anybody may write; `pod` runs its POD and jobs; `scoring` is pure;
`play` asks for the answer and explains at the end. ``scenarios`` holds the drills of the package, ``jobs`` the programs
that run in them.
"""
