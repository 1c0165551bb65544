"""Times of our KDA prefill kernel on one NVIDIA H200, and what is predicted of them."""

from __future__ import annotations

import pytest

from vllm_kda_plugin.kda.fastest import MEASURED, Shape
from vllm_kda_plugin.kernels import kda_native
from vllm_kda_plugin.kernels.kda_native import Schedule, predicted_us, schedule

MULTIPROCESSORS = 132
Calls = tuple[int, int, int]
"""Heads, sequences, tokens of each."""
WHOLE, HALVES = (1, 0), (2, 0)
# Microseconds by splits and tokens of a segment, fp32 states, gates that decay fast.
BOUNDED_US: dict[Calls, dict[tuple[int, int], float]] = {
    (4, 1, 8192): {WHOLE: 608, HALVES: 448, (2, 512): 107, (2, 688): 112.7, (1, 512): 116.4, (1, 688): 126.9},
    (12, 1, 2048): {WHOLE: 157, HALVES: 115, (2, 416): 65.5, (1, 352): 69, (2, 512): 72.3, (1, 208): 79.2},
    (12, 1, 8192): {WHOLE: 603, HALVES: 446, (1, 752): 182.5, (1, 832): 191.1, (2, 1648): 196.8, (1, 1024): 217.3},
    (12, 8, 1024): {WHOLE: 84.6, HALVES: 120.2, (1, 512): 134.1, (2, 512): 145.7, (1, 352): 190.2},
    (12, 1, 32768): {(1, 2992): 583.6},
    (32, 1, 8192): {(1, 2736): 365.6},
    (32, 8, 1024): {WHOLE: 171.8},
    (64, 1, 8192): {HALVES: 463.2},
    (64, 8, 1024): {WHOLE: 342.2},
    (96, 1, 8192): {WHOLE: 621.1},
    (96, 8, 1024): {WHOLE: 497.7},
    (96, 32, 256): {WHOLE: 579.7},
    (12, 1, 1): {HALVES: 5.8},
    (12, 1, 16): {HALVES: 5.7},
    (12, 256, 9): {WHOLE: 161.8},
}
SOFTPLUS_US: dict[Calls, dict[tuple[int, int], float]] = {
    (4, 1, 8192): {WHOLE: 657, HALVES: 479, (2, 512): 111.7, (2, 688): 119.4, (2, 832): 129.5, (1, 512): 133.7},
    (12, 1, 2048): {WHOLE: 168, HALVES: 124, (2, 416): 69.7, (2, 512): 77.6, (1, 352): 78.7, (1, 416): 83.6},
    (12, 1, 8192): {WHOLE: 665, HALVES: 480, (2, 1648): 210.1, (1, 752): 225.2, (1, 832): 230.5, (2, 832): 236},
    (12, 8, 1024): {WHOLE: 123.8},
    (12, 1, 32768): {(1, 2992): 748.3},
    (32, 1, 8192): {(1, 2736): 506.6},
    (32, 8, 1024): {WHOLE: 240.8},
    (64, 1, 8192): {HALVES: 508.8},
    (64, 8, 1024): {WHOLE: 471.1},
    (96, 1, 8192): {WHOLE: 990.1},
    (96, 8, 1024): {WHOLE: 697.4},
    (96, 32, 256): {WHOLE: 649.7},
    (12, 1, 1): {HALVES: 6.3},
    (12, 1, 16): {HALVES: 6.2},
    (12, 256, 9): {WHOLE: 190.2},
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
            assert by_cut[cut.splits, cut.segment_tokens] <= 1.03 * min(by_cut.values())
        else:  # one that was not measured must promise to be faster
            predicted = predicted_us(sequences * tokens, sequences, heads, MULTIPROCESSORS, bounded=bounded)
            assert predicted < min(by_cut.values()), (heads, sequences, tokens, cut)


@GATES
def test_no_other_kernel_is_faster(bounded: bool) -> None:
    """By what was measured of ours and of the others, at any of the shapes."""
    gate = "bounded" if bounded else "softplus"
    for (heads, sequences, tokens), by_cut in measured(bounded).items():
        shape = Shape(sequences * tokens, sequences, heads, None)
        others = [times.us(shape) for (_, of), times in MEASURED["NVIDIA H200"].items() if of == gate]
        assert min(by_cut.values()) < min(others)
