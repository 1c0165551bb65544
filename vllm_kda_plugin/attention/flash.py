"""The backend on CUDA: vLLM's FlashAttention backend, with prefills on contiguous K and V.

Whatever is not gathered or attended fresh goes to vLLM's own implementation, unchanged.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.worker.ubatching import dbo_current_ubatch_id
from vllm.v1.worker.workspace import (
    current_workspace_manager,
    init_workspace_manager,
    is_workspace_manager_initialized,
)

from vllm_kda_plugin.attention import planner as planning
from vllm_kda_plugin.attention.calls import Contiguous
from vllm_kda_plugin.attention.flash_metadata import (
    E5M2,
    GatherFlashMetadata,
    GatherFlashMetadataBuilder,
    Kind,
    PlannedStep,
    kind_of,
    never_planned,
)
from vllm_kda_plugin.attention.planner import Layer
from vllm_kda_plugin.attention.stats import STATS, reporter
from vllm_kda_plugin.config import PluginConfig
from vllm_kda_plugin.kernels import loader
from vllm_kda_plugin.kernels.gather import gather_paged_kv
from vllm_kda_plugin.kernels.gather_plan import KERNEL

logger = init_logger("vllm.kda_plugin")

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


class GatherFlashAttentionImpl(FlashAttentionImpl):
    """vLLM's implementation; replays of a full CUDA graph do not pass here and are not counted."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # vLLM refuses e5m2, which its kernels cannot read; here they never do.
        stock_dtype = "auto" if kv_cache_dtype == E5M2 else kv_cache_dtype
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, stock_dtype, *args, **kwargs
        )
        self.kv_cache_dtype = kv_cache_dtype
        config = PluginConfig.from_vllm(get_current_vllm_config())
        self.reporter = reporter(config.log_stats)
        self.fp8 = _FP8.get(kv_cache_dtype)
        self.must_gather = kv_cache_dtype == E5M2
        may_gather = self._may_gather(config) and self._has_kernel(config)
        if self.must_gather and not may_gather:
            raise ValueError(
                f"--kv-cache-dtype {E5M2} is read by gathering only, which this layer, GPU or parallelism does not "
                "allow; use fp8_e4m3 or auto"
            )
        self.workspace_bytes = config.gather_workspace_mib << 20 if may_gather else 0
        # 16-bit queries are quantised here, for the stock call only; the layer asks this once, when it is made.
        self.quantizes_queries = may_gather and self.fp8 is not None and not self.must_gather
        if may_gather and self.fp8 is not None:
            self.supports_quant_query_input = False
        self._kinds: dict[tuple[int, bool], Kind] = {}
        self._reserved_by: set[int] = set()
        self._reserve()

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM's, see ``FlashAttentionImpl.forward``; ``key`` and ``value`` may be None."""
        # Runs eagerly once a layer and step: Python's microseconds count here.
        STATS.implementation = IMPLEMENTATION
        STATS.forwards += 1
        if self.reporter.periodic:
            self.reporter.tick()
        if attn_metadata is None:
            self._reserve()
        else:
            ours = type(attn_metadata) is GatherFlashMetadata and self.workspace_bytes
            if ours and output_scale is None and query.dtype != self.fp8:
                kind = self.kind(kv_cache.shape[2], key is not None)
                planned = attn_metadata.planned(kind)
                if planned is not None and self._prepared(planned, kind, attn_metadata, query, output):
                    self._run(planned, layer, query, key, value, kv_cache, output)
                    return output
                attn_metadata.settle()
            if self.must_gather:
                raise NotImplementedError(
                    f"--kv-cache-dtype {E5M2} is read by gathering only, which this batch or layer does not allow; "
                    "use fp8_e4m3 or auto"
                )
            STATS.paged_calls += 1
            if self.quantizes_queries:
                query = self._for_stock(layer, query)
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )

    def leave_to_stock(self, stock: bool) -> None:
        """Let ``forward`` be vLLM's own until told otherwise: in a short step our lines before it are seen.

        Either gives the right result for any step; the builder says before each which is the faster.
        """
        if not stock:
            self.__dict__.pop("forward", None)
        elif not (self.must_gather or self.quantizes_queries or self.reporter.periodic):
            self.__dict__["forward"] = super().forward

    def _run(
        self,
        planned: PlannedStep,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        for call, part in planned.paged:
            STATS.paged_calls += 1
            queries = query[call.tokens]
            if self.quantizes_queries:
                queries = self._for_stock(layer, queries)
            # Key and value are not read: the cache has them.
            super().forward(layer, queries, key, value, kv_cache, part, output[call.tokens])
        if not planned.ready:
            return
        cache = kv_cache.transpose(1, 2)
        scales: tuple[torch.Tensor, ...] = ()
        if self.fp8 is not None:
            cache = cache.view(self.fp8)
            scales = layer._k_scale.reshape(-1), layer._v_scale.reshape(-1)
        if self.num_kv_heads == 1 and key is not None and value is not None:
            # The stride of the one head may be anything, which bulk copies do not take; stock does it to the cache.
            key, value = canonicalize_singleton_dim_strides(key), canonicalize_singleton_dim_strides(value)
        self.contiguous.run(planned.ready, query, key, value, cache, output, *scales)

    def _prepared(
        self,
        planned: PlannedStep,
        kind: Kind,
        metadata: GatherFlashMetadata,
        query: torch.Tensor,
        output: torch.Tensor,
    ) -> bool:
        """Make what a kind's layers share in a step; False, and the step is stock, where the workspace has no room."""
        if planned.ready is None:
            # Nothing grows while the engine serves. A microbatch has a workspace of its own, which took part in
            # profiling or is not there.
            try:
                if dbo_current_ubatch_id() in self._reserved_by:
                    planned.ready = self.contiguous.prepare(
                        planned.others,
                        planned.numbers,
                        metadata.block_table,
                        self.head_size,
                        query.dtype,
                        output.dtype,
                        current_workspace_manager().get_simultaneous,
                    )
            except AssertionError:  # the manager's word for locked and too small
                planned.ready = None
            if planned.ready is None:
                assert metadata.host is not None
                metadata.host.plans[kind] = None
        return planned.ready is not None

    @functools.cached_property
    def contiguous(self) -> Contiguous:
        """Attention of this layer on contiguous K and V."""
        # Looked up when needed: there is no such function where FlashAttention is not.
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        return Contiguous(
            flash=flash_attn_varlen_func,
            gather=gather_paged_kv,
            merge=merge_attn_states,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            options={
                "softmax_scale": self.scale,
                "softcap": self.logits_soft_cap,
                "fa_version": self.vllm_flash_attn_version,
                "num_splits": 0,
            },
            window=list(self.sliding_window),
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
        )

    def kind(self, page_size: int, has_key: bool) -> Kind:
        """What about this layer its time depends on.

        Args:
            page_size: tokens in a block of its cache.
            has_key: whether it is given the step's own K and V.
        """
        kind = self._kinds.get((page_size, has_key))
        if kind is None:
            layer = Layer(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                page_size=page_size,
                fp8=self.fp8 is not None,
                window=self.sliding_window[0] if self.sliding_window[0] >= 0 else None,
                # A layer that shares another's cache attends to that one's keys, not to its own.
                can_fresh=has_key and self.kv_sharing_target_layer_name is None,
                can_chunk=self.alibi_slopes is None,
                must_gather=self.must_gather,
            )
            kind = self._kinds[page_size, has_key] = kind_of(layer, self.vllm_flash_attn_version)
        return kind

    def _may_gather(self, config: PluginConfig) -> bool:
        """Whether some batch may be gathered or attended fresh, so that memory must be there for it."""
        supported = self.attn_type == AttentionType.DECODER and self.vllm_flash_attn_version in (2, 3)
        supported = supported and not never_planned(get_current_vllm_config())
        if not supported or self.must_gather:
            return supported
        if config.gather != "auto" or self.vllm_flash_attn_version != 3:
            return config.gather == "always"
        calibration = planning.for_gpu(torch.cuda.get_device_name(), config.calibration)
        cache = "16-bit" if self.fp8 is None else "fp8"
        rates = () if calibration is None else calibration.rates
        return any(
            (rate.head_size, rate.cache) == (self.head_size, cache) and max(rate.paged_penalty, rate.fresh_penalty) > 0
            for rate in rates
        )

    def _has_kernel(self, config: PluginConfig) -> bool:
        """Load the gather's kernel now, not in the middle of a request; without it all is stock, or refused."""
        if not torch.cuda.is_available():  # tests on a CPU, where torch gathers
            return True
        try:
            loader.load(KERNEL, torch.cuda.current_device())
        except loader.KernelUnavailable as error:
            if self.must_gather or config.gather == "always":
                raise
            logger.warning_once("Attention stays stock on this GPU, the gather's kernel cannot be loaded: %s", error)
            return False
        return True

    def _for_stock(self, layer: Any, query: torch.Tensor) -> torch.Tensor:
        """The queries as the stock call takes them: fp8 where the cache is."""
        self.supports_quant_query_input = True  # read by the stock call, which then takes the queries' scale
        if query.dtype == self.fp8:
            return query
        from vllm import _custom_ops as ops

        per_head = layer._q_scale.numel() > 1  # as vLLM's attention layer has it: of the query heads of a KV head
        group = (-1, self.head_size * self.num_queries_per_kv) if per_head else None
        quantized, _ = ops.scaled_fp8_quant(query.flatten(1), layer._q_scale, group_shape=group)
        return quantized.view(query.shape)

    def _reserve(self) -> None:
        """Have the engine's workspace hold all that a gather may fill: when a layer is made, and in profile runs."""
        if not self.workspace_bytes:
            return
        if not is_workspace_manager_initialized():  # layers outside an engine
            init_workspace_manager(torch.device("cuda", torch.cuda.current_device()))
        current_workspace_manager().get_simultaneous(((self.workspace_bytes,), torch.uint8))
        self._reserved_by.add(dbo_current_ubatch_id())


class GatherFlashAttentionBackend(FlashAttentionBackend):
    """Supports what vLLM's FlashAttention backend supports, for the reasons it gives, and e5m2 caches."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*FlashAttentionBackend.supported_kv_cache_dtypes, E5M2]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[GatherFlashAttentionImpl]:
        return GatherFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[GatherFlashMetadataBuilder]:
        return GatherFlashMetadataBuilder

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return kv_cache_dtype == E5M2 or super().supports_kv_cache_dtype(kv_cache_dtype)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        if kv_cache_dtype == E5M2:  # for the kernels, a 16-bit one
            kv_cache_dtype = "auto"
        return super().supports_combination(head_size, dtype, kv_cache_dtype, *args, **kwargs)


IMPLEMENTATION = f"{GatherFlashAttentionImpl.__module__}.{GatherFlashAttentionImpl.__qualname__}"
