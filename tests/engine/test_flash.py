"""The CUDA backend's classes, on the CPU: vLLM's own stay underneath, FlashAttention's kernels are torch."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends import flash_attn as stock
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker import workspace as vllm_workspace

from tests.support.flash import attention, flash_attn_varlen_func
from vllm_kda_plugin.attention import flash, flash_metadata
from vllm_kda_plugin.attention.flash import GatherFlashAttentionBackend, GatherFlashAttentionImpl
from vllm_kda_plugin.attention.flash_metadata import GatherFlashMetadata, GatherFlashMetadataBuilder
from vllm_kda_plugin.attention.planner import Planner
from vllm_kda_plugin.attention.stats import STATS
from vllm_kda_plugin.kernels import loader

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 128, 16
SETTINGS = {"kda_plugin": {"gather": "always", "gather_workspace_mib": 1}}
DECODES_AND_PREFILLS = [(40, 1), (9, 1), (300, 20), (0, 33), (17, 12)]


class Stock:
    """Stands for ``FlashAttentionImpl.forward``: reads the page table with the lengths of the device."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def forward(
        self,
        impl: Any,
        layer: Any,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        *scales: Any,
    ) -> torch.Tensor:
        assert scales in ((), (None, None))
        self.calls.append(metadata)
        if metadata is None:
            return output.fill_(0)
        starts = metadata.query_start_loc.tolist()
        assert starts[0] == 0
        assert starts[-1] <= metadata.num_actual_tokens
        assert metadata.max_query_len >= max(b - a for a, b in itertools.pairwise(starts))
        assert metadata.max_seq_len >= int(metadata.seq_lens.max())
        for row, length in enumerate(metadata.seq_lens.tolist()):
            blocks = metadata.block_table[row, : -(-length // BLOCK_SIZE)].long()
            packed = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]
            rows = slice(starts[row], starts[row + 1])
            output[rows], _ = attention(
                query[rows],
                packed[..., :HEAD_SIZE],
                packed[..., HEAD_SIZE:],
                scale=impl.scale,
                causal=metadata.causal,
                window=impl.sliding_window,
            )
        return output


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stock]:
    """An H200 that is none, with an engine's workspace."""
    standing_in = Stock()
    monkeypatch.setattr(stock, "get_flash_attn_version", lambda *_, **__: 3)
    monkeypatch.setattr(stock, "get_scheduler_metadata", lambda **asked: torch.arange(5), raising=False)
    monkeypatch.setattr(stock.FlashAttentionImpl, "dcp_world_size", 1, raising=False)
    monkeypatch.setattr(stock.FlashAttentionImpl, "forward", lambda impl, *args: standing_in.forward(impl, *args))
    monkeypatch.setattr(stock, "get_dcp_world_size_and_rank", lambda *_: (1, 0), raising=False)
    monkeypatch.setattr(stock, "get_num_attention_heads_from_layers", lambda *_: HEADS)
    monkeypatch.setattr(stock, "_get_sliding_window_configs", lambda _: set())
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    vllm_workspace.reset_workspace_manager()
    vllm_workspace.init_workspace_manager(torch.device("cpu"))
    yield standing_in
    vllm_workspace.reset_workspace_manager()


def make_impl(settings: dict[str, Any] = SETTINGS, **options: Any) -> GatherFlashAttentionImpl:
    given: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": HEAD_SIZE,
        "scale": HEAD_SIZE**-0.5,
        "num_kv_heads": KV_HEADS,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        **options,
    }
    with set_current_vllm_config(VllmConfig(additional_config=settings)):
        return GatherFlashAttentionImpl(**given)


