"""Which kernel a step takes, by times that are measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vllm_kda_plugin.kda import fastest, providers
from vllm_kda_plugin.kda.fastest import MEASURED, Shape, Times, candidates
from vllm_kda_plugin.kda.providers import PROVIDERS, Case
from vllm_kda_plugin.kernels import kda_native

GPU = "NVIDIA H200"
BOUNDED = Case("cuda", (9, 0), 128, torch.bfloat16, torch.float32, -5.0)
SOFTPLUS = dataclasses.replace(BOUNDED, lower_bound=None)


@pytest.fixture(autouse=True)
def _everything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_missing", lambda module: None)
    monkeypatch.setattr(fastest, "NATIVE_MEASURED_ON", frozenset({GPU}))


def names(case: Case, gpu: str = GPU) -> list[str]:
    return [provider.name for provider in candidates(case, gpu)]


def test_candidates() -> None:
    assert names(BOUNDED) == ["native", "flashkda", "triton"]
    assert names(SOFTPLUS) == ["native", "triton"]
    assert names(BOUNDED, "NVIDIA H100") == []
    assert names(dataclasses.replace(BOUNDED, head_dim=64)) == [], "stock, where ours cannot"
    assert names(dataclasses.replace(BOUNDED, lower_bound=-6.0)) == []


def test_the_least_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    among = candidates(BOUNDED, GPU)
    shape = Shape(8192, 1, 12, None)
    monkeypatch.setitem(MEASURED[GPU], ("flashkda", "bounded"), Times(0, 1e-6, 0, 0))
    assert fastest.fastest(among, BOUNDED, GPU, 132, shape) is PROVIDERS["flashkda"]
    assert fastest.fastest(among[:1], BOUNDED, GPU, 132, shape) is PROVIDERS["native"]
    monkeypatch.setattr(kda_native, "predicted_us", lambda *shape, bounded: 0.0)
    fastest.fastest.cache_clear()
    assert fastest.fastest(among, BOUNDED, GPU, 132, shape) is PROVIDERS["native"]
    fastest.fastest.cache_clear()


@pytest.mark.parametrize(
    ("heads", "sequences", "tokens", "us"),
    [
        *((4, 1, 8192, 397), (12, 1, 2048, 127), (12, 1, 8192, 426), (12, 1, 32768, 1615), (32, 1, 8192, 502)),
        *((32, 8, 1024, 269), (64, 1, 8192, 621), (64, 8, 1024, 515), (96, 1, 8192, 874), (96, 8, 1024, 760)),
        (96, 32, 256, 940),
    ],
)
def test_predictions_are_near_to_what_was_measured(heads: int, sequences: int, tokens: int, us: float) -> None:
    """Of FlashKDA, on one NVIDIA H200."""
    predicted = MEASURED[GPU]["flashkda", "bounded"].us(Shape(sequences * tokens, sequences, heads, None))
    assert predicted == pytest.approx(us, rel=0.15)


def test_a_long_sequence_counts() -> None:
    times = MEASURED[GPU]["flashkda", "bounded"]
    assert times.us(Shape(8192, 8, 12, 8185)) > 2 * times.us(Shape(8192, 8, 12, None))
