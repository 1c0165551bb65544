"""The model of ``kda_model`` for vLLM: its KDA layer and its attention layer, little else."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateCopyFuncCalculator,
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid

_MODULES = {
    "KimiGatedDeltaNetAttention": "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn",
    "KimiK3DeltaAttention": "vllm.models.kimi_k3.nvidia.kda",
    "BailingMoeV3KimiDeltaAttention": "vllm.model_executor.models.bailing_moe_v3",
    "Glm5NextLinearAttention": "vllm.models.glm5next.common.kda",
}


class _GroupedAttention(nn.Module):
    def __init__(self, config: Any, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.sizes = [heads * size, kv_heads * size, kv_heads * size]
        self.qkv_proj = QKVParallelLinear(config.hidden_size, size, heads, kv_heads, bias=False, prefix=prefix)
        self.o_proj = RowParallelLinear(heads * size, config.hidden_size, bias=False, prefix=prefix)
        self.attn = Attention(
            heads,
            size,
            size**-0.5,
            num_kv_heads=kv_heads,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden_states)[0].split(self.sizes, -1)
        return self.o_proj(self.attn(q, k, v))[0]


class _Layer(nn.Module):
    def __init__(self, config: Any, vllm_config: VllmConfig, index: int, prefix: str) -> None:
        super().__init__()
        mixer: Any = _GroupedAttention
        kda_layer = config.kda_layer if config.is_kda_layer(index) else ""
        if kda_layer:
            mixer = getattr(importlib.import_module(_MODULES[kda_layer]), kda_layer)
        self.writes_output = kda_layer.startswith("Bailing")
        if self.writes_output:
            kda = config.linear_attn_config
            bailing = SimpleNamespace(
                hidden_size=config.hidden_size,
                head_dim=kda["head_dim"],
                num_attention_heads=kda["num_heads"],
                short_conv_kernel_size=kda["short_conv_kernel_size"],
                kda_safe_gate="gate_lower_bound" in kda,
                kda_lower_bound=kda.get("gate_lower_bound"),
                no_kda_lora=True,
                rms_norm_eps=config.rms_norm_eps,
            )
            self.mixer = mixer(
                bailing,
                prefix=f"{prefix}.mixer",
                model_config=vllm_config.model_config,
                cache_config=vllm_config.cache_config,
            )
        elif kda_layer.startswith("Glm"):
            kda = config.linear_attn_config
            glm = SimpleNamespace(
                hidden_size=config.hidden_size,
                hidden_act="silu",
                rms_norm_eps=config.rms_norm_eps,
                linear_head_dim=kda["head_dim"],
                linear_num_heads=kda["num_heads"],
                linear_conv_kernel_dim=kda["short_conv_kernel_size"],
                linear_lower_bound=kda["gate_lower_bound"],
            )
            self.mixer = mixer(glm, vllm_config, prefix=f"{prefix}.mixer")
        else:
            self.mixer = mixer(config, vllm_config, prefix=f"{prefix}.mixer")
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.up = ReplicatedLinear(config.hidden_size, config.intermediate_size, bias=False, prefix=f"{prefix}.up")
        self.down = ReplicatedLinear(config.intermediate_size, config.hidden_size, bias=False, prefix=f"{prefix}.down")

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.writes_output:
            mixed = torch.empty_like(x)
            self.mixer(self.input_norm(x), positions, mixed)
            x = x + mixed
        else:
            x = x + self.mixer(self.input_norm(x), positions)
        return x + self.down(nn.functional.silu(self.up(self.mlp_norm(x))[0]))[0]


class KdaTestForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """Layers of KDA or attention as ``linear_attn_config`` says."""

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        return MambaStateDtypeCalculator.kda_state_dtype(
            vllm_config.model_config.dtype, vllm_config.cache_config.mamba_cache_dtype
        )

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        kda = vllm_config.model_config.hf_config.linear_attn_config
        return MambaStateShapeCalculator.kda_state_shape(
            vllm_config.parallel_config.tensor_parallel_size,
            kda["num_heads"],
            kda["head_dim"],
            conv_kernel_size=kda["short_conv_kernel_size"],
            num_spec=vllm_config.num_speculative_tokens,
        )

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        return MambaStateCopyFuncCalculator.kda_state_copy_func()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            _Layer(config, vllm_config, i, f"layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x, positions)
        return self.norm(x)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """One rank only: every weight is stored as its parameter is shaped, but for the padded vocabulary."""
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            parameters[name].data[: len(weight)].copy_(weight)
            loaded.add(name)
        assert loaded == set(parameters)
        return loaded
