"""Text that is made up as it goes: sentences of a small grammar, as numbers of their letters."""

from __future__ import annotations

import numpy as np

LETTERS = " .abcdefghijklmnopqrstuvwxyz"
_WORDS = {
    "D": ["the", "a", "every", "no"],
    "A": ["small", "red", "quiet", "early", "distant", "warm"],
    "N": ["river", "stone", "bird", "letter", "garden", "train", "winter"],
    "V": ["finds", "follows", "carries", "forgets", "remembers"],
    "P": ["near", "under", "behind", "before"],
}
_SENTENCES = ["DANVDN", "DNVDAN", "DNVDNPDN", "DANVDNPDAN"]


def corpus(letters: int, seed: int = 0) -> np.ndarray:
    """At least ``letters`` letters as int32 numbers into `LETTERS`."""
    random = np.random.default_rng(seed)
    parts, length = [], 0
    while length < letters:
        shape = _SENTENCES[random.integers(len(_SENTENCES))]
        words = [_WORDS[kind][random.integers(len(_WORDS[kind]))] for kind in shape]
        parts.append(" ".join(words) + ". ")
        length += len(parts[-1])
    numbers = {letter: number for number, letter in enumerate(LETTERS)}
    return np.array([numbers[letter] for letter in "".join(parts)], np.int32)


def samples(
    text: np.ndarray, count: int, length: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """``count`` pieces of ``length`` letters ``[count, length]``, and for each letter the one after it."""
    starts = random.integers(0, len(text) - length - 1, count)
    places = starts[:, None] + np.arange(length)
    return text[places], text[places + 1]
