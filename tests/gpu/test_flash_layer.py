# ruff: noqa: E402
"""One layer on the GPU: gathered and fresh attention against vLLM's own call on the same tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

vllm_config = pytest.importorskip("vllm.config")

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn as stock
from vllm.v1.attention.backends.fa_utils import is_fa_version_supported
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker import workspace as vllm_workspace

from vllm_kda_plugin.attention.stats import STATS

SETTINGS = {"kda_plugin": {"gather": "always", "gather_workspace_mib": 64}}
MIXED = [(4000, 1), (90, 1), (3000, 600), (0, 700), (1500, 40)]
DEVICE = "cuda"


@dataclasses.dataclass
class Shape:
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    page: int = 16


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A workspace, and no more of an engine."""
    monkeypatch.setattr(stock, "_get_sliding_window_configs", lambda _: set())
    vllm_workspace.reset_workspace_manager()
    vllm_workspace.init_workspace_manager(torch.device(DEVICE, 0))
    yield
    vllm_workspace.reset_workspace_manager()


def make_layer(shape: Shape, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Our implementation and builder for a layer."""
    from vllm_kda_plugin.attention.flash import GatherFlashAttentionImpl
    from vllm_kda_plugin.attention.flash_metadata import GatherFlashMetadataBuilder

    monkeypatch.setattr(stock, "get_num_attention_heads_from_layers", lambda *_: shape.heads)
    given = vllm_config.VllmConfig(additional_config=settings)
    with vllm_config.set_current_vllm_config(given), torch.device(DEVICE):  # as vLLM makes its layers
        impl = GatherFlashAttentionImpl(
            shape.heads,
            shape.head_size,
            shape.head_size**-0.5,
            shape.kv_heads,
            options.pop("alibi_slopes", None),
            options.pop("sliding_window", None),
            "auto",
            **options,
        )
    modes = vllm_config.CUDAGraphMode
    config: Any = SimpleNamespace(
        additional_config=settings,
        model_config=SimpleNamespace(
            rswa_window=None, is_mm_prefix_lm=False, hf_config=SimpleNamespace(model_type="llama"), is_diffusion=False
        ),
        parallel_config=SimpleNamespace(
            use_ubatching=False,
            cp_kv_cache_interleave_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=modes.PIECEWISE, max_cudagraph_capture_size=8),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=8192),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        speculative_config=None,
        use_v2_model_runner=True,
    )
    spec = FullAttentionSpec(
        block_size=shape.page, num_kv_heads=shape.kv_heads, head_size=shape.head_size, dtype=torch.bfloat16
    )
    builder = GatherFlashMetadataBuilder(spec, ["layer"], config, torch.device(DEVICE, 0))
    builder.aot_schedule = impl.vllm_flash_attn_version == 3  # FlashAttention 2, with ALiBi, refuses a schedule
    return impl, builder


def make_batch(shape: Shape, lengths: list[tuple[int, int]]) -> tuple[list[torch.Tensor], CommonAttentionMetadata]:
    """Query, key, value (slices of one tensor) and cache, NaN where no token is; and the step.

    But for pages that FlashAttention 3 reads whole, by TMA: it multiplies what no token is in by zero, stock too.
    """
    torch.manual_seed(0)
    new = torch.tensor([query for _, query in lengths], dtype=torch.int32)
    seq_lens = torch.tensor([sum(pair) for pair in lengths], dtype=torch.int32)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), new.cumsum(0).int()))
    total = int(starts[-1])
    heads = shape.heads + 2 * shape.kv_heads
    qkv = torch.randn(total, heads, shape.head_size, device=DEVICE).bfloat16()
    query, key, value = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    pages = [-(-int(length) // shape.page) for length in seq_lens]
    free = (torch.randperm(sum(pages)) + 1).tolist()
    cache = torch.full(
        (sum(pages) + 1, shape.page, shape.kv_heads, 2 * shape.head_size),
        0.0 if shape.page == 128 else torch.nan,
        device=DEVICE,
    ).bfloat16()
    table = torch.full((len(lengths), max(pages) + 1), -1, dtype=torch.int32)
    slots = []
    for row, (cached, queries) in enumerate(lengths):
        mine = torch.tensor([free.pop() for _ in range(pages[row])])
        table[row, : pages[row]] = mine.int()
        position = torch.arange(cached + queries)
        slot = mine[position // shape.page] * shape.page + position % shape.page
        cache.flatten(0, 1)[slot[:cached].to(DEVICE)] = torch.randn(
            cached, shape.kv_heads, 2 * shape.head_size, device=DEVICE
        ).bfloat16()
        slots.append(slot[cached:])
    slot_mapping = torch.cat(slots).to(DEVICE)
    cache.flatten(0, 1)[slot_mapping] = torch.cat([key, value], dim=-1)
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(DEVICE),
        num_reqs=len(lengths),
        num_actual_tokens=total,
        max_query_len=int(new.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=table.to(DEVICE),
        slot_mapping=slot_mapping,
        seq_lens_cpu_upper_bound=seq_lens,
    )
    return [query, key, value, cache.transpose(1, 2)], common


def compare(
    shape: Shape,
    lengths: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any] = SETTINGS,
    **options: Any,
) -> None:
    """Ours may differ from stock by no more than twice what stock differs from itself with one split."""
    impl, builder = make_layer(shape, settings, monkeypatch, **options)
    (query, key, value, cache), common = make_batch(shape, lengths)
    one = torch.ones((), device=DEVICE)
    layer: Any = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
    buffer = vllm_workspace.current_workspace_manager()._current_workspaces[0]
    if buffer is not None:
        buffer.fill_(0xFF)  # NaN

    def run(metadata: Any, forward: Any) -> torch.Tensor:
        out = torch.full_like(query, torch.nan)
        forward(layer, query, key, value, cache, metadata, out)
        return out.float()

    whole = super(type(builder), builder).build(0, common)
    wanted = run(whole, super(type(impl), impl).forward)
    one_split = run(
        dataclasses.replace(whole, max_num_splits=1, scheduler_metadata=None), super(type(impl), impl).forward
    )
    before = STATS.gather_calls + STATS.fresh_calls
    metadata = builder.build(0, common)
    run(metadata, impl.forward)  # loads the kernel, which may wait for the GPU
    metadata = builder.build(0, common)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run(metadata, impl.forward)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert STATS.gather_calls + STATS.fresh_calls > before
    allowed = max(2 * float((wanted - one_split).abs().max()), 2.0**-7 * float(wanted.abs().max()))
    assert float((got - wanted).abs().max()) <= allowed


@pytest.mark.parametrize("page", [16, 64, 128, 528])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(32, 8, 128), (8, 1, 128), (16, 16, 128), (32, 8, 64), (16, 4, 256)]
)
def test_as_stock(heads: int, kv_heads: int, head_size: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Shape(heads, kv_heads, head_size, page), MIXED, monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 512},
        {"logits_soft_cap": 30.0},
        {"alibi_slopes": [2.0**-i for i in range(32)]},
        {"sinks": True},
    ],
    ids=["window", "soft cap", "ALiBi", "sinks"],
)
@pytest.mark.parametrize("mib", [64, 8])
def test_features(options: dict[str, Any], mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8 MiB the context of 3,000 tokens comes in parts, but with a window or ALiBi."""
    if "alibi_slopes" in options and not is_fa_version_supported(2):
        pytest.skip("no FlashAttention 2, which ALiBi needs")
    given = {**options, **({"sinks": torch.randn(32, device=DEVICE).bfloat16()} if "sinks" in options else {})}
    settings = {"kda_plugin": {"gather": "always", "gather_workspace_mib": mib}}
    compare(Shape(), MIXED, monkeypatch, settings, **given)


@pytest.mark.parametrize("order", [[2, 0, 1], [0, 2, 1, 3], [3, 0, 4, 1, 2]])
def test_decodes_anywhere(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compare(Shape(), [MIXED[i] for i in order], monkeypatch)


def test_a_neighbours_nan_stays_with_the_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 3 loads whole tiles, and 0 times NaN is NaN."""
    shape, lengths = Shape(), [(0, 700), (3000, 600), (0, 130)]
    impl, builder = make_layer(shape, SETTINGS, monkeypatch)
    (query, key, value, cache), common = make_batch(shape, lengths)
    value[700:1300] = torch.nan
    cache.transpose(1, 2).flatten(0, 1)[common.slot_mapping[700:1300], :, shape.head_size :] = torch.nan
    one = torch.ones((), device=DEVICE)
    layer: Any = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
    out = torch.zeros_like(query)
    before = STATS.gather_calls + STATS.fresh_calls
    impl.forward(layer, query, key, value, cache, builder.build(0, common), out)
    assert STATS.gather_calls + STATS.fresh_calls == before + 3
    assert out[700:1300].isnan().any()
    assert out[:700].isfinite().all()
    assert out[1300:].isfinite().all()
