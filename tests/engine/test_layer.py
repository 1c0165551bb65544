"""One layer, without the engine: KV layouts and batches that a small model never makes."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, FullAttentionSpec
from vllm.v1.worker import workspace as vllm_workspace

from vllm_kda_plugin.attention import workspace
from vllm_kda_plugin.attention.backend import GatherTorchBackend
from vllm_kda_plugin.attention.impl import GatherTorchImpl
from vllm_kda_plugin.attention.metadata import GatherMetadataBuilder
from vllm_kda_plugin.attention.stats import STATS

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 16, 8, 64


@pytest.fixture(autouse=True)
def engine_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    # As the CPU model runner does before any layer is made.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    vllm_workspace.reset_workspace_manager()
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config
    vllm_workspace.reset_workspace_manager()


Layout = Callable[[], torch.Tensor]


def token_major() -> torch.Tensor:
    return torch.empty(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE).permute(0, 2, 1, 3)


def head_major() -> torch.Tensor:
    return torch.empty(NUM_BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)


def padded_pages() -> torch.Tensor:
    page = BLOCK_SIZE * KV_HEADS * 2 * HEAD_SIZE
    flat = torch.empty(NUM_BLOCKS, page + 24)[:, :page]
    return flat.unflatten(1, (BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE)).permute(0, 2, 1, 3)


def cross_layer() -> torch.Tensor:
    return torch.empty(NUM_BLOCKS, 3, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)[:, 1]


def heads_outside() -> torch.Tensor:
    return torch.empty(KV_HEADS, NUM_BLOCKS, BLOCK_SIZE, 2 * HEAD_SIZE).permute(1, 0, 2, 3)


LAYOUTS = [token_major, head_major, padded_pages, cross_layer, heads_outside]


class Batch:
    """Requests of given cached and new tokens, their K and V, and a cache that holds the cached part."""

    def __init__(
        self, lengths: list[tuple[int, int]], kv_cache: torch.Tensor, cache_dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        self.lengths = lengths
        total = [cached + new for cached, new in lengths]
        self.keys = [torch.randn(n, KV_HEADS, HEAD_SIZE, generator=generator) for n in total]
        self.values = [torch.randn(n, KV_HEADS, HEAD_SIZE, generator=generator) for n in total]
        self.query = torch.randn(sum(new for _, new in lengths), HEADS, HEAD_SIZE, generator=generator)
        self.kv_cache = kv_cache.to(cache_dtype) if cache_dtype != kv_cache.dtype else kv_cache
        self.kv_cache.fill_(float("nan"))  # rows of nobody, and of earlier owners
        blocks = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()  # 0 is the null block
        width = max(-(-n // BLOCK_SIZE) for n in total) + 2
        self.table = torch.full((len(lengths), width), -1, dtype=torch.int32)
        slots = []
        for i, n in enumerate(total):
            needed = -(-n // BLOCK_SIZE)
            self.table[i, :needed] = torch.tensor([blocks.pop() for _ in range(needed)], dtype=torch.int32)
            position = torch.arange(n)
            slots.append(self.table[i].long()[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        for (cached, _), key, value, slot in zip(lengths, self.keys, self.values, slots, strict=True):
            for t in range(cached):
                row = self.kv_cache[int(slot[t]) // BLOCK_SIZE, :, int(slot[t]) % BLOCK_SIZE]
                row[:, :HEAD_SIZE], row[:, HEAD_SIZE:] = key[t], value[t]
        self.slot_mapping = torch.cat([slot[cached:] for (cached, _), slot in zip(lengths, slots, strict=True)])
        self.new_keys = torch.cat([key[cached:] for (cached, _), key in zip(lengths, self.keys, strict=True)])
        self.new_values = torch.cat([value[cached:] for (cached, _), value in zip(lengths, self.values, strict=True)])

    def common(self, causal: Any = True) -> CommonAttentionMetadata:
        new = torch.tensor([n for _, n in self.lengths], dtype=torch.int32)
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), new.cumsum(0).int()))
        seq_lens = torch.tensor([sum(pair) for pair in self.lengths], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            num_reqs=len(self.lengths),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(new.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.table,
            slot_mapping=self.slot_mapping,
            causal=causal,
        )

    def expected(self, causal: list[bool], window: int | None = None) -> torch.Tensor:
        """Attention in float64 on the K and V as they were made, never through a cache."""
        outs = []
        row = 0
        for (cached, new), key, value, is_causal in zip(self.lengths, self.keys, self.values, causal, strict=True):
            query = self.query[row : row + new].double()
            row += new
            logits = torch.einsum("qhd,khd->hqk", query, key.double().repeat_interleave(HEADS // KV_HEADS, 1)) * 0.25
            position = torch.arange(cached, cached + new)[:, None]
            distance = torch.arange(cached + new)[None] - position
            if is_causal:
                logits = logits.masked_fill(distance > 0, float("-inf"))
            if window is not None:
                logits = logits.masked_fill((distance <= -window) | (distance > 0), float("-inf"))
            repeated = value.double().repeat_interleave(HEADS // KV_HEADS, 1)
            outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), repeated))
        return torch.cat(outs)


def make_builder(config: VllmConfig, spec: Any, window: int | None = None) -> GatherMetadataBuilder:
    from vllm.model_executor.layers.attention import Attention

    layer = object.__new__(Attention)
    object.__setattr__(layer, "sliding_window", window)
    config.compilation_config.static_forward_context = {"layer": layer}
    return GatherMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def make_impl(**settings: Any) -> GatherTorchImpl:
    return GatherTorchImpl(HEADS, HEAD_SIZE, 0.25, KV_HEADS, **settings)


FULL = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
LAYER: Any = types.SimpleNamespace()
MIXED = [(0, 5), (17, 1), (30, 12), (0, 1), (8, 8), (63, 1), (40, 33)]


def run(
    config: VllmConfig,
    batch: Batch,
    *,
    causal: Any = True,
    window: int | None = None,
    impl: GatherTorchImpl | None = None,
) -> torch.Tensor:
    builder = make_builder(config, FULL, window)
    impl = impl or make_impl(sliding_window=window)
    metadata = builder.build(0, batch.common(causal))
    impl.do_kv_cache_update(LAYER, batch.new_keys, batch.new_values, batch.kv_cache, batch.slot_mapping)
    out = torch.full_like(batch.query, float("nan"))
    # Sharing layers pass no key, and must not need one.
    impl.forward(LAYER, batch.query, None, None, batch.kv_cache, metadata, out)
    return out


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert (out.double() - expected).norm() / expected.norm() < tolerance


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 1, 7, 20])
def test_layouts(engine_config: VllmConfig, layout: Layout, window: int | None) -> None:
    batch = Batch(MIXED, layout())
    before = STATS.gathers
    out = run(engine_config, batch, window=window)
    assert_close(out, batch.expected([True] * len(MIXED), window))
    assert STATS.gathers == before + 1


def test_bidirectional_and_mixed_causality(engine_config: VllmConfig) -> None:
    batch = Batch(MIXED, token_major())
    assert_close(run(engine_config, batch, causal=False), batch.expected([False] * len(MIXED)))
    # A window of a decoder never looks ahead, as in vLLM's FlashAttention backend.
    batch = Batch(MIXED, token_major())
    assert_close(run(engine_config, batch, causal=False, window=7), batch.expected([False] * len(MIXED), 7))
    flags = [i % 2 == 0 for i in range(len(MIXED))]
    batch = Batch(MIXED, token_major())
    assert_close(run(engine_config, batch, causal=torch.tensor(flags)), batch.expected(flags))


def test_padding(engine_config: VllmConfig) -> None:
    """Requests without queries, slots of -1, and rows of query and output behind the real ones."""
    batch = Batch([(0, 5), (9, 4), (0, 0), (0, 0)], token_major())
    expected = batch.expected([True] * 4)
    batch.query = torch.cat((batch.query, torch.full((3, HEADS, HEAD_SIZE), float("nan"))))
    batch.new_keys = torch.cat((batch.new_keys, torch.full((3, KV_HEADS, HEAD_SIZE), 7.0)))
    batch.new_values = torch.cat((batch.new_values, torch.full((3, KV_HEADS, HEAD_SIZE), 7.0)))
    batch.slot_mapping = torch.cat((batch.slot_mapping, torch.full((3,), -1)))
    out = run(engine_config, batch)
    assert_close(out[:9], expected)
    assert out[9:].isnan().all()
    assert not (batch.kv_cache == 7.0).any(), "a slot of -1 is no slot"


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16])
def test_cache_of_another_dtype(engine_config: VllmConfig, cache_dtype: torch.dtype) -> None:
    batch = Batch(MIXED, token_major(), cache_dtype)
    assert_close(run(engine_config, batch), batch.expected([True] * len(MIXED)), tolerance=1e-2)


def test_small_workspace_takes_several_gathers(engine_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = KV_HEADS * 2 * HEAD_SIZE * 4
    monkeypatch.setattr("vllm_kda_plugin.attention.workspace.budget_bytes", lambda config: 40 * row_bytes)
    batch = Batch(MIXED, token_major())
    before = STATS.gathers, STATS.gathered_tokens, STATS.gathered_bytes
    assert_close(run(engine_config, batch), batch.expected([True] * len(MIXED)))
    tokens = sum(cached + new for cached, new in MIXED)
    # In order, 40 tokens at most each: 5+18, 42, 1+16, 64, 73.
    assert (STATS.gathers - before[0], STATS.gathered_tokens - before[1]) == (5, tokens)
    assert STATS.gathered_bytes - before[2] == tokens * row_bytes


def test_requests_that_just_fit_are_one_gather(engine_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    row_bytes = KV_HEADS * 2 * HEAD_SIZE * 4
    for room, gathers in ((39, 2), (40, 1)):
        monkeypatch.setattr("vllm_kda_plugin.attention.workspace.budget_bytes", lambda config, r=room: r * row_bytes)
        batch = Batch([(12, 3), (24, 1)], token_major())
        before = STATS.gathers
        assert_close(run(engine_config, batch), batch.expected([True] * 2))
        assert STATS.gathers - before == gathers


def test_window_gathers_only_what_it_sees(engine_config: VllmConfig) -> None:
    batch = Batch([(60, 2)], token_major())
    before = STATS.gathered_tokens
    run(engine_config, batch, window=10)
    assert STATS.gathered_tokens - before == 11  # positions 51 to 61


def test_encoder_only(engine_config: VllmConfig) -> None:
    batch = Batch([(0, 5), (0, 1), (0, 30)], token_major())
    spec = EncoderOnlyAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.float32
    )
    impl = make_impl(attn_type=AttentionType.ENCODER_ONLY)
    metadata = make_builder(engine_config, spec).build(0, batch.common(False))
    out = torch.full_like(batch.query, float("nan"))
    impl.forward(LAYER, batch.query, batch.new_keys, batch.new_values, torch.empty(0), metadata, out)
    assert_close(out, batch.expected([False] * 3))


def test_profiling_run_gives_zeros() -> None:
    out = torch.full((3, HEADS, HEAD_SIZE), float("nan"))
    query = torch.randn_like(out)
    make_impl().forward(LAYER, query, query, query, torch.empty(0), None, out)
    assert torch.equal(out, torch.zeros_like(out))


def test_wrong_sinks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sinks must have shape \(4,\).*found \(3,\)"):
        make_impl(sinks=torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
    ],
    ids=lambda value: str(value),
)
def test_refusals_have_a_reason(change: dict[str, Any], reason: str) -> None:
    settings: dict[str, Any] = {
        "head_size": 72,
        "dtype": torch.float32,
        "kv_cache_dtype": "auto",
        "block_size": 48,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": None,
        "attn_type": AttentionType.DECODER,
        "has_sliding_window": True,
        "use_non_causal": True,
    }
    assert GatherTorchBackend.validate_configuration(**settings) == []
    (told,) = GatherTorchBackend.validate_configuration(**{**settings, **change})
    assert told.startswith(reason)


def test_workspace_holds_the_longest_request_from_the_start(engine_config: VllmConfig) -> None:
    engine_config.additional_config = {"kda_plugin": {"gather_workspace_mib": 1}}
    engine_config.model_config = types.SimpleNamespace(max_model_len=20_000)
    make_impl()
    manager = vllm_workspace.current_workspace_manager()
    manager.lock()  # from here on it cannot grow
    assert workspace.kv_slice(20_000, KV_HEADS, HEAD_SIZE, torch.float32).shape == (20_000, KV_HEADS, 2 * HEAD_SIZE)


def test_workspace_beyond_memory_names_the_setting(engine_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MemoryError, match=r"kda_plugin.gather_workspace_mib \(now 256\)"):
        make_impl()