def make_builder(settings: dict[str, Any] = SETTINGS, cls: Any = GatherFlashMetadataBuilder, **changed: Any) -> Any:
    layers = changed.pop("layers", {})
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, max_cudagraph_capture_size=8, static_forward_context=layers
    )
    config = SimpleNamespace(
        additional_config=settings,
        model_config=SimpleNamespace(
            rswa_window=changed.pop("rswa_window", None),
            is_mm_prefix_lm=changed.pop("mm_prefix", False),
            hf_config=SimpleNamespace(model_type="llama"),
            is_diffusion=False,
            max_model_len=changed.pop("max_model_len", 1024),
        ),
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            use_ubatching=changed.pop("microbatches", False),
        ),
        cache_config=SimpleNamespace(cache_dtype=changed.pop("cache_dtype", "auto")),
        compilation_config=compilation,
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=changed.pop("most_tokens", 512)),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        speculative_config=changed.pop("speculative", None),
        use_v2_model_runner=True,
    )
    assert not changed
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16)
    return cls(spec, [*layers, "gone"], config, torch.device("cpu"))


class Batch:
    """Requests of (cached, new) tokens; the host takes decodes to be longer than they are."""

    def __init__(self, lengths: list[tuple[int, int]]) -> None:
        generator = torch.Generator().manual_seed(3)
        new = torch.tensor([query for _, query in lengths])
        self.seq_lens = torch.tensor([sum(pair) for pair in lengths], dtype=torch.int32)
        self.starts = torch.cat((torch.zeros(1), new.cumsum(0))).int()
        pages = [-(-int(length) // BLOCK_SIZE) for length in self.seq_lens]
        free = (torch.randperm(sum(pages), generator=generator) + 1).tolist()
        self.kv_cache = torch.full((sum(pages) + 1, KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE), torch.nan).bfloat16()
        self.table = torch.full((len(lengths), max(pages) + 1), -1, dtype=torch.int32)
        total = int(self.starts[-1])
        shape = (total, KV_HEADS, HEAD_SIZE)
        self.query = torch.randn(total, HEADS, HEAD_SIZE, generator=generator).bfloat16()
        self.key = torch.randn(shape, generator=generator).bfloat16()
        self.value = torch.randn(shape, generator=generator).bfloat16()
        for row, (cached, query) in enumerate(lengths):
            mine = [free.pop() for _ in range(pages[row])]
            self.table[row, : pages[row]] = torch.tensor(mine, dtype=torch.int32)
            for position in range(cached + query):
                slot = self.kv_cache[mine[position // BLOCK_SIZE], :, position % BLOCK_SIZE]
                if position < cached:
                    slot.copy_(torch.randn(slot.shape, generator=generator))
                else:
                    at = int(self.starts[row]) + position - cached
                    slot.copy_(torch.cat([self.key[at], self.value[at]], dim=-1))

    def common(self, **changed: Any) -> CommonAttentionMetadata:
        queries = self.starts.diff()
        upper_bound = self.seq_lens + 2 * (queries == 1)
        given: dict[str, Any] = {
            "query_start_loc": self.starts,
            "query_start_loc_cpu": self.starts,
            "seq_lens": self.seq_lens,
            "num_reqs": len(self.seq_lens),
            "num_actual_tokens": int(self.starts[-1]),
            "max_query_len": int(queries.max()),
            "max_seq_len": int(upper_bound.max()),
            "block_table_tensor": self.table,
            "slot_mapping": torch.zeros(int(self.starts[-1]), dtype=torch.int64),
            "seq_lens_cpu_upper_bound": upper_bound,
            **changed,
        }
        return CommonAttentionMetadata(**given)


def forward(impl: GatherFlashAttentionImpl, batch: Batch, metadata: Any, **changed: Any) -> torch.Tensor:
    out = torch.full_like(batch.query, torch.nan)
    one = torch.tensor(1.0)
    layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
    key, value = changed.get("key", batch.key), changed.get("value", batch.value)
    got = impl.forward(layer, batch.query, key, value, batch.kv_cache, metadata, out)
    assert got is out
    return out


def expected(impl: GatherFlashAttentionImpl, batch: Batch, causal: bool = True) -> torch.Tensor:
    metadata = SimpleNamespace(
        query_start_loc=batch.starts,
        num_actual_tokens=len(batch.query),
        max_query_len=10**6,
        max_seq_len=10**6,
        seq_lens=batch.seq_lens,
        block_table=batch.table,
        causal=causal,
    )
    out = torch.empty_like(batch.query)
    return Stock().forward(impl, None, batch.query, None, None, batch.kv_cache, metadata, out)


def ways(before: tuple[int, int, int]) -> tuple[int, int, int]:
    now = (STATS.paged_calls, STATS.fresh_calls, STATS.gather_calls)
    return now[0] - before[0], now[1] - before[1], now[2] - before[2]


def counts() -> tuple[int, int, int]:
    return STATS.paged_calls, STATS.fresh_calls, STATS.gather_calls


# ---- What is split --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 24])
def test_a_mixed_batch(paged: Stock, window: int | None) -> None:
    impl, batch = make_impl(sliding_window=window), Batch(DECODES_AND_PREFILLS)
    metadata = make_builder().build(0, batch.common())
    before = counts()
    out = forward(impl, batch, metadata)
    torch.testing.assert_close(out, expected(impl, batch))
    assert ways(before) == (1, 1, 2)
    (part,) = paged.calls
    assert (part.num_actual_tokens, part.max_query_len) == (2, 1)
    assert part.seq_lens.tolist() == [41, 10]
    assert part.scheduler_metadata is not None


@pytest.mark.parametrize("lengths", [[(300, 20), (40, 1), (9, 1)], [(40, 1), (300, 20), (9, 1), (0, 33), (77, 1)]])
def test_decodes_need_not_come_first(paged: Stock, lengths: list[tuple[int, int]]) -> None:
    """Model runner V1 puts a request where another left."""
    impl, batch = make_impl(), Batch(lengths)
    out = forward(impl, batch, make_builder().build(0, batch.common()))
    torch.testing.assert_close(out, expected(impl, batch))
    assert sum(part.num_actual_tokens for part in paged.calls) == sum(query == 1 for _, query in lengths)


SPECULATIVE = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False)


@pytest.mark.parametrize("padded", [True, False])
def test_with_speculation_only_prefills_are_planned(paged: Stock, padded: bool) -> None:
    """A draft model's verification is one token longer than the target's, and of unknown length."""
    impl, batch = make_impl(), Batch([(40, 3), (60, 4), (300, 20), (10, 2)])
    unknown = torch.tensor([2, 3, 0, 0])
    builder = make_builder(speculative=SPECULATIVE)
    prefilling = torch.tensor([False, False, True, True] if padded else [False, False, True])
    common = batch.common(seq_lens_cpu_upper_bound=batch.seq_lens + unknown, is_prefilling=prefilling)
    before = counts()
    torch.testing.assert_close(forward(impl, batch, builder.build(0, common)), expected(impl, batch))
    assert ways(before) == (2, 0, 1)
    assert [part.max_query_len for part in paged.calls] == [4, 3]
    common = batch.common(seq_lens_cpu_upper_bound=batch.seq_lens + unknown)
    assert not isinstance(builder.build(0, common), GatherFlashMetadata)


def test_what_each_kind_of_layer_does_is_said_at_the_start(paged: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[int | None] = []
    monkeypatch.setattr(flash_metadata, "log_choice", lambda planner: said.append(planner.layer.window))
    impls = {"a": make_impl(), "b": make_impl(sliding_window=24), "c": make_impl()}
    layers = {name: SimpleNamespace(impl=impl) for name, impl in impls.items()} | {"other": SimpleNamespace()}
    make_builder(layers=layers)
    assert said == [None, 23]


def test_stock_steps_run_stocks_own_forward(paged: Stock) -> None:
    """With nothing of ours before it, and as soon as a step is planned with ours again, whoever built last."""
    impl = make_impl()
    layers = {"a": SimpleNamespace(impl=impl)}
    decodes, prefills = Batch([(20, 1), (3, 1)]), Batch(DECODES_AND_PREFILLS)
    builder = make_builder(layers=layers)

    def check(builder: Any, batch: Batch, plain: bool) -> None:
        metadata = builder.build(0, batch.common())
        assert ("forward" in vars(impl)) is plain
        before = counts()
        torch.testing.assert_close(forward(impl, batch, metadata), expected(impl, batch))
        assert (ways(before) == (0, 0, 0)) is plain

    check(builder, decodes, True)
    check(builder, prefills, False)
    check(builder, decodes, True)
    check(make_builder(layers=layers), prefills, False)
    make_builder(layers=layers, microbatches=True).build(0, decodes.common())
    assert "forward" not in vars(impl)


def test_a_step_whose_plan_comes_to_nothing_is_stock_before_its_layers_run(
    paged: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another kind of layer has one."""
    impls = {"a": make_impl(), "b": make_impl(sliding_window=24)}
    builder = make_builder(layers={name: SimpleNamespace(impl=impl) for name, impl in impls.items()})
    batch = Batch([(300, 20)])
    choose, before = Planner.choose, STATS.stock_steps

    def only_windows(planner: Planner, requests: Any) -> list[Any]:
        return ["paged"] * len(requests) if planner.layer.window is None else choose(planner, requests)

    monkeypatch.setattr(Planner, "choose", only_windows)
    metadata = builder.build(0, batch.common())
    assert isinstance(metadata, GatherFlashMetadata)
    assert not any("forward" in vars(impl) for impl in impls.values())
    monkeypatch.setattr(Planner, "choose", lambda planner, requests: ["paged"] * len(requests))
    metadata = builder.build(0, batch.common())
    assert type(metadata) is stock.FlashAttentionMetadata
    assert all("forward" in vars(impl) for impl in impls.values())
    assert STATS.stock_steps == before + 1
    torch.testing.assert_close(forward(impls["a"], batch, metadata), expected(impls["a"], batch))


def test_the_plan_is_made_once_for_layers_of_a_kind(paged: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(DECODES_AND_PREFILLS)
    metadata = make_builder().build(0, batch.common())
    assert isinstance(metadata, GatherFlashMetadata)
    assert metadata.host is not None
    for impl in (make_impl(), make_impl(), make_impl(sliding_window=24), make_impl()):
        torch.testing.assert_close(forward(impl, batch, metadata), expected(impl, batch))
    assert len(metadata.host.plans) == 2


def test_context_larger_than_the_workspace(paged: Stock) -> None:
    impl, batch = make_impl(), Batch([(2600, 40), (30, 20)])
    before = counts()
    out = forward(impl, batch, make_builder().build(0, batch.common()))
    torch.testing.assert_close(out, expected(impl, batch), atol=2e-2, rtol=2e-2)  # parts are rounded to 16 bits
    paged_calls, fresh, gathers = ways(before)
    assert (paged_calls, fresh) == (0, 1)
    assert gathers > 2


@pytest.mark.parametrize("shared", [True, False])
def test_another_layers_cache_is_gathered_whole(paged: Stock, shared: bool) -> None:
    impl = make_impl(kv_sharing_target_layer_name="other" if shared else None)
    batch = Batch([(0, 33), (0, 20)])
    metadata = make_builder().build(0, batch.common())
    wrong = torch.full_like(batch.key, torch.nan)
    given = {"key": wrong, "value": wrong} if shared else {"key": None, "value": None}
    before = counts()
    torch.testing.assert_close(forward(impl, batch, metadata, **given), expected(impl, batch))
    assert ways(before) == (0, 0, 2)


def test_first_prefills_read_no_cache(paged: Stock) -> None:
    impl, batch = make_impl(), Batch([(0, 33), (0, 20)])
    metadata = make_builder().build(0, batch.common())
    wanted = expected(impl, batch)
    batch.kv_cache.fill_(torch.nan)
    before = counts()
    torch.testing.assert_close(forward(impl, batch, metadata), wanted)
    assert ways(before) == (0, 2, 0)


def test_padded_requests_and_tokens(paged: Stock) -> None:
    """As model runner V1 has them, and a full CUDA graph."""
    impl, batch = make_impl(), Batch([(40, 1), (300, 20)])
    wanted = expected(impl, batch)
    common = batch.common(
        query_start_loc=torch.tensor([0, 1, 21, 21, 21], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 1, 21, 21, 21], dtype=torch.int32),
        seq_lens=torch.cat([batch.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        seq_lens_cpu_upper_bound=torch.cat([batch.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        num_reqs=4,
        num_actual_tokens=24,
        block_table_tensor=torch.cat([batch.table, torch.zeros_like(batch.table)]),
        slot_mapping=torch.zeros(24, dtype=torch.int64),
    )
    batch.query = torch.cat([batch.query, batch.query[:3]])
    batch.key, batch.value = torch.cat([batch.key, batch.key[:3]]), torch.cat([batch.value, batch.value[:3]])
    out = forward(impl, batch, make_builder().build(0, common))
    torch.testing.assert_close(out[:21], wanted)
    assert out[21:].isnan().all()


def test_another_block_table_is_another_plan(paged: Stock) -> None:
    """Groups of one kind share a step's metadata but for the table."""
    impl, batch = make_impl(), Batch(DECODES_AND_PREFILLS)
    builder = make_builder()
    first = builder.build(0, batch.common(block_table_tensor=torch.zeros_like(batch.table)))
    batch_of_zeros = Batch(DECODES_AND_PREFILLS)
    batch_of_zeros.kv_cache.fill_(1)
    forward(impl, batch_of_zeros, first)
    second = builder.update_block_table(first, batch.table, first.slot_mapping)
    torch.testing.assert_close(forward(impl, batch, second), expected(impl, batch))


# ---- What stays stock -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "why",
    ["decode", "not causal", "no lengths", "drafting", "capture", "subclass", "rswa", "mm prefix", "encoder", "never"],
)
def test_stock_takes_the_whole_step(paged: Stock, why: str) -> None:
    impl = make_impl(attn_type=AttentionType.ENCODER_DECODER) if why == "encoder" else make_impl()
    batch = Batch([(40, 1), (9, 1)] if why == "decode" else DECODES_AND_PREFILLS)
    settings = {"kda_plugin": {"gather": "never"}} if why == "never" else SETTINGS
    subclass = type("Sub", (GatherFlashMetadataBuilder,), {})
    builder = make_builder(
        settings,
        subclass if why == "subclass" else GatherFlashMetadataBuilder,
        rswa_window=64 if why == "rswa" else None,
        mm_prefix=why == "mm prefix",
    )
    changes: dict[str, dict[str, Any]] = {
        "not causal": {"causal": False},
        "no lengths": {"seq_lens_cpu_upper_bound": None},
    }
    common = batch.common(**changes.get(why, {}))
    if why == "capture":
        metadata = builder.build_for_cudagraph_capture(common)
    else:
        metadata = builder.build(0, common, fast_build=why == "drafting")
    before = counts()
    out = forward(impl, batch, metadata)
    torch.testing.assert_close(out, expected(impl, batch, causal=why != "not causal"))
    assert ways(before) == (1, 0, 0)
    assert paged.calls == [metadata]


def test_a_layer_of_another_flash_attention_stays_stock(paged: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "get_flash_attn_version", lambda *_, **__: 4)
    impl, batch = make_impl(), Batch(DECODES_AND_PREFILLS)
    assert impl.workspace_bytes == 0
    forward(impl, batch, make_builder().build(0, batch.common()))
    assert len(paged.calls) == 1


def test_full_graphs_keep_their_schedule(paged: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer that graphs read holds the whole step's schedule, not that of a part."""
    asked: list[int] = []

    def schedule(**arguments: Any) -> torch.Tensor:
        asked.append(arguments["batch_size"])
        return torch.full((5,), arguments["batch_size"], dtype=torch.int32)

    monkeypatch.setattr(stock, "get_scheduler_metadata", schedule, raising=False)
    impl, batch = make_impl(), Batch(DECODES_AND_PREFILLS)
    builder = make_builder()
    metadata = builder.build(0, batch.common())
    forward(impl, batch, metadata)
    assert asked == [5, 2]
    assert builder.scheduler_metadata[:5].tolist() == [5] * 5
    assert paged.calls[0].scheduler_metadata.tolist() == [2] * 5


# ---- The workspace --------------------------------------------------------------------------------------------------


def test_the_workspace_is_reserved_and_never_grows(paged: Stock) -> None:
    impl, batch = make_impl(), Batch([(2600, 40), (0, 512)])
    manager = vllm_workspace.current_workspace_manager()
    (reserved,) = manager._current_workspaces
    assert reserved is not None
    assert reserved.numel() == 1 << 20
    manager.lock()
    torch.testing.assert_close(
        forward(impl, batch, make_builder().build(0, batch.common())), expected(impl, batch), atol=2e-2, rtol=2e-2
    )
    assert manager._current_workspaces == [reserved]


def test_the_profiling_run_reserves(paged: Stock) -> None:
    impl, batch = make_impl(), Batch([(0, 33)])
    vllm_workspace.reset_workspace_manager()
    vllm_workspace.init_workspace_manager(torch.device("cpu"))
    assert forward(impl, batch, None).eq(0).all()
    assert vllm_workspace.current_workspace_manager()._current_workspaces[0].numel() == 1 << 20


def test_a_locked_workspace_without_room_means_stock(paged: Stock) -> None:
    impl, batch = make_impl(), Batch(DECODES_AND_PREFILLS)
    vllm_workspace.reset_workspace_manager()
    vllm_workspace.init_workspace_manager(torch.device("cpu"))
    vllm_workspace.lock_workspace()
    before = counts()
    torch.testing.assert_close(forward(impl, batch, make_builder().build(0, batch.common())), expected(impl, batch))
    assert ways(before) == (1, 0, 0)


def test_a_microbatch_that_reserved_nothing_is_stock(paged: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    impl, batch = make_impl(), Batch(DECODES_AND_PREFILLS)
    monkeypatch.setattr(flash, "dbo_current_ubatch_id", lambda: 1)
    for wanted in ((1, 0, 0), (1, 1, 2)):
        before = counts()
        metadata = make_builder().build(0, batch.common())
        torch.testing.assert_close(forward(impl, batch, metadata), expected(impl, batch))
        assert ways(before) == wanted
        forward(impl, batch, None)  # a profile run as that microbatch


def test_without_its_kernel_attention_is_stock(paged: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, device: int) -> None:
        raise loader.CuPyUnavailable("no CuPy")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(loader, "load", load)
    impl = make_impl({"kda_plugin": {"gather": "auto"}})
    assert impl.workspace_bytes == 0
    assert impl.supports_quant_query_input == make_impl({"kda_plugin": {"gather": "never"}}).supports_quant_query_input
    with pytest.raises(loader.KernelUnavailable):
        make_impl()  # always


def test_a_step_is_freed_with_its_metadata(paged: Stock) -> None:
    """Not when Python next looks for cycles: it holds memory of the GPU."""
    impl, batch = make_impl(), Batch(DECODES_AND_PREFILLS)
    metadata = make_builder().build(0, batch.common())
    forward(impl, batch, metadata)
    assert len(paged.calls) == 1
    paged.calls.clear()
    held = weakref.ref(metadata.host)
    gc.disable()
    try:
        del metadata
        assert held() is None
    finally:
        gc.enable()


def test_nothing_is_reserved_where_nothing_is_gathered(paged: Stock) -> None:
    make_impl({"kda_plugin": {"gather": "never"}})
    make_impl({}, head_size=96)
    make_impl(attn_type=AttentionType.ENCODER_ONLY)
    assert vllm_workspace.current_workspace_manager()._current_workspaces == [None]


# ---- What the backend says ------------------------------------------------------------------------------------------


def test_e5m2_runs_without_full_graphs(paged: Stock) -> None:
    assert GatherFlashAttentionBackend.supports_kv_cache_dtype("fp8_e5m2")
    assert GatherFlashAttentionBackend.get_builder_cls() is GatherFlashMetadataBuilder
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="fp8_e5m2"))
    assert GatherFlashMetadataBuilder.get_cudagraph_support(config, None) is AttentionCGSupport.NEVER
    config.cache_config.cache_dtype = "auto"
    wanted = stock.FlashAttentionMetadataBuilder.get_cudagraph_support(config, None)
    assert GatherFlashMetadataBuilder.get_cudagraph_support(config, None) is wanted


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"speculative": SPECULATIVE}, "with speculative decoding is not supported"),
        ({"microbatches": True}, "with microbatches is not supported"),
        ({"rswa_window": 64}, "is not supported for layers or parallelism whose batches are not planned by request"),
        ({"max_model_len": 100_000, "most_tokens": 2048}, "needs a larger kda_plugin.gather_workspace_mib than 1"),
    ],
)
def test_what_e5m2_cannot_do_is_refused_at_the_start(paged: Stock, changed: dict[str, Any], said: str) -> None:
    """There is no stock call to fall back to."""
    with pytest.raises(ValueError, match=f"^--kv-cache-dtype fp8_e5m2 {said}; use fp8_e4m3 or auto$"):
        make_builder(cache_dtype="fp8_e5m2", **changed)
    make_builder(cache_dtype="fp8_e5m2")
    with pytest.raises(ValueError, match="is read by gathering only"):
        make_impl(kv_cache_dtype="fp8_e5m2", attn_type=AttentionType.ENCODER_DECODER)


