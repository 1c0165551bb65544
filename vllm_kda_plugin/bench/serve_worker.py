"""What the benchmark of engines asks of a vLLM worker, through ``collective_rpc``: it is in another process."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from vllm_kda_plugin.attention.stats import STATS
from vllm_kda_plugin.tiny_model import wide_std


class WorkerExtension:
    """Joined to vLLM's worker class by ``worker_extension_cls``."""

    def kda_randomize(self, seed: int) -> None:
        """Weights from which varied tokens follow, the same for the same ``seed``; those of a dummy load are near 0."""
        model: torch.nn.Module = self.get_model()  # type: ignore[attr-defined]
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() < 2:
                    weight.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                generator = torch.Generator(weight.device).manual_seed(seed)
                weight.normal_(std=wide_std(name, weight.shape[-1]), generator=generator)
                seed += 1

    def kda_attention(self) -> dict[str, Any]:
        """``backends`` and ``classes`` of the attention layers, ``stats`` of the plugin's in this process."""
        context = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        layers = [layer for layer in context.values() if hasattr(layer, "impl")]
        classes = {type(layer.impl) for layer in layers}
        return {
            "backends": sorted({layer.get_attn_backend().get_name() for layer in layers}),
            "classes": sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in classes),
            "stats": dataclasses.asdict(STATS),
        }
