"""Small models with KDA layers and random weights in vLLM's engine, with our layers and with stock ones."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import pathlib
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.support import kda_model
from tests.support.engine import candidates, new_graph_pool
from tests.support.kda_watch import Watch
from vllm_kda_plugin.kda.layers import REPLACEMENTS, KdaLayer

VOCABULARY = 2048


def kimi(*, full_rank: bool, lower_bound: float | None) -> dict[str, Any]:
    """Three KDA layers and one of MLA, three of the four with experts; with a full-rank gate the KDA is Kimi K3's.

    Without it vLLM multiplies a slice of the input projection that comes after a number for each head. Where that is
    no multiple of 8 the slice does not start at 16 bytes.
    """
    linear: dict[str, Any] = {
        "head_dim": 128,
        "num_heads": 12 if full_rank else 16,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "use_full_rank_gate": full_rank,
    }
    if lower_bound is not None:
        linear["gate_lower_bound"] = lower_bound
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": VOCABULARY,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 2.446,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "linear_attn_config": linear,
        "max_position_embeddings": 131072,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def hybrid(kda_layer: str, lower_bound: float | None = -5.0) -> dict[str, Any]:
    """The tests' own model with vLLM's class of this name: KDA and attention layers by turns, no experts."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": VOCABULARY, "head_dim": 128}
    more: dict[str, Any] = {"max_position_embeddings": 131072, "torch_dtype": "bfloat16", "eos_token_id": 1}
    return kda_model.config("kaka", lower_bound, kda_layer, 8, 128, **sizes, **more)  # 8 heads: see kimi


@dataclasses.dataclass
class Generated:
    """What an engine did."""

    tokens: list[list[int]]
    likely: list[list[dict[int, float]]]
    """Log probability of the likeliest tokens at each place."""
    cached_tokens: int
    kda_layers: set[str]
    """Class name and, of ours, provider."""
    fewest_prefills: int
    """Batches that the layer that ran fewest ran on our path."""


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Token ids; the first three of the vocabulary are special."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def generate(
    folder: pathlib.Path,
    config: dict[str, Any],
    prompts: list[list[int]],
    *,
    ours: bool,
    max_tokens: int = 32,
    rounds: int = 1,
    between: Callable[[Any], None] | None = None,
    watch: Watch | None = None,
    **engine: Any,
) -> Generated:
    """Generate greedily in a fresh engine with the same weights each time; what the last round did.

    Args:
        folder: where config.json is written.
        config: of the model.
        prompts: token ids.
        ours: whether KDA layers are replaced; they are the stock ones otherwise, in the same process.
        max_tokens: generated for each prompt.
        rounds: how often all prompts are sent.
        between: called with the engine before each round but the first.
        watch: set on the rounds, not on the engine's own warm-up.
        engine: further arguments of ``vllm.LLM``.
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    kda_model.register()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5, detokenize=False)
    requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    with _random_weights(), contextlib.nullcontext() if ours else _stock_layers():
        llm = LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **engine)
    try:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        kda_layers = [layer for layer in layers if type(layer).__name__.removeprefix("Workspace") in REPLACEMENTS]
        for turn in range(rounds):
            if turn and between is not None:
                between(llm)
            with contextlib.nullcontext() if watch is None else watch.watching():
                outputs = llm.generate(requests, sampling, use_tqdm=False)
        return Generated(
            [list(output.outputs[0].token_ids) for output in outputs],
            [candidates(output) for output in outputs],
            sum(output.num_cached_tokens or 0 for output in outputs),
            {f"{type(layer).__name__}: {layer.provider.name if ours else 'stock'}" for layer in kda_layers},
            min((layer.prefills for layer in kda_layers if isinstance(layer, KdaLayer)), default=0),
        )
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        new_graph_pool()
        cleanup_dist_env_and_memory()


@contextlib.contextmanager
def _stock_layers() -> Iterator[None]:
    """vLLM instantiates its own classes meanwhile."""
    from vllm.model_executor.custom_op import op_registry_oot

    from vllm_kda_plugin.kda import layers

    held = {name: op_registry_oot.pop(name) for name in REPLACEMENTS if name in op_registry_oot}
    replace, layers.replace = layers.replace, lambda module, name: None
    try:
        yield
    finally:
        layers.replace = replace
        op_registry_oot.update(held)


@contextlib.contextmanager
def _random_weights() -> Iterator[None]:
    """What ``load_format="dummy"`` fills a model with meanwhile: numbers with which texts vary."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    held = DummyModelLoader.load_weights
    DummyModelLoader.load_weights = lambda self, model, model_config: _fill(model)
    try:
        yield
    finally:
        DummyModelLoader.load_weights = held


@torch.no_grad()
def _fill(model: torch.nn.Module) -> None:
    """Random weights, the same for a parameter of the same name."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            drawn = drawn * 0.5
        elif name.endswith("dt_bias"):
            drawn = drawn * 2 - 3
        elif "conv1d" in name:
            drawn = drawn * 0.5
        elif "correction_bias" in name:
            drawn = drawn * 0
        elif "norm" in name:
            drawn = 1 + drawn * 0.1
        elif "lm_head" in name:
            drawn = drawn * 3 / drawn.shape[-1] ** 0.5
        elif "embed_tokens" not in name:
            drawn = drawn / drawn.shape[-1] ** 0.5
        parameter.copy_(drawn)
    for layer in model.modules():  # copies for decoding that the loader of weights makes
        if getattr(layer, "decode_conv1d_weight", None) is not None:
            parts = layer.conv1d.weight[:, 0].chunk(3)
            layer.decode_conv1d_weight.copy_(torch.stack([part.T for part in parts]))
        if getattr(layer, "decode_norm_weight", None) is not None:
            layer.decode_norm_weight.copy_(layer.o_norm.weight)
