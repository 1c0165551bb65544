"""Times of our KDA prefill kernel on one NVIDIA H200, and what is predicted of them."""

from __future__ import annotations

import pytest

from vllm_kda_plugin.kernels import kda_native
from vllm_kda_plugin.kernels.kda_native import Schedule, schedule

MULTIPROCESSORS = 132
Calls = tuple[int, int, int]
"""Heads, sequences, tokens of each."""
WHOLE, HALVES = (1, 0), (2, 0)
# Microseconds by splits and tokens of a segment, fp32 states, gates that decay fast.
BOUNDED_US: dict[Calls, dict[tuple[int, int], float]] = {
    (4, 1, 8192): {
        HALVES: 435.9,
        WHOLE: 596.3,
        (2, 688): 101.5,
        (2, 512): 105.8,
        (1, 688): 115.4,
        (1, 512): 116.3,
        (1, 352): 133.2,
    },
    (12, 1, 2048): {
        HALVES: 113.2,
        WHOLE: 154.8,
        (2, 416): 66.7,
        (1, 352): 69.9,
        (2, 512): 74.1,
        (1, 208): 79.2,
        (2, 352): 80.6,
    },
    (12, 1, 8192): {
        HALVES: 438.6,
        WHOLE: 597.5,
        (1, 752): 180.6,
        (1, 832): 190.2,
        (2, 1648): 196.3,
        (1, 1376): 198.1,
        (1, 1024): 215.2,
    },
    (12, 8, 1024): {WHOLE: 83.7, HALVES: 118.9, (1, 512): 132.1, (2, 512): 142.8, (1, 352): 174.9},
    (12, 1, 32768): {(1, 2992): 571.5, (1, 3280): 613.2, (2, 2992): 662.6, (1, 5472): 699.6},
    (32, 1, 8192): {HALVES: 435.9, (1, 2736): 356.9, (1, 2048): 387},
    (32, 8, 1024): {WHOLE: 166.2},
    (64, 1, 8192): {HALVES: 463.6, WHOLE: 629.1, (1, 4096): 530.3},
    (64, 8, 1024): {WHOLE: 327.2},
    (96, 1, 8192): {WHOLE: 614.5},
    (96, 8, 1024): {WHOLE: 485.7},
    (96, 32, 256): {WHOLE: 589.2},
    (12, 1, 1): {HALVES: 5.8},
    (12, 1, 16): {HALVES: 5.8},
    (12, 256, 9): {WHOLE: 158.7},
}
SOFTPLUS_US: dict[Calls, dict[tuple[int, int], float]] = {
    (4, 1, 8192): {
        HALVES: 490,
        WHOLE: 641.2,
        (2, 688): 116,
        (2, 512): 119.5,
        (1, 512): 127.1,
        (2, 832): 128.2,
        (1, 352): 148.5,
    },
    (12, 1, 2048): {
        HALVES: 124.4,
        WHOLE: 163.6,
        (2, 416): 76,
        (1, 352): 76.7,
        (1, 416): 81.9,
        (2, 512): 84.4,
        (2, 352): 90.3,
    },
    (12, 1, 8192): {
        HALVES: 482.6,
        WHOLE: 638.4,
        (1, 752): 200.8,
        (1, 832): 203.9,
        (1, 1376): 213.3,
        (2, 1648): 218.2,
        (2, 832): 238.9,
    },
    (12, 8, 1024): {WHOLE: 87.6},
    (12, 1, 32768): {(1, 2992): 623, (1, 3280): 665.1, (2, 2992): 736.3, (1, 5472): 753},
    (32, 1, 8192): {HALVES: 481.7, (1, 2736): 386.3, (1, 2048): 420.8},
    (32, 8, 1024): {WHOLE: 175.4},
    (64, 1, 8192): {HALVES: 511.4, WHOLE: 650.1, (1, 4096): 567.8},
    (64, 8, 1024): {WHOLE: 351.1},
    (96, 1, 8192): {WHOLE: 673.6},
    (96, 8, 1024): {WHOLE: 518.9},
    (96, 32, 256): {WHOLE: 643.7},
    (12, 1, 1): {HALVES: 6.4},
    (12, 1, 16): {HALVES: 6.3},
    (12, 256, 9): {WHOLE: 184.9},
}
FLASHKDA_US: dict[Calls, float] = {
    (4, 1, 8192): 397,
    (12, 1, 2048): 127,
    (12, 1, 8192): 426,
    (12, 1, 32768): 1615,
    (32, 1, 8192): 502,
    (32, 8, 1024): 269,
    (64, 1, 8192): 621,
    (64, 8, 1024): 515,
    (96, 1, 8192): 874,
    (96, 8, 1024): 760,
    (96, 32, 256): 940,
}
GATES = pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "softplus"])


def measured(bounded: bool) -> dict[Calls, dict[tuple[int, int], float]]:
    return BOUNDED_US if bounded else SOFTPLUS_US


@GATES
def test_each_cut_takes_what_is_predicted(bounded: bool) -> None:
    for (heads, sequences, tokens), by_cut in measured(bounded).items():
        kinds = [(sequences * heads, -(-tokens // kda_native.CHUNK))]
        for (splits, segment_tokens), us in by_cut.items():
            slots = sequences * tokens // segment_tokens if segment_tokens else 0
            cut = Schedule(splits, segment_tokens, slots)
            predicted = kda_native._us(cut, kinds, sequences * heads, heads, MULTIPROCESSORS, bounded)
            assert predicted == pytest.approx(us, rel=0.15), (heads, sequences, tokens, cut)


@GATES
def test_the_fastest_cut_is_chosen(bounded: bool) -> None:
    for (heads, sequences, tokens), by_cut in measured(bounded).items():
        cut = schedule(sequences * tokens, sequences, heads, MULTIPROCESSORS, bounded=bounded)
        if (cut.splits, cut.segment_tokens) in by_cut:
            assert by_cut[cut.splits, cut.segment_tokens] <= 1.05 * min(by_cut.values())
        else:  # one that was not measured must promise to be faster
            kinds = [(sequences * heads, -(-tokens // kda_native.CHUNK))]
            predicted = kda_native._us(cut, kinds, sequences * heads, heads, MULTIPROCESSORS, bounded)
            assert predicted < min(by_cut.values()), (heads, sequences, tokens, cut)


def test_flashkda_is_slower() -> None:
    """Which was measured before ours was, not beside it."""
    for calls, us in FLASHKDA_US.items():
        assert min(BOUNDED_US[calls].values()) < 0.8 * us