def test_fp8_queries_are_16_bit_but_for_the_stock_call(paged: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "flash_attn_supports_kv_cache_dtype", lambda *_, **__: True)
    quantized: list[int] = []

    def scaled_fp8_quant(
        input: torch.Tensor, scale: torch.Tensor, group_shape: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert input.dim() == 2
        assert group_shape is None
        quantized.append(len(input))
        return (input / scale).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr("vllm._custom_ops.scaled_fp8_quant", scaled_fp8_quant)
    assert make_impl({}, kv_cache_dtype="fp8").supports_quant_query_input  # not measured to be faster: all stock
    impl, batch = make_impl(kv_cache_dtype="fp8"), Batch(DECODES_AND_PREFILLS)
    assert impl.supports_quant_query_input is False  # so that the layer hands 16-bit queries over
    exact = batch.kv_cache.to(torch.float8_e4m3fn)
    batch.kv_cache = exact.to(torch.bfloat16)
    wanted = expected(impl, batch)
    batch.kv_cache = exact.view(torch.uint8)
    seen: list[torch.dtype] = []

    def forward_stock(impl: Any, layer: Any, query: torch.Tensor, *_: Any) -> None:
        assert impl.supports_quant_query_input
        seen.append(query.dtype)

    monkeypatch.setattr(stock.FlashAttentionImpl, "forward", forward_stock)
    metadata = make_builder(cache_dtype="fp8").build(0, batch.common())
    out = forward(impl, batch, metadata)
    assert (quantized, seen) == ([2], [torch.float8_e4m3fn])
    for gathered in (slice(2, 22), slice(55, 67)):
        torch.testing.assert_close(out[gathered], wanted[gathered])
    assert out[22:55].isfinite().all()  # the first prefill, whose own K and V are not rounded


def test_e5m2_decodes_are_gathered_too(paged: Stock) -> None:
    impl, batch = (
        make_impl({"kda_plugin": {"gather_workspace_mib": 8}}, kv_cache_dtype="fp8_e5m2"),
        Batch(DECODES_AND_PREFILLS),
    )
    assert impl.supports_quant_query_input is False
    exact = batch.kv_cache.to(torch.float8_e5m2)
    batch.kv_cache = exact.to(torch.bfloat16)
    for row, (a, b) in enumerate(itertools.pairwise(batch.starts.tolist())):
        length = int(batch.seq_lens[row])
        for at, position in zip(range(a, b), range(length - (b - a), length), strict=True):
            slot = batch.kv_cache[int(batch.table[row, position // BLOCK_SIZE]), :, position % BLOCK_SIZE]
            batch.key[at], batch.value[at] = slot.split(HEAD_SIZE, dim=-1)
    wanted = expected(impl, batch)
    batch.kv_cache = exact.view(torch.uint8)  # as vLLM has it
    builder = make_builder({"kda_plugin": {"gather_workspace_mib": 8}}, cache_dtype="fp8_e5m2")
    metadata = builder.build(0, batch.common(seq_lens_cpu_upper_bound=batch.seq_lens))
    before = counts()
    torch.testing.assert_close(forward(impl, batch, metadata), wanted)
    assert ways(before) == (0, 0, 1)
    decodes = Batch([(40, 1), (9, 1)])
    decodes.kv_cache = decodes.kv_cache.to(torch.float8_e5m2).view(torch.uint8)
    out = forward(impl, decodes, builder.build(0, decodes.common(seq_lens_cpu_upper_bound=decodes.seq_lens)))
    assert not out.isnan().any()
    assert paged.calls == []
