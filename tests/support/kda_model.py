"""A small language model of KDA layers, and of attention layers if wanted: for vLLM, on disk, and in plain torch.

The plain one recomputes a whole text, token after token, and shares no code with the package.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
import torch.nn.functional as F

from vllm_kda_plugin.tiny_model import VOCAB_SIZE, write_tokenizer

ARCHITECTURE = "KdaTestForCausalLM"
_HIDDEN, _HEADS, _DIM, _CONV = 128, 4, 32, 4
_QUERY_HEADS, _KV_HEADS, _HEAD_SIZE = 4, 2, 64
_EPSILON = 1e-5
_FULL_RANK = "KimiK3DeltaAttention"
_BAILING = "BailingMoeV3KimiDeltaAttention"

Weights = dict[str, torch.Tensor]


def write(
    path: pathlib.Path,
    layers: str = "kkk",
    *,
    lower_bound: float | None = None,
    kda_layer: str = "KimiGatedDeltaNetAttention",
    seed: int = 0,
) -> str:
    """Write a random model.

    Args:
        path: a folder; made if missing.
        layers: what each layer is, k for KDA, a for attention.
        lower_bound: of the bounded gate, None for softplus.
        kda_layer: vLLM's class. That of Kimi K3 has a full-rank output gate.
        seed: of the weights.

    Returns:
        ``path``.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config(layers, lower_bound, kda_layer)))
    write_tokenizer(path)
    save_file(_weights(layers, kda_layer, seed), str(path / "model.safetensors"), {"format": "pt"})
    return str(path)


def config(
    layers: str, lower_bound: float | None, kda_layer: str, heads: int = _HEADS, dim: int = _DIM, **changes: Any
) -> dict[str, Any]:
    """What vLLM reads of a model; arguments as in :func:`write`, the heads and their size are those of KDA layers."""
    kinds = {kind: [i + 1 for i, each in enumerate(layers) if each == kind] for kind in "ka"}
    linear: dict[str, Any] = {
        "head_dim": dim,
        "num_heads": heads,
        "short_conv_kernel_size": _CONV,
        "kda_layers": kinds["k"],
        "full_attn_layers": kinds["a"],
        "use_full_rank_gate": kda_layer == _FULL_RANK,
    }
    if lower_bound is not None:
        linear["gate_lower_bound"] = lower_bound
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "kimi_linear",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": len(layers),
        "num_attention_heads": _QUERY_HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_SIZE,
        "rms_norm_eps": _EPSILON,
        "max_position_embeddings": 4096,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "linear_attn_config": linear,
        "kda_layer": kda_layer,
        "torch_dtype": "float32",
        **changes,
    }


def _weights(layers: str, kda_layer: str, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float = 0.2, mean: float = 0.0) -> torch.Tensor:
        return mean + std * torch.randn(*shape, generator=generator)

    width = _HEADS * _DIM
    weights = {
        "embed_tokens.weight": draw(VOCAB_SIZE, _HIDDEN),
        "norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": draw(VOCAB_SIZE, _HIDDEN),
    }
    for i, kind in enumerate(layers):
        if kind == "k":
            parts = {
                "in_proj_qkvgfab.weight": draw(_projected(kda_layer), _HIDDEN),
                "f_b_proj.weight": draw(width, _DIM),
                "dt_bias": draw(width, std=2.0, mean=-3.0),
                "conv1d.weight": draw(3 * width, 1, _CONV, std=0.5),
                "A_log": draw(_HEADS, std=0.5),
                "o_norm.weight": draw(_DIM, std=0.1, mean=1.0),
                "o_proj.weight": draw(_HIDDEN, width),
            }
            if kda_layer == _BAILING:
                parts = {
                    "qkvb_proj.weight": draw(3 * width + _HEADS, _HIDDEN),
                    "f_proj.weight": draw(width, _HIDDEN),
                    "g_proj.weight": draw(width, _HIDDEN),
                    **{f"{name}_conv1d.weight": draw(width, 1, _CONV, std=0.5) for name in "qkv"},
                    "dt_bias": parts["dt_bias"],
                    "A_log": parts["A_log"].reshape(1, 1, _HEADS, 1),
                    "o_norm.weight": parts["o_norm.weight"],
                    "o_proj.weight": parts["o_proj.weight"],
                }
            elif kda_layer != _FULL_RANK:
                parts |= {"g_a_proj.weight": draw(_DIM, _HIDDEN), "g_b_proj.weight": draw(width, _DIM)}
        else:
            parts = {
                "qkv_proj.weight": draw((_QUERY_HEADS + 2 * _KV_HEADS) * _HEAD_SIZE, _HIDDEN),
                "o_proj.weight": draw(_HIDDEN, _QUERY_HEADS * _HEAD_SIZE),
            }
        weights |= {f"layers.{i}.mixer.{name}": weight for name, weight in parts.items()}
        weights |= {
            f"layers.{i}.input_norm.weight": torch.ones(_HIDDEN),
            f"layers.{i}.mlp_norm.weight": torch.ones(_HIDDEN),
            f"layers.{i}.up.weight": draw(_HIDDEN, _HIDDEN),
            f"layers.{i}.down.weight": draw(_HIDDEN, _HIDDEN, std=0.05),
        }
    return weights


