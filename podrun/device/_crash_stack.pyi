"""Type of the C module; what its call means stands in ``_crash_stack.c``."""

from typing import Any

def install(
    memory: Any, slot_bytes: int, descriptor: int, before_stacks: str, after_stacks: str, /
) -> None: ...
