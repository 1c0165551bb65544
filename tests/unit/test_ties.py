"""The comparison of greedy tokens that tests of engines use."""

from __future__ import annotations

import pytest

from tests.support.ties import parted

STOCK = [{5: -0.10, 6: -3.0}, {7: -0.500, 8: -0.505}, {1: -0.1, 2: -4.0}]


def test_the_same() -> None:
    assert parted([[5, 7, 1]], [[5, 7, 1]], [STOCK], [STOCK], 0.0, 0.0) == []


def test_what_follows_a_tie_is_not_compared() -> None:
    ours = [{5: -0.11, 6: -3.0}, {8: -0.45, 7: -0.55}, {9: -0.1}]
    (line,) = parted([[5, 7, 1]], [[5, 8, 9]], [STOCK], [ours], 0.01, 0.02)
    assert "prompt 0, token 1: 7 but 8, gaps 0.0050 and 0.1000" in line


@pytest.mark.parametrize(
    ("tokens", "ours", "message"),
    [
        ([6, 7, 1], [{6: -0.1, 5: -3.0}, *STOCK[1:]], "prompt 0, token 0: 5 but 6, gaps 2.9000 and 2.9000"),
        ([9, 7, 1], [{9: -0.1}, *STOCK[1:]], "gaps inf and inf"),
        ([5, 7, 1], [*STOCK[:2], {1: -0.4}], "prompt 0, token 2: -0.1000 but -0.4000"),
    ],
)
def test_others_are_refused(tokens: list[int], ours: list[dict[int, float]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        parted([[5, 7, 1]], [tokens], [STOCK], [ours], 0.01, 0.02)
