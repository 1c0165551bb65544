"""vLLM's KDA layers with another prefill: subclasses that vLLM instantiates in place of its own.

Only a batch with prefill takes our path, and on the CPU, where vLLM has none, every batch. Speculative tokens of such
a batch are run by the stock layer, as a batch of their own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform

from vllm_kda_plugin.config import SECTION, PluginConfig
from vllm_kda_plugin.environment import KDA_MEASURED_ON
from vllm_kda_plugin.kda.prefill import kda_prefill
from vllm_kda_plugin.kda.providers import PROVIDERS, Case, Provider, select
from vllm_kda_plugin.kda.short_conv import short_conv
from vllm_kda_plugin.kda.workspace import KdaWorkspace
from vllm_kda_plugin.kernels import kda_native, states
from vllm_kda_plugin.kernels.loader import KernelUnavailable

logger = init_logger("vllm.kda_plugin")

_STEP = "_vllm_kda_plugin_step"
_Rows: TypeAlias = torch.Tensor | slice
"""Tokens of a batch."""


class KdaLayer:
    """What the replaced layers share. Comes before vLLM's class in the order of bases."""

    # Of vLLM's classes.
    prefix: str
    head_dim: int
    local_num_heads: int
    kv_cache: tuple[torch.Tensor, ...]
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    prefills = 0
    """Batches that this layer has run on our path."""
    is_stock = False
    """Every batch is the stock layer's."""
    saves_checkpoints = False
    """Whether vLLM will ask for them."""
    has_checkpoints = False
    """Whether the batches of vLLM's class may ask for prefix-cache checkpoints inside a prefill."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        self.on_cpu = current_platform.is_cpu()
        if self.on_cpu and vllm_config.num_speculative_tokens:
            raise ValueError("KDA layers do not decode speculatively on the CPU; remove --speculative-config")
        self.bound = self.gate_bound()
        choice: str = PluginConfig.from_vllm(vllm_config).prefill
        layer_kind = type(self).__bases__[-1].__name__
        case = self._case(vllm_config)
        # Without times measured on this GPU only who names a kernel gets it there.
        if choice == "auto" and not self.on_cpu:
            provider = _automatic(vllm_config, case, current_platform.get_device_name())
        else:
            provider = select(choice, case)
        if provider is None:
            self.is_stock = True
            logger.info_once("KDA prefill of %s is vLLM's own; kda_plugin.prefill may name another.", layer_kind)
            return
        self.provider = provider
        self.saves_checkpoints = self.takes_checkpoints and vllm_config.cache_config.mamba_cache_mode == "align"
        self.workspace = self._workspace(vllm_config)
        self.workspace.reserve(checkpoint=self.saves_checkpoints)
        if choice != "auto":
            _tell_if_overridden(vllm_config, choice)
        if choice != "auto" or not self.on_cpu:
            _hash_with_the_model(vllm_config, provider.name)
        if current_platform.is_cuda():
            device = torch.device(current_platform.device_type)
            states.load(device)
            if provider.name == "native":
                kda_native.load(device)
        logger.info_once("KDA prefill of %s runs on %s.", layer_kind, provider.name)

    def gate_bound(self) -> float | None:
        """Lower bound of the gate, None for softplus."""
        raise NotImplementedError

    def conv_weights(self) -> tuple[torch.Tensor, ...]:
        """``[H * D, W]`` each, of q, k and v."""
        raise NotImplementedError

    def _case(self, vllm_config: VllmConfig) -> Case:
        capability = current_platform.get_device_capability()
        return Case(
            device=current_platform.device_type,
            capability=None if capability is None else (capability.major, capability.minor),
            head_dim=self.head_dim,
            dtype=vllm_config.model_config.dtype,
            state_dtype=self.get_state_dtype()[1],  # type: ignore[attr-defined]
            lower_bound=self.bound,
        )

    def _workspace(self, vllm_config: VllmConfig) -> KdaWorkspace:
        scheduler = vllm_config.scheduler_config
        return KdaWorkspace(
            max_tokens=scheduler.max_num_batched_tokens,
            max_sequences=scheduler.max_num_seqs,
            num_heads=self.local_num_heads,
            head_dim=self.head_dim,
            dtype=vllm_config.model_config.dtype,
            state_dtype=self.get_state_dtype()[1],  # type: ignore[attr-defined]
            provider=self.provider,
        )

    @property
    def checkpoint_step(self) -> int:
        """Tokens, of which the offset of a checkpoint inside a prefill is a multiple; 0: none may be asked for."""
        if self.is_stock or self.on_cpu or not self.has_checkpoints:
            return 0
        return self.provider.checkpoint_step

    @property
    def takes_checkpoints(self) -> bool:
        """Whether a prefill may be asked for states inside it."""
        return bool(self.checkpoint_step)

    def decide_checkpoints(self) -> None:
        """Ask vLLM for prefix-cache checkpoints inside a prefill if our kernel takes them, whatever stock would do."""
        layer: Any = self
        if self.is_stock:
            return
        if hasattr(self, "kda_prefill_backend"):  # of classes that decide themselves
            layer.kda_prefill_backend = "flashkda" if self.takes_checkpoints else "triton"
        if self.takes_checkpoints:
            from vllm.model_executor.layers.mamba.kda_checkpoint import FlashKDAPrefillCheckpointExporter

            # What a prefill leaves of the convolution's window, which speculation makes longer.
            layer._checkpoint_exporter = FlashKDAPrefillCheckpointExporter(state_len=layer.conv_size - 1)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """As vLLM's class, but with a block for a checkpoint where our kernel takes one."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        if self.takes_checkpoints:
            spec = dataclasses.replace(
                spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=self.checkpoint_step
            )
        return spec

    def get_prefill_checkpoint_alignment(self) -> int | None:
        """Tokens, of which a checkpoint's offset is a multiple; None if there are none, or the class does not say."""
        if self.takes_checkpoints:
            return self.checkpoint_step
        return super().get_prefill_checkpoint_alignment()  # type: ignore[misc]

    def stays_stock(self) -> bool:
        """Whether this step is the stock layer's: one without prefill, but on the CPU none."""
        if self.is_stock:
            return True
        m = self._metadata()
        return m is not None and m.num_prefills == 0 and not self.on_cpu

    def _metadata(self) -> Any:
        metadata = get_forward_context().attn_metadata
        return None if metadata is None else metadata.get(self.prefix)

    def run(
        self,
        qkv: tuple[torch.Tensor, ...],
        g: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
        stock: Callable[[_Rows, torch.Tensor], None],
        norm: Callable[[_Rows, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """One step of the layer on our path, its speculative tokens on the stock one.

        Args:
            qkv: projections q, k and v, ``[T, H * D]`` each.
            g: ``[1, T, H, D]`` raw gate logits.
            beta: ``[1, T, H]`` raw logits.
            core_attn_out: ``[1, T, H, D]``, written.
            stock: runs the stock layer on some tokens and writes their output.
            norm: of some tokens' output, if that is part of the seam.
        """
        m = self._metadata()
        if m is None:  # a profile run
            self.workspace.reserve(checkpoint=self.saves_checkpoints)
            return
        if m.num_spec_decodes == 0:
            rows = slice(m.num_actual_tokens)
            self.prefill(m, tuple(x[rows] for x in qkv), g[:, rows], beta[:, rows], core_attn_out[:, rows])
            if norm is not None:  # of padding too, as vLLM does: what comes next may look for the largest value
                core_attn_out.copy_(norm(slice(None), core_attn_out))
            return
        speculative, rest = _speculative_and_rest(m)
        stock_out = core_attn_out.new_empty((1, m.num_spec_decode_tokens, *core_attn_out.shape[2:]))
        with _only_speculative(self.prefix, m):
            stock(speculative, stock_out)
        core_attn_out[:, speculative] = stock_out
        out = self.prefill(m, tuple(x[rest] for x in qkv), g[:, rest], beta[:, rest], None)
        core_attn_out[:, rest] = out if norm is None else norm(rest, out)

    def prefill(
        self, m: Any, qkv: tuple[torch.Tensor, ...], g: torch.Tensor, beta: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Convolution and KDA of all tokens but speculative ones; the conv and KDA states are updated.

        Args:
            m: metadata of the batch.
            qkv: projections q, k and v, ``[T, H * D]`` each.
            g: ``[1, T, H, D]`` raw gate logits.
            beta: ``[1, T, H]`` raw logits.
            out: ``[1, T, H, D]`` or None for a workspace slice, valid until the next layer.

        Returns:
            The output, before its norm.
        """
        step = _step(m)
        conv_state, state = self.kv_cache[:2]
        if not is_conv_state_dim_first():
            conv_state = conv_state.transpose(-1, -2)
        q, k, v = (
            x.unflatten(-1, (self.local_num_heads, self.head_dim)).unsqueeze(0)
            for x in self._convolve(m, qkv, conv_state, step)
        )
        checkpoint = getattr(m, "checkpoint", None)
        provider = self.provider
        buffers = self.workspace.take(
            qkv[0].shape[0],
            step.num_sequences,
            final_state=not provider.pools,
            out=out is None or not out.is_contiguous(),
            checkpoint=checkpoint is not None,
        )
        result = out if buffers.out is None else buffers.out
        kda_prefill(
            q,
            k,
            v,
            g,
            beta,
            self.A_log,
            self.dt_bias,
            self.bound,
            state,
            step.cu_seqlens,
            result,
            buffers.final_state,
            buffers.scratch,
            provider=provider,
            checkpoint_state=buffers.checkpoint_state,
            checkpoint_offsets=step.checkpoint_offsets,
            state_indices=step.state_indices,
            has_initial_state=step.has_initial_state,
            max_seqlen=step.max_seqlen,
        )
        if checkpoint is not None:
            self._checkpoint_exporter.export(  # type: ignore[attr-defined]
                checkpoint,
                raw_qkv=_side_by_side(qkv),
                conv_state=conv_state,
                recurrent_checkpoint=buffers.checkpoint_state,
                recurrent_state=state,
                cu_seqlens=m.non_spec_query_start_loc,  # padded rows too, as the checkpoint's
            )
        self.prefills += 1
        return result if out is None or buffers.out is None else out.copy_(result)

    def _convolve(
        self,
        m: Any,
        qkv: tuple[torch.Tensor, ...],
        pool: torch.Tensor,
        step: _Step,
    ) -> list[torch.Tensor]:
        """One convolution each for q, k and v: they take strided inputs and their outputs are dense."""
        channels = qkv[0].shape[1]
        weights, pools = self.conv_weights(), pool.split(channels, dim=-2)
        if self.on_cpu:
            return [
                short_conv(x, weight, part, step.state_indices, step.has_initial_state, step.cu_seqlens)
                for x, weight, part in zip(qkv, weights, pools, strict=True)
            ]
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

        return [
            causal_conv1d_fn(
                x.transpose(0, 1),
                weight,
                None,
                activation="silu",
                conv_states=part,
                has_initial_state=step.has_initial_state,
                cache_indices=step.state_indices,
                query_start_loc=step.cu_seqlens,
                metadata=m,
            ).transpose(0, 1)
            for x, weight, part in zip(qkv, weights, pools, strict=True)
        ]


def _side_by_side(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """``[T, 3 * H * D]`` of three ``[T, H * D]``: the tensor whose columns they are, else a copy."""
    first, width = parts[0], parts[0].shape[1]
    columns = all(
        part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and part.storage_offset() == first.storage_offset() + i * width
        and part.stride() == first.stride()
        for i, part in enumerate(parts)
    )
    if columns:
        return first.as_strided((len(first), len(parts) * width), first.stride())
    return torch.cat(parts, -1)


def _automatic(vllm_config: VllmConfig, case: Case, gpu: str) -> Provider | None:
    """What ``auto`` takes on a GPU; None where the layer stays vLLM's own."""
    own = PROVIDERS["native"]
    if gpu not in KDA_MEASURED_ON or _theirs(vllm_config) != "auto":
        return None
    reason = own.why_not(case)
    if reason is None:
        try:
            kda_native.load(torch.device(current_platform.device_type))
        except KernelUnavailable as error:
            reason = str(error)
    if reason is None:
        return own
    logger.warning_once("KDA prefill stays vLLM's own, the kernel of this plugin cannot run it: %s", reason)
    return None


def _hash_with_the_model(vllm_config: VllmConfig, kernels: str) -> None:
    """Put what was chosen into the config, by which vLLM's cache of compiled models tells them apart.

    Bailing's graph depends on it.
    """
    additional = vllm_config.additional_config
    if isinstance(additional, dict):
        additional.setdefault(f"{SECTION}_prefill", kernels)


def _theirs(vllm_config: VllmConfig) -> str:
    """VLLM's own setting of the same thing."""
    additional = vllm_config.additional_config
    return str(additional.get("kda_prefill_backend", "auto")) if isinstance(additional, dict) else "auto"


def _tell_if_overridden(vllm_config: VllmConfig, choice: str) -> None:
    theirs = _theirs(vllm_config)
    if theirs not in ("auto", choice):
        logger.warning_once("kda_plugin.prefill = %s is used, not --kda-prefill-backend %s.", choice, theirs)


class _Step(NamedTuple):
    """What the layers of a step share: its sequences, but for the speculative ones."""

    source: torch.Tensor
    """The metadata's own state indices, to tell a copy of the metadata for other layers."""
    num_sequences: int
    cu_seqlens: torch.Tensor
    """``[N + 1]``"""
    state_indices: torch.Tensor
    """``[N]``"""
    has_initial_state: torch.Tensor
    """``[N]`` bool"""
    checkpoint_offsets: torch.Tensor | None
    """``[N]``"""
    max_seqlen: int | None
    """No sequence has more tokens."""


def _step(m: Any) -> _Step:
    """The sequences of a batch, of which the first layer to ask leaves them in the batch's metadata.

    That saves time, and with it vLLM's Triton kernels copy ``cu_seqlens`` to the host once a step: they remember the
    tensor itself.
    """
    step: _Step | None = getattr(m, _STEP, None)
    if step is None or step.source is not m.non_spec_state_indices_tensor:
        # Rows of padding come last and are left out: what they name in the pools may belong to somebody.
        num_sequences = m.num_prefills + m.num_decodes
        # With speculation a column of a wider table.
        state_indices = m.non_spec_state_indices_tensor[:num_sequences].contiguous()
        has_initial_state = m.has_initial_state
        if has_initial_state is None:  # a batch of decodes
            has_initial_state = torch.ones(num_sequences, dtype=torch.bool, device=state_indices.device)
        checkpoint = getattr(m, "checkpoint", None)
        step = _Step(
            m.non_spec_state_indices_tensor,
            num_sequences,
            m.non_spec_query_start_loc[: num_sequences + 1],
            state_indices,
            has_initial_state[:num_sequences],
            None if checkpoint is None else checkpoint.checkpoint_offsets[:num_sequences],
            _max_seqlen(m),
        )
        setattr(m, _STEP, step)
    return step


def _max_seqlen(m: Any) -> int | None:
    """Of all sequences but speculative ones, rounded up; None where the batch's metadata does not say.

    vLLM keeps on the host, for its convolution, how many blocks of so many tokens each of them has.
    """
    blocks: dict[int, dict[str, Any]] = getattr(m, "nums_dict", None) or {}
    return min((size * int(of["nums"].max()) for size, of in blocks.items()), default=None)


class _KimiLayer(KdaLayer):
    """The seam of ``KimiGatedDeltaNetAttention``: the norm of the output is in it."""

    gate_lower_bound: float | None
    conv1d: Any
    o_norm: Any
    has_checkpoints = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decide_checkpoints()

    def gate_bound(self) -> float | None:
        """See :class:`KdaLayer`."""
        return self.gate_lower_bound

    def conv_weights(self) -> tuple[torch.Tensor, ...]:
        """See :class:`KdaLayer`."""
        return self.conv1d.weight.flatten(1).chunk(3)

    @eager_break_during_capture
    def _forward(
        self,
        mixed_qkv: torch.Tensor,
        g1: torch.Tensor,
        g2: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Write ``core_attn_out`` ``[1, T, H, D]``; arguments as in vLLM's class."""
        stock: Any = super()._forward  # type: ignore[misc]
        if self.stays_stock():
            stock(mixed_qkv=mixed_qkv, g1=g1, g2=g2, beta=beta, core_attn_out=core_attn_out)
            return

        def run_stock(rows: _Rows, out: torch.Tensor) -> None:
            stock(mixed_qkv=mixed_qkv[rows], g1=g1[:, rows], g2=g2[rows], beta=beta[:, rows], core_attn_out=out)

        def norm(rows: _Rows, out: torch.Tensor) -> torch.Tensor:
            return self.o_norm(out, g2[rows])

        self.run(mixed_qkv.chunk(3, dim=-1), g1, beta, core_attn_out, run_stock, norm)


class _KimiK3Layer(_KimiLayer):
    """``KimiK3DeltaAttention``: the same seam."""

    def get_attn_backend(self) -> Any:
        """vLLM's metadata for this layer is made by Triton kernels; on the CPU that of its other KDA layers serves."""
        if current_platform.is_cpu():
            return MambaBase.get_attn_backend(self)
        return super().get_attn_backend()  # type: ignore[misc]


class _Glm5NextLayer(KdaLayer):
    """The seam of ``Glm5NextLinearAttention``: a convolution each for q, k and v, the norm outside."""

    kda_lower_bound: float
    has_checkpoints = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decide_checkpoints()

    def gate_bound(self) -> float | None:
        """See :class:`KdaLayer`."""
        return self.kda_lower_bound

    def conv_weights(self) -> tuple[torch.Tensor, ...]:
        """See :class:`KdaLayer`."""
        return _separate_conv_weights(self)

    @eager_break_during_capture
    def _forward(
        self, qkv_proj_states: torch.Tensor, g1: torch.Tensor, beta: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Write ``core_attn_out`` ``[1, T, H, D]``; arguments as in vLLM's class."""
        stock: Any = super()._forward  # type: ignore[misc]
        if self.stays_stock():
            stock(qkv_proj_states=qkv_proj_states, g1=g1, beta=beta, core_attn_out=core_attn_out)
            return

        def run_stock(rows: _Rows, out: torch.Tensor) -> None:
            stock(qkv_proj_states=qkv_proj_states[rows], g1=g1[:, rows], beta=beta[:, rows], core_attn_out=out)

        self.run(qkv_proj_states.chunk(3, dim=-1), g1, beta, core_attn_out, run_stock)


class _BailingLayer(KdaLayer):
    """The seam of ``BailingMoeV3KimiDeltaAttention``, which activates gate and beta before it: here they stay raw."""

    safe_gate: bool
    lower_bound: float

    def gate_bound(self) -> float | None:
        """See :class:`KdaLayer`."""
        return self.lower_bound if self.safe_gate else None

    def conv_weights(self) -> tuple[torch.Tensor, ...]:
        """See :class:`KdaLayer`."""
        return _separate_conv_weights(self)

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        """As vLLM's class, but raw logits go into the operator that breaks the compiled graph."""
        if self.is_stock:
            super().forward(hidden_states, positions, output)  # type: ignore[misc]
            return
        layer: Any = self
        heads, dim = self.local_num_heads, self.head_dim
        if layer.separate_b_proj:
            q, k, v = layer.qkv_proj(hidden_states)[0].chunk(3, dim=-1)
            beta = layer.b_proj(hidden_states)[0]
        else:
            q, k, v, beta = layer.qkvb_proj(hidden_states)[0].split([heads * dim] * 3 + [heads], dim=-1)
        g1 = layer.f_proj(hidden_states)[0].unflatten(-1, (heads, dim)).unsqueeze(0)
        g2 = layer.g_proj(hidden_states)[0].unflatten(-1, (heads, dim))
        core_attn_out = hidden_states.new_zeros((1, len(hidden_states), heads, dim))
        torch.ops.vllm.bailing_v3_kda_attention(q, k, v, g1, beta.unsqueeze(0), core_attn_out, self.prefix)
        output[:] = layer.o_proj(layer.o_norm(core_attn_out, g2).flatten(2).squeeze(0))[0]

    def _forward(
        self,
        q_proj_states: torch.Tensor,
        k_proj_states: torch.Tensor,
        v_proj_states: torch.Tensor,
        g1: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Write ``core_attn_out`` ``[1, T, H, D]``; arguments as in vLLM's class, but g1 and beta are raw."""
        stock: Any = super()._forward  # type: ignore[misc]
        if self.is_stock:
            stock(q_proj_states, k_proj_states, v_proj_states, g1, beta, core_attn_out)
            return
        qkv = (q_proj_states, k_proj_states, v_proj_states)

        def run_stock(rows: _Rows, out: torch.Tensor) -> None:
            from vllm.third_party.flash_linear_attention.ops.kda import fused_kda_gate

            q, k, v = (x[rows] for x in qkv)
            gate = fused_kda_gate(
                g1[0, rows].flatten(1), self.A_log, self.head_dim, g_bias=self.dt_bias, lower_bound=self.bound
            )
            stock(q, k, v, gate.unsqueeze(0), beta[:, rows].float().sigmoid(), out)

        if self.stays_stock():
            run_stock(slice(None), core_attn_out)
            return
        self.run(qkv, g1, beta, core_attn_out, run_stock)


def _separate_conv_weights(layer: Any) -> tuple[torch.Tensor, ...]:
    return tuple(conv.weight.flatten(1) for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d))


def _speculative_and_rest(m: Any) -> tuple[_Rows, _Rows]:
    """Tokens of a mixed batch that are speculative, and those that are not."""
    if getattr(m, "spec_token_start", None) is None:
        return m.spec_token_indx, m.non_spec_token_indx
    num_rest = m.num_prefill_tokens + m.num_decode_tokens
    return (
        slice(m.spec_token_start, m.spec_token_start + m.num_spec_decode_tokens),
        slice(m.non_spec_token_start, m.non_spec_token_start + num_rest),
    )


class _only_speculative:
    """Shows the stock layer a batch of nothing but the speculative tokens."""

    def __init__(self, prefix: str, m: Any) -> None:
        self.prefix, self.whole, self.part = prefix, m, copy.copy(m)
        self.part.num_actual_tokens = m.num_spec_decode_tokens
        self.part.num_prefills = self.part.num_prefill_tokens = self.part.num_decodes = self.part.num_decode_tokens = 0
        self.part.checkpoint = None
        if m.non_spec_token_indx is not None:
            self.part.non_spec_token_indx = m.non_spec_token_indx[:0]
        if hasattr(m, "spec_token_start"):
            self.part.spec_token_start = self.part.non_spec_token_start = None

    def __enter__(self) -> None:
        get_forward_context().attn_metadata[self.prefix] = self.part

    def __exit__(self, *error: object) -> None:
        get_forward_context().attn_metadata[self.prefix] = self.whole


REPLACEMENTS: dict[str, type[KdaLayer]] = {
    "KimiGatedDeltaNetAttention": _KimiLayer,
    "KimiK3DeltaAttention": _KimiK3Layer,
    "Glm5NextLinearAttention": _Glm5NextLayer,
    "BailingMoeV3KimiDeltaAttention": _BailingLayer,
}
"""By name of vLLM's class: what is put before it."""


def replace(module: Any, name: str) -> None:
    """Make vLLM instantiate our subclass of the KDA layer ``name`` of ``module``; a second call changes nothing."""
    in_tree = getattr(module, name, None)
    if in_tree is None:
        logger.warning("%s has no %s in this vLLM: its KDA layers stay as they are.", module.__name__, name)
        return
    if name in op_registry_oot:
        if not issubclass(op_registry_oot[name], KdaLayer):
            logger.warning("%s is already replaced by %s: it stays so.", name, op_registry_oot[name])
        return
    ours = type(f"Workspace{name}", (REPLACEMENTS[name], in_tree), {"__module__": __name__})
    globals()[ours.__name__] = ours  # where pickle looks for it
    in_tree.register_oot(ours)
