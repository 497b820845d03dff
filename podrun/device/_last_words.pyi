"""Type of the C module; what its call means stands in ``_last_words.c``."""

from typing import Any

def install(memory: Any, slot_bytes: int, descriptor: int, first_words: str, last_words: str, /) -> None: ...
