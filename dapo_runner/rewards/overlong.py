"""Overlong reward shaping: the soft punishment of Eq. 13 of the DAPO paper (arXiv 2503.14476)."""

from __future__ import annotations


def length_penalty(length: int, max_length: int, cache_length: int) -> float:
    """The term added to the reward of a response of ``length`` tokens; in [−1, 0].

    With L_max = max_length and L_cache = cache_length: 0 up to L_max − L_cache, then
    ((L_max − L_cache) − length) / L_cache up to L_max, then −1.
    """
    expected_length = max_length - cache_length
    if length <= expected_length:
        return 0.0
    if length <= max_length:
        return (expected_length - length) / cache_length
    return -1.0
