"""Writes random models to disk, so that demos, tests and benchmarks need no model hub: small ones whole, with a
tokenizer; of large ones the configuration."""

from __future__ import annotations

import pathlib
from typing import Any

# Vocabulary: 256 bytes, then the special tokens.
_SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")
VOCAB_SIZE = 256 + len(_SPECIAL)
# Wide enough that greedy text varies; with the usual 0.02 a random model repeats one token. Embeddings that are
# also the output projection must stay small, or the token read outweighs all layers and is said again.
WEIGHT_STD = 0.2
TIED_EMBEDDING_STD = 0.01
# The projection out of the MLP is narrow, so that attention decides the next token more than the last token does.
MLP_OUT_STD = 0.05
_MLP_OUT = ("down_proj.weight", "dense_4h_to_h.weight")
_INPUTS = 256

_SMALL: dict[str, Any] = {
    "hidden_size": _INPUTS,
    "intermediate_size": _INPUTS,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


def write_tokenizer(path: pathlib.Path) -> None:
    """Write a byte-level tokenizer: one token a byte of UTF-8, plus bos, eos and pad."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *_SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad = _SPECIAL
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad).save_pretrained(
        str(path)
    )


def write_model(path: pathlib.Path, model_type: str = "llama", *, seed: int = 0, **config: Any) -> pathlib.Path:
    """Write a random model of a Hugging Face ``model_type`` and its tokenizer into ``path``.

    Args:
        path: a folder; made if missing. A finished model found there is kept as it is.
        model_type: any causal language model type that transformers knows, such as ``llama``.
        seed: of the weights.
        config: overrides of that type's configuration, on top of a small default (4 layers, 4 query
            heads, 2 KV heads of 64).

    Returns:
        ``path``.
    """
    done = path / "model.safetensors"
    if done.exists():
        return path
    import torch
    from transformers import AutoModelForCausalLM

    path.mkdir(parents=True, exist_ok=True)
    hf_config = _configuration(model_type, config)
    hf_config.dtype = "float32"
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config).to(torch.float32)
    tied = model.get_input_embeddings().weight if hf_config.tie_word_embeddings else None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                std = TIED_EMBEDDING_STD if weight is tied else MLP_OUT_STD if name.endswith(_MLP_OUT) else WEIGHT_STD
                weight.normal_(std=std, generator=generator)
            elif name.endswith("bias"):
                weight.zero_()
    write_tokenizer(path)
    model.save_pretrained(str(path), safe_serialization=True)
    return path


def write_config(path: pathlib.Path, model_type: str = "llama", **config: Any) -> pathlib.Path:
    """Write only the configuration of a model, for engines that make its weights: ``load_format="dummy"``.

    Args:
        path: a folder; made if missing.
        model_type: as for :func:`write_model`.
        config: likewise.

    Returns:
        ``path``.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    hf_config = _configuration(model_type, config)
    hf_config.dtype = "bfloat16"
    hf_config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    hf_config.save_pretrained(str(path))
    return path


def wide_std(name: str, num_inputs: int) -> float:
    """Standard deviation of the weight matrix ``name``, of ``num_inputs`` columns, in a model of any width.

    Each layer's outputs are then as wide as in the small models, and greedy text as varied.
    """
    return (MLP_OUT_STD if name.endswith(_MLP_OUT) else WEIGHT_STD) * (_INPUTS / num_inputs) ** 0.5


def _configuration(model_type: str, config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    settings = {**_SMALL, "vocab_size": VOCAB_SIZE, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    return AutoConfig.for_model(model_type, **{**settings, **config})
