"""Attention on contiguous K and V against a float64 reference that loops over queries."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from vllm_kda_plugin.attention import sdpa
from vllm_kda_plugin.attention.sdpa import Attention


def reference(
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    context: int,
    first_key: int,
    causal: bool,
) -> torch.Tensor:
    """One query and head at a time, in float64, straight from the definition."""
    left, right = attention.window
    out = torch.zeros_like(query, dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for i in range(query.shape[0]):
        position = context + i
        for head in range(query.shape[1]):
            logits, values = [], []
            for j in range(key.shape[0]):
                distance = first_key + j - position
                if (causal and distance > 0) or (left is not None and distance < -left):
                    continue
                if right is not None and distance > right:
                    continue
                logit = float(query[i, head].double() @ key[j, head // group].double()) * attention.scale
                if attention.soft_cap:
                    logit = attention.soft_cap * math.tanh(logit / attention.soft_cap)
                if attention.alibi_slopes is not None:
                    logit -= float(attention.alibi_slopes[head]) * abs(distance)
                logits.append(logit)
                values.append(value[j, head // group].double())
            if not values:
                continue
            weights = torch.tensor(logits, dtype=torch.float64)
            if attention.sinks is not None:
                weights = torch.cat((weights, attention.sinks[head : head + 1].double())).softmax(0)[:-1]
            else:
                weights = weights.softmax(0)
            out[i, head] = weights @ torch.stack(values)
    return out


def check(
    attention: Attention,
    *,
    queries: int,
    keys: int,
    context: int,
    first_key: int = 0,
    causal: bool = True,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 24,
    dtype: torch.dtype = torch.float32,
) -> None:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    query = torch.randn(queries, heads[0], head_size, generator=generator).to(dtype)
    packed = torch.randn(keys, heads[1], 2 * head_size, generator=generator).to(dtype)
    key, value = packed[..., :head_size], packed[..., head_size:]
    out = torch.full_like(query, float("nan"))
    attention(query, key, value, out, context=context, first_key=first_key, causal=causal)
    expected = reference(attention, query, key, value, context=context, first_key=first_key, causal=causal)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    error = (out.double() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < tolerance


def features() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "plain": {},
        "window": {"window": (6, 0)},
        "window of one": {"window": (0, 0)},
        "window to both sides": {"window": (6, 6)},
        "soft cap": {"soft_cap": 1.5},
        "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
        "sinks": {"sinks": torch.randn(4, generator=generator)},
        "alibi, soft cap and window": {
            "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
            "soft_cap": 2.0,
            "window": (9, 0),
        },
    }


@pytest.mark.parametrize("tile", [1 << 22, 130], ids=["one tile", "many tiles"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 0), (1, 37, 36), (23, 23, 0), (13, 40, 27), (40, 41, 1), (23, 23, 5)],
    ids=lambda shape: "{} queries {} keys context {}".format(*shape),
)
@pytest.mark.parametrize("feature", features())
def test_causal(feature: str, shape: tuple[int, int, int], tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_TILE_ELEMENTS", tile)
    queries, keys, context = shape
    check(Attention(scale=0.3, **features()[feature]), queries=queries, keys=keys, context=context)


@pytest.mark.parametrize("tile", [1 << 22, 130], ids=["one tile", "many tiles"])
@pytest.mark.parametrize("shape", [(1, 1), (23, 23), (7, 30), (30, 7)], ids=str)
@pytest.mark.parametrize("feature", features())
def test_bidirectional(feature: str, shape: tuple[int, int], tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_TILE_ELEMENTS", tile)
    queries, keys = shape
    check(Attention(scale=0.3, **features()[feature]), queries=queries, keys=keys, context=0, causal=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("feature", features())
def test_dtypes(feature: str, dtype: torch.dtype) -> None:
    check(Attention(scale=0.3, **features()[feature]), queries=9, keys=30, context=21, dtype=dtype)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_heads(heads: tuple[int, int], soft_cap: float) -> None:
    check(Attention(scale=0.3, soft_cap=soft_cap), queries=9, keys=30, context=21, heads=heads, head_size=80)


def test_keys_that_start_later() -> None:
    attention = Attention(scale=0.3, window=(9, 0))
    check(attention, queries=5, keys=14, context=100, first_key=91)
    check(attention, queries=5, keys=25, context=100, first_key=80)


def test_window_costs_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt far longer than the window is attended in tiles, so that the cost is linear in its length."""
    attended = []
    stock = torch.nn.functional.scaled_dot_product_attention

    def counted(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attended.append(query.shape[2] * key.shape[2])
        return stock(query, key, *args, **kwargs)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", counted)
    query, key = torch.randn(2048, 2, 8), torch.randn(2048, 1, 8)
    Attention(scale=1.0, window=(63, 0))(query, key, key, torch.empty_like(query), context=0)
    assert sum(attended) <= 2048 * (63 + 128)


def test_decode_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "_mask", None)
    check(Attention(scale=0.3), queries=1, keys=37, context=36)
    check(Attention(scale=0.3, window=(9, 0)), queries=1, keys=10, context=36, first_key=27)


def test_no_keys_give_zeros() -> None:
    out = torch.full((3, 2, 8), float("nan"))
    empty = torch.empty(0, 2, 8)
    Attention(scale=1.0)(torch.randn(3, 2, 8), empty, empty, out, context=0, causal=False)
    assert torch.equal(out, torch.zeros_like(out))


def test_settings_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Attention(scale=1.0).scale = 2.0  # type: ignore[misc]
