"""A step on CUDA: vLLM's own FlashAttention metadata, and the host numbers to do better than the stock call.

What vLLM 0.33 knows on the host, and how exact it is (``CommonAttentionMetadata`` in v1/attention/backend.py):

- ``query_start_loc_cpu`` is exact, but for verifications under adaptive verification: those are trimmed on the GPU,
  their sum and all that follows them in the batch are not.
- ``seq_lens_cpu_upper_bound`` is exact for prefills. For decodes under asynchronous speculative decoding it takes
  every draft as accepted. It may be None, where others than the model runners make a batch.
- ``num_actual_tokens`` and, with model runner V1 or in a full CUDA graph, ``num_reqs`` count padding, whose requests
  have no query tokens.
- A request of at most ``max_decode_query_len()`` query tokens may be a decode: nothing here relies on its numbers.
  With speculation a longer one may be, too: a draft model verifies one token more. So there ``is_prefilling`` must
  say that it is none; V1's microbatches and some drafters leave that out, V2's drafters say False for all.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any, cast

import numpy as np
import torch
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata, max_decode_query_len
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata, FlashAttentionMetadataBuilder

from vllm_kda_plugin.attention import planner as planning
from vllm_kda_plugin.attention.calls import Ready
from vllm_kda_plugin.attention.planner import Layer, Planner
from vllm_kda_plugin.attention.stats import STATS
from vllm_kda_plugin.attention.steps import Call, plan_step
from vllm_kda_plugin.config import PluginConfig

E5M2 = "fp8_e5m2"


def never_planned(vllm_config: VllmConfig) -> bool:
    """Whether every step of an engine is the stock call.

    Where GPUs share out a request's keys, where not all its keys are those before it, and where it must not attend
    differently because of its neighbours.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    return bool(
        parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1
        or envs.VLLM_BATCH_INVARIANT
        or (model is not None and (model.is_mm_prefix_lm or getattr(model, "rswa_window", None) is not None))
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """Layers that attend alike; compared by identity, which :func:`kind_of` makes sure of."""

    layer: Layer
    fa_version: int | None


@functools.cache
def kind_of(layer: Layer, fa_version: int | None) -> Kind:
    """The one object for layers of a kind."""
    return Kind(layer, fa_version)


@dataclasses.dataclass
class PlannedStep:
    """The calls of one step, for the layers of one kind."""

    paged: list[tuple[Call, FlashAttentionMetadata]]
    """Calls of the stock implementation, each with the part of the step that is its."""
    others: list[Call]
    numbers: torch.Tensor
    """int32, those of the step, on the GPU."""
    ready: list[Ready] | None = None
    """What the layers share for the other calls; the first of them makes it."""


@dataclasses.dataclass
class HostNumbers:
    """What the host knows of a step; its plans are shared by layers of a kind."""

    builder: GatherFlashMetadataBuilder
    common: CommonAttentionMetadata
    """As the model runner has it until the step's forward has run."""
    plans: dict[Kind, PlannedStep | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class GatherFlashMetadata(FlashAttentionMetadata):
    """A step that need not be one stock call."""

    host: HostNumbers | None = None

    def planned(self, kind: Kind) -> PlannedStep | None:
        """How layers of a kind attend in this step, None for the stock call."""
        host = self.host
        if host is None:
            return None
        if kind not in host.plans:
            host.plans[kind] = host.builder.plan(self, host, kind)
        return host.plans[kind]

    def settle(self) -> None:
        """Become stock metadata, which costs later layers nothing, if no kind of layer has a plan for the step."""
        host = self.host
        if host is None or (len(host.plans) == len(host.builder.planners) and not any(host.plans.values())):
            self.__dict__.pop("host", None)
            self.__class__ = FlashAttentionMetadata


class GatherFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """vLLM's builder; every batch it makes can also be run, or replayed in a CUDA graph, as the one stock call."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """As vLLM's; an e5m2 cache is always gathered, as the host plans it, so never in a full graph."""
        if vllm_config.cache_config.cache_dtype == E5M2:
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.config = PluginConfig.from_vllm(vllm_config)
        self.decode_tokens: int = max_decode_query_len(vllm_config)
        self.speculates = vllm_config.speculative_config is not None
        self.must_gather = vllm_config.cache_config.cache_dtype == E5M2
        self.planners: dict[Kind, Planner] = {}
        # vLLM subclasses builders for layers whose batches are not the step's: chunked-local attention, cross
        # attention, fast prefill of shared caches. Those stay stock, as does all that changes which keys are seen.
        self.plans_steps = (
            type(self) is GatherFlashMetadataBuilder
            and not never_planned(vllm_config)
            and kv_cache_spec.head_size_v == kv_cache_spec.head_size
            and kv_cache_spec.tokens_per_state == 1
        )
        if self.must_gather:
            self.aot_schedule = False  # there is no paged call to schedule
            self._check_e5m2(vllm_config, kv_cache_spec.block_size)
        calibration = None
        if self.config.gather == "auto":
            calibration = planning.for_gpu(torch.cuda.get_device_name(device), self.config.calibration)
        self.calibration = calibration
        # Steps of fewer pairs of query and key are mostly left alone, before anything is worked out for them.
        self.least_pairs = 0.0
        if self.config.gather != "always" and not self.must_gather:
            self.least_pairs = math.inf
            if calibration is not None:
                self.least_pairs = planning.waiting_pairs(calibration, self.num_heads_q, self.headdim)
        self._capturing = False
        self._stock = False
        layers = getattr(vllm_config.compilation_config, "static_forward_context", {})
        impls = [getattr(layers.get(name), "impl", None) for name in layer_names]
        self.impls: list[Any] = [impl for impl in impls if hasattr(impl, "leave_to_stock")]
        for impl in self.impls:
            impl.leave_to_stock(False)  # an earlier builder may have
        if self.plans_steps:  # say at the start what each kind of layer will do
            for impl in self.impls:
                self._planner(impl.kind(kv_cache_spec.block_size, True))
        if vllm_config.parallel_config.use_ubatching:
            self.impls = []  # shared with the other microbatch, whose step may be another

    def _check_e5m2(self, vllm_config: VllmConfig, page_size: int) -> None:
        """Refuse at the start what such a cache cannot do: there is no stock call to fall back to."""
        problem = ""
        if self.speculates:
            problem = "with speculative decoding is not supported"
        elif vllm_config.parallel_config.use_ubatching:
            problem = "with microbatches is not supported"
        elif not self.plans_steps:
            problem = "is not supported for layers or parallelism whose batches are not planned by request"
        else:
            layer = Layer(self.num_heads_q, self.num_heads_kv, self.headdim, page_size, fp8=True, must_gather=True)
            planner = Planner(layer, "never", None, self.config.gather_workspace_mib << 20)
            longest = vllm_config.model_config.max_model_len
            query = min(longest, vllm_config.scheduler_config.max_num_batched_tokens)
            if not planner.parts(query, longest - query).calls:
                problem = f"needs a larger kda_plugin.gather_workspace_mib than {self.config.gather_workspace_mib}"
        if problem:
            raise ValueError(f"--kv-cache-dtype {E5M2} {problem}; use fp8_e4m3 or auto")

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """As vLLM's, with the host's numbers where some request may gain from them."""
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        ours = not fast_build and self._may_gain(common_attn_metadata)
        if ours:
            # Becomes ours where it is: it has two dozen fields.
            stock.__class__ = GatherFlashMetadata
            planned = cast(GatherFlashMetadata, stock)
            planned.host = HostNumbers(self, common_attn_metadata)
            if self.planners and not self.must_gather:  # what comes to nothing is seen here, not by each layer
                for kind in self.planners:
                    planned.planned(kind)
                planned.settle()
            ours = type(stock) is GatherFlashMetadata
        STATS.stock_steps += not ours and not self._capturing
        self._leave_to_stock(not ours)
        return stock

    def _may_gain(self, common: CommonAttentionMetadata) -> bool:
        """Whether some request of a step may gain from the host's numbers: a look at the step as a whole."""
        if (
            not self.plans_steps
            or (self._capturing and not self.must_gather)
            or (common.max_query_len <= self.decode_tokens and not self.must_gather)
            or common.causal is not True
            or common.seq_lens_cpu_upper_bound is None
            or (self.speculates and common.is_prefilling is None)
        ):
            return False
        if common.num_reqs == 1 and self.planners:
            query = common.max_query_len
            context = common.max_seq_len - query
            return any(planner.may_gain(query, context) for planner in self.planners.values() if not planner.idle)
        return common.num_actual_tokens * common.max_seq_len >= self.least_pairs

    def _leave_to_stock(self, stock: bool) -> None:
        if stock is not self._stock:
            self._stock = stock
            for impl in self.impls:
                impl.leave_to_stock(stock)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashAttentionMetadata:
        """As vLLM's: what a graph replays is the one stock call, whatever the batch."""
        self._capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False

    def update_block_table(
        self, metadata: FlashAttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> FlashAttentionMetadata:
        """As vLLM's; what was planned with the other table is planned anew."""
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        planned = isinstance(updated, GatherFlashMetadata) and updated.host is not None
        self._leave_to_stock(not planned)
        if planned:
            updated.host = dataclasses.replace(updated.host, plans={})
        return updated

    def plan(self, stock: FlashAttentionMetadata, host: HostNumbers, kind: Kind) -> PlannedStep | None:
        """Cut a step into calls for layers of one kind; copies a few numbers to the GPU without waiting for it."""
        common = host.common
        prefilling = None
        if self.speculates:
            prefilling = np.zeros(common.num_reqs, dtype=bool)
            said = common.is_prefilling[: common.num_reqs].numpy()
            prefilling[: len(said)] = said  # may leave out padding
        step = plan_step(
            self._planner(kind),
            common.query_start_loc_cpu[: common.num_reqs + 1].numpy(),
            common.seq_lens_cpu_upper_bound[: common.num_reqs].numpy(),
            self.decode_tokens,
            common.max_query_len,
            prefilling,
        )
        if step is None:
            return None
        numbers = async_tensor_h2d(list(step.numbers) or [0], device=self.device, dtype=torch.int32)
        paged = [(call, self._paged(call, stock)) for call in step.calls if call.way == "paged"]
        return PlannedStep(paged, [call for call in step.calls if call.way != "paged"], numbers)

    def _planner(self, kind: Kind) -> Planner:
        if kind not in self.planners:
            # Measured with FlashAttention 3; ALiBi runs on 2.
            measured = self.calibration if kind.fa_version == 3 else None
            planner = Planner(kind.layer, self.config.gather, measured, self.config.gather_workspace_mib << 20)
            self.planners[kind] = planner
            log_choice(planner)
        return self.planners[kind]

    def _paged(self, call: Call, stock: FlashAttentionMetadata) -> FlashAttentionMetadata:
        """A part of a step as a step of its own."""
        requests = call.requests
        starts = stock.query_start_loc[requests.start : requests.stop + 1]
        if call.tokens.start:
            starts = starts - call.tokens.start
        part = copy.copy(stock)
        part.__class__ = FlashAttentionMetadata
        part.__dict__.pop("host", None)  # it would hold itself
        part.num_actual_tokens = call.tokens.stop - call.tokens.start
        part.max_query_len = call.max_query
        part.query_start_loc = starts
        part.max_seq_len = call.max_keys
        part.seq_lens = stock.seq_lens[requests]
        part.block_table = stock.block_table[requests]
        part.slot_mapping = stock.slot_mapping[call.tokens]
        # Not in the buffer that full CUDA graphs read: that one holds the schedule of the whole step.
        part.scheduler_metadata = self._get_scheduler_metadata(
            aot_schedule=stock.scheduler_metadata is not None,
            batch_size=requests.stop - requests.start,
            cu_query_lens=starts,
            max_query_len=call.max_query,
            seqlens=part.seq_lens,
            max_seq_len=call.max_keys,
            causal=stock.causal,
            max_num_splits=stock.max_num_splits,
        )
        return part


def log_choice(planner: Planner) -> None:
    """Say once what layers of a kind do."""
    from vllm.logger import init_logger

    layer = planner.layer
    seen = "all" if layer.window is None else f"{layer.window + 1:,} tokens"
    kind = (
        f"{layer.num_heads}/{layer.num_kv_heads} heads of {layer.head_size}, pages of {layer.page_size}, seeing {seen}"
    )
    if layer.must_gather:
        said = "e5m2 cache dequantised while gathering for every request, 16-bit queries"
    elif planner.idle:
        why = {"never": "gather = never"}.get(planner.mode, "not measured to be faster otherwise on this GPU")
        said = f"the stock call for every request ({why})"
    else:
        said = "prefills on fresh or gathered K and V" + (" where faster" if planner.mode == "auto" else "")
        said += ", fp8 cache dequantised while gathering, 16-bit queries" if layer.fp8 else ""
    init_logger("vllm.kda_plugin").info_once("Attention of %s: %s.", kind, said)
