"""Our backend gives the tokens of vLLM's own CPU backend, in the real engine, float32, greedy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import ModelFactory
from tests.support.engine import IMPLEMENTATION, Run, prompts, run

_stock: dict[str, Run] = {}


def stock_run(model: str, texts: list[str], **settings: Any) -> Run:
    """vLLM's own CPU backend on the same prompts, remembered for the tests that share them."""
    key = repr((model, texts, sorted(settings.items())))
    if key not in _stock:
        _stock[key] = run(model, texts, backend=None, **settings)
        assert _stock[key].implementations == {"vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"}
    return _stock[key]


def batching(budget: int | None) -> dict[str, Any]:
    """Engine settings for prefill in chunks of ``budget`` tokens, None for vLLM's own."""
    return {} if budget is None else {"max_num_batched_tokens": budget, "max_num_seqs": 8}


def check(model: str, texts: list[str], *, stock: dict[str, Any] | None = None, **settings: Any) -> Run:
    """Run both backends; every token must be the same, varied, and made by our class through gathers."""
    expected = stock_run(model, texts, **(settings if stock is None else stock))
    ours = run(model, texts, backend="CUSTOM", **settings)
    assert ours.implementations == {IMPLEMENTATION}
    assert ours.gathers > 0
    assert ours.rounds == expected.rounds
    for tokens in ours.tokens:
        assert len(set(tokens)) >= 20, f"too few distinct tokens to prove anything: {sorted(set(tokens))}"
    return ours


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim"),
    [(4, 4, 64), (4, 2, 64), (4, 1, 64), (2, 2, 128), (4, 2, 128), (4, 2, 96)],
    ids=lambda value: str(value),
)
def test_plain(model: ModelFactory, query_heads: int, kv_heads: int, head_dim: int) -> None:
    path = model(num_attention_heads=query_heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    check(path, prompts(6, 200))


def test_named_backend(model: ModelFactory) -> None:
    texts = prompts(6, 200)
    ours = run(model(), texts, backend="GATHER_FLASH_ATTN")
    assert ours.implementations == {IMPLEMENTATION}
    assert ours.gathers > 0
    assert ours.rounds == stock_run(model(), texts).rounds


def test_compiled(model: ModelFactory) -> None:
    texts = prompts(6, 200)
    ours = run(model(), texts, backend="CUSTOM", enforce_eager=False)
    assert ours.implementations == {IMPLEMENTATION}
    assert ours.gathers > 0
    assert ours.rounds == stock_run(model(), texts).rounds


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_run(model: ModelFactory, dtype: str) -> None:
    """Rounding moves the tokens of a random model soon; many first ones must stay those of float32."""
    texts = prompts(16, 200)
    ours = run(model(), texts, backend="CUSTOM", dtype=dtype, max_tokens=32)
    assert ours.implementations == {IMPLEMENTATION}
    exact = stock_run(model(), texts, max_tokens=32)
    first = [tokens[0] == expected[0] for tokens, expected in zip(ours.tokens, exact.tokens, strict=True)]
    assert sum(first) >= 8  # by chance it would be none
    # Where a prompt begins to repeat itself depends on how this CPU rounds.
    assert sum(len(set(tokens)) >= 16 for tokens in ours.tokens) >= 12


def test_prefix_cache_hits(model: ModelFactory) -> None:
    shared = prompts(1, 300, seed=7, shortest=300)[0]
    texts = [shared + tail for tail in prompts(6, 60, seed=8)]
    ours = check(model(), texts, rounds=2, block_size=32)
    assert ours.cached_tokens[1] >= 6 * 288


def test_chunked_prefill(model: ModelFactory) -> None:
    check(model(), prompts(6, 400, shortest=100), max_num_batched_tokens=48, max_num_seqs=8)


def test_chunked_prefill_of_shared_prefixes(model: ModelFactory) -> None:
    shared = prompts(1, 200, seed=3, shortest=200)[0]
    texts = [shared + tail for tail in prompts(8, 200, seed=4)]
    ours = check(model(), texts, rounds=2, block_size=32, max_num_batched_tokens=48, max_num_seqs=8)
    assert ours.cached_tokens[1] > 0


def test_many_requests(model: ModelFactory) -> None:
    check(model(), prompts(64, 200), max_num_seqs=64)


def test_preemption(model: ModelFactory) -> None:
    ours = check(model(), prompts(12, 250, shortest=150), num_gpu_blocks_override=24, block_size=64)
    assert ours.preemptions > 0


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(model: ModelFactory, block_size: int) -> None:
    # vLLM's own CPU backend takes no block of 16; tokens do not depend on the block size.
    texts = prompts(6, 200, seed=5)
    check(model(), texts, block_size=block_size, stock={"block_size": 32})


@pytest.mark.parametrize("budget", [None, 48], ids=["whole", "chunked"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_sliding_window(model: ModelFactory, block_size: int, budget: int | None) -> None:
    path = model("mistral", sliding_window=64)
    texts = prompts(6, 300, shortest=80)
    check(path, texts, block_size=block_size, **batching(budget), stock={"block_size": 64, **batching(budget)})


@pytest.mark.parametrize("hybrid", [True, False], ids=["window groups", "one group"])
@pytest.mark.parametrize("budget", [None, 48], ids=["whole", "chunked"])
def test_windowed_and_full_layers(model: ModelFactory, budget: int | None, hybrid: bool) -> None:
    # A scale of 1 makes attention sharp, and so the text varied, for q and k that this model normalises.
    layers = ["sliding_attention", "full_attention"] * 2
    path = model("gemma3_text", sliding_window=64, layer_types=layers, query_pre_attn_scalar=1)
    check(path, prompts(6, 300, shortest=80), **batching(budget), disable_hybrid_kv_cache_manager=not hybrid)


@pytest.mark.parametrize("budget", [None, 48], ids=["whole", "chunked"])
def test_soft_cap(model: ModelFactory, budget: int | None) -> None:
    path = model("gemma2", attn_logit_softcapping=20.0, sliding_window=64, query_pre_attn_scalar=64)
    check(path, prompts(6, 300, shortest=80), **batching(budget))


@pytest.mark.parametrize("budget", [None, 48], ids=["whole", "chunked"])
def test_alibi(model: ModelFactory, budget: int | None) -> None:
    path = model("bloom")
    check(path, prompts(6, 300, shortest=80), **batching(budget), repetition_penalty=1.5)


def test_small_workspace_splits_the_gather(model: ModelFactory) -> None:
    # 1 MiB holds 1024 tokens of this model, 12 requests of 300 to 464 take at least 4 gathers a layer.
    texts = prompts(12, 400, shortest=300)
    config = {"kda_plugin": {"gather_workspace_mib": 1}}
    one = run(model(), texts[:1], backend="CUSTOM", max_tokens=8)
    ours = check(model(), texts, additional_config=config, stock={})
    forwards_a_layer = one.gathers / (4 * 8)
    assert forwards_a_layer == 1
    assert ours.gathers >= 4 * 64 * 4
