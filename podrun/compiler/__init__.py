"""Program -> Executable: trace, place, differentiate, fold replicas, schedule, cost on tiles, export, cache.

Enters: `Program` (plain values and one JAX function) and a target. Leaves: an `Executable`, which is data.
No operator, no option of a front end and no socket belongs here.
"""
