"""The KDA layers of vLLM that are replaced, as soon as their modules are imported."""

from __future__ import annotations

from types import ModuleType

from vllm.logger import init_logger

from vllm_kda_plugin.platforms.imports import after_import

logger = init_logger("vllm.kda_plugin")

LAYERS = {
    "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn": "KimiGatedDeltaNetAttention",
    "vllm.models.kimi_k3.nvidia.kda": "KimiK3DeltaAttention",
    "vllm.models.glm5next.common.kda": "Glm5NextLinearAttention",
    "vllm.model_executor.models.bailing_moe_v3": "BailingMoeV3KimiDeltaAttention",
}
"""By module: the class in it that is replaced."""

_installed = False


def install() -> None:
    """Wait for the modules, once a process, on the platforms where our layers run."""
    from vllm.platforms import current_platform

    global _installed
    if _installed or not (current_platform.is_cpu() or current_platform.is_cuda()):
        return
    _installed = True
    after_import(dict.fromkeys(LAYERS, _replace))


def _replace(module: ModuleType) -> None:
    try:
        from vllm_kda_plugin.kda.layers import replace

        replace(module, LAYERS[module.__name__])
    except Exception as error:  # an import of vLLM must not fail for it
        logger.warning(
            "KDA layers of %s stay as they are: %s: %s", module.__name__, type(error).__name__, error, exc_info=True
        )
