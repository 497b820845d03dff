"""Which cases of a test marked ``sample(n)`` run by default: about every n-th, and all values of its parameters.

Of two crossed parameters, every n-th case has always the same value of the second one where its number of values and n
have a divisor in common. So cases are chosen by their values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from hypothesis import settings

ALL_EXAMPLES = 100
"""Examples that Hypothesis tries for a test that says nothing of them, where slow tests run too."""
FEW = 4
"""All values of a parameter run if it has so many or fewer, or no more than there are cases to run, and if a value is
in several cases. A parameter with another value in each case numbers the cases."""


def chosen(cases: Sequence[Mapping[str, object]], every: int) -> list[int]:
    """Indices of the cases that run by default, of ``cases`` with the value of each parameter.

    Each next case is the one with most values that have not run, among equals the one whose values have run least,
    among equals one of every ``every``-th. More than one in ``every`` run where parameters have values left.
    """
    # The key of a value that crosses others is made once: that of large arrays takes long.
    values = {id(value): value for case in cases for value in case.values()}
    known = {number: _key(value) for number, value in values.items()}
    columns = [[known[id(case[name])] for case in cases] for name in (cases[0] if cases else {})]
    wanted = -(-len(cases) // every)
    sizes = [len(set(column)) for column in columns]
    whole = [size if size < len(cases) and size <= max(FEW, wanted) else 0 for size in sizes]
    ran: list[Counter[Hashable]] = [Counter() for _ in columns]
    left = sorted(range(len(cases)), key=lambda i: (i % every, i))
    picked: list[int] = []

    def rank(case: int) -> tuple[int, int]:
        times = [counts[column[case]] for counts, column in zip(ran, columns, strict=True)]
        return -sum(not n for n, size in zip(times, whole, strict=True) if size), sum(times)

    while len(picked) < wanted or any(len(n) < size for n, size in zip(ran, whole, strict=True)):
        case = min(left, key=rank)
        left.remove(case)
        picked.append(case)
        for counts, column in zip(ran, columns, strict=True):
            counts[column[case]] += 1
    return sorted(picked)


def examples(count: int) -> int:
    """``count`` examples of Hypothesis, fewer where slow tests do not run; to be asked when a module is imported."""
    return max(1, count * settings().max_examples // ALL_EXAMPLES)


def _key(value: object) -> Hashable:
    """What tells a value from others; 1 from True and from 1.0 too."""
    if isinstance(value, int | float | str | bytes | None) or callable(value):
        return type(value).__name__, value
    return repr(value)