def _projected(kda_layer: str) -> int:
    """Rows of the input projection: q, k, v, then beta and low-rank gate, or gate, low-rank gate, beta and padding."""
    width = _HEADS * _DIM
    if kda_layer != _FULL_RANK:
        return 3 * width + _HEADS + _DIM
    rows = 4 * width + _DIM + _HEADS
    return rows + -rows % 16


def logits(path: str, texts: list[list[int]]) -> list[torch.Tensor]:
    """``[tokens, vocabulary]`` of each whole text, in float64."""
    from safetensors.torch import load_file

    config = json.loads((pathlib.Path(path) / "config.json").read_text())
    weights = {
        name: weight.double() for name, weight in load_file(str(pathlib.Path(path) / "model.safetensors")).items()
    }
    kda_layers, bound = config["linear_attn_config"]["kda_layers"], config["linear_attn_config"].get("gate_lower_bound")
    # Shorter texts are padded at their ends, which no token before sees.
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    x = weights["embed_tokens.weight"][padded]
    for i in range(config["num_hidden_layers"]):
        layer = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        mixer = {name.removeprefix("mixer."): w for name, w in layer.items() if name.startswith("mixer.")}
        h = _norm(x, layer["input_norm.weight"])
        x = x + (_kda(h, mixer, bound) if i + 1 in kda_layers else _attention(h, mixer))
        h = _norm(x, layer["mlp_norm.weight"])
        x = x + F.silu(h @ layer["up.weight"].T) @ layer["down.weight"].T
    x = _norm(x, weights["norm.weight"])
    return [one[: len(text)] @ weights["lm_head.weight"].T for one, text in zip(x, texts, strict=True)]


def behind(path: str, prompts: list[list[int]], generated: list[list[int]]) -> list[torch.Tensor]:
    """By how much each generated token's logit is below that of the likeliest after all before it, prompt by prompt."""
    found = []
    texts = [prompt + tokens for prompt, tokens in zip(prompts, generated, strict=True)]
    for likely, tokens in zip(logits(path, texts), generated, strict=True):
        likely = likely[-len(tokens) - 1 : -1]
        found.append(likely.max(-1).values - likely.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1))
    return found


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + _EPSILON).rsqrt() * weight


def _attention(x: torch.Tensor, w: Weights) -> torch.Tensor:
    sizes = [_QUERY_HEADS * _HEAD_SIZE, _KV_HEADS * _HEAD_SIZE, _KV_HEADS * _HEAD_SIZE]
    q, k, v = (y.unflatten(-1, (-1, _HEAD_SIZE)).transpose(1, 2) for y in (x @ w["qkv_proj.weight"].T).split(sizes, -1))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2) @ w["o_proj.weight"].T


def _kda(x: torch.Tensor, w: Weights, bound: float | None) -> torch.Tensor:
    width = _HEADS * _DIM
    if "qkvb_proj.weight" in w:
        mixed, beta = (x @ w["qkvb_proj.weight"].T).split([3 * width, _HEADS], -1)
        logit, gate = x @ w["f_proj.weight"].T, x @ w["g_proj.weight"].T
        conv = torch.cat([w[f"{name}_conv1d.weight"] for name in "qkv"])
    elif "g_a_proj.weight" in w:
        mixed, beta, f_a = (x @ w["in_proj_qkvgfab.weight"].T).split([3 * width, _HEADS, _DIM], -1)
        gate = x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
        logit, conv = f_a @ w["f_b_proj.weight"].T, w["conv1d.weight"]
    else:
        mixed, gate, f_a, beta, _ = (x @ w["in_proj_qkvgfab.weight"].T).tensor_split(
            [3 * width, 4 * width, 4 * width + _DIM, 4 * width + _DIM + _HEADS], -1
        )
        logit, conv = f_a @ w["f_b_proj.weight"].T, w["conv1d.weight"]
    padded = F.pad(mixed, (0, 0, _CONV - 1, 0))
    tokens = x.shape[1]
    mixed = F.silu(sum(padded[:, j : j + tokens] * conv[:, 0, j] for j in range(_CONV)))
    q, k, v = (y.unflatten(-1, (_HEADS, _DIM)) for y in mixed.split(width, -1))
    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    logit = (logit + w["dt_bias"]).unflatten(-1, (_HEADS, _DIM))
    rate = w["A_log"].exp().reshape(_HEADS, 1)
    g = -rate * F.softplus(logit) if bound is None else bound * torch.sigmoid(rate * logit)
    beta = beta.sigmoid()
    state = x.new_zeros(len(x), _HEADS, _DIM, _DIM)
    out = []
    for t in range(tokens):
        state = state * g[:, t].exp().unsqueeze(-2)
        error = v[:, t] - torch.einsum("nhvk,nhk->nhv", state, k[:, t])
        state = state + torch.einsum("nh,nhv,nhk->nhvk", beta[:, t], error, k[:, t])
        out.append(torch.einsum("nhvk,nhk->nhv", state, q[:, t]) * _DIM**-0.5)
    gate = gate.unflatten(-1, (_HEADS, _DIM)).sigmoid()
    return (_norm(torch.stack(out, 1), w["o_norm.weight"]) * gate).flatten(2) @ w["o_proj.weight"].T


def register() -> None:
    """Make the model known to vLLM, in this process."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, "tests.support.kda_vllm:KdaTestForCausalLM")
