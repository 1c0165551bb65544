"""Greedy tokens of two engines, which may part where two candidates are as good as equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

Candidates = Sequence[dict[int, float]]


def parted(
    stock: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    stock_candidates: Sequence[Candidates],
    our_candidates: Sequence[Candidates],
    tie: float,
    noise: float,
) -> list[str]:
    """Where the tokens of each prompt part, a line each; what follows then is not compared.

    Args:
        stock: tokens of each prompt.
        ours: likewise.
        stock_candidates: for each token the likeliest candidates' log-probabilities.
        our_candidates: likewise.
        tie: how far apart the log-probabilities of the two tokens may be, in one of the engines.
        noise: how far the log-probability of a token may be from stock's.

    Raises:
        AssertionError: with all places where it is no tie, or a token's log-probability is further off than ``noise``.
    """
    ties: list[str] = []
    wrong: list[str] = []
    prompts = zip(stock, ours, stock_candidates, our_candidates, strict=True)
    for number, (tokens, our_tokens, likely, our_likely) in enumerate(prompts):
        assert len(tokens) == len(our_tokens) == len(likely) == len(our_likely)
        for place, (token, our_token) in enumerate(zip(tokens, our_tokens, strict=True)):
            one, other = likely[place], our_likely[place]
            if token == our_token:
                if abs(one[token] - other[token]) > noise:
                    wrong.append(f"prompt {number}, token {place}: {one[token]:.4f} but {other[token]:.4f}")
                    break
                continue
            gaps = one[token] - one.get(our_token, -math.inf), other[our_token] - other.get(token, -math.inf)
            line = f"prompt {number}, token {place}: {token} but {our_token}, gaps {gaps[0]:.4f} and {gaps[1]:.4f}"
            (ties if min(gaps) < tie else wrong).append(line)
            break
    assert not wrong, f"{len(wrong)} of {len(stock)} prompts:\n" + "\n".join(wrong)
    return ties
