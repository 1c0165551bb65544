"""Kinds of attention beside plain decoding: encoder-only, cross attention, layers that share a cache."""

from __future__ import annotations

import gc
import json
import pathlib
import random
from typing import Any

import pytest
import torch

from tests.engine.conftest import ModelFactory
from tests.engine.test_tokens import batching, check
from tests.support.engine import prompts
from vllm_kda_plugin.attention.impl import GatherTorchImpl
from vllm_kda_plugin.tiny_model import VOCAB_SIZE, write_tokenizer


def randomise(model: torch.nn.Module, small: str = "nothing") -> None:
    """Weights wide enough for varied output; those whose name holds ``small`` stay narrow."""
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.01 if small in name else 0.2)


def engine(model: pathlib.Path, backend: str | None, **settings: Any) -> tuple[Any, set[type]]:
    """An engine and the classes of its attention layers' implementations."""
    from vllm import LLM

    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=128 << 20,
        attention_backend=backend,
        **settings,
    )
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return llm, {type(layer.impl) for layer in layers}


def shut_down() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def test_encoder_only(tmp_path: pathlib.Path) -> None:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(
        "bert",
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=VOCAB_SIZE,
        pad_token_id=VOCAB_SIZE - 1,
    )
    model = AutoModel.from_config(config)
    randomise(model)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    rng = random.Random(0)
    texts = [{"prompt_token_ids": rng.choices(range(256), k=rng.randint(1, 200))} for _ in range(10)]

    def embed(backend: str | None) -> tuple[torch.Tensor, set[type]]:
        llm, implementations = engine(tmp_path, backend, runner="pooling", max_model_len=512)
        embeddings = torch.tensor([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])
        del llm
        shut_down()
        return embeddings, implementations

    stock, _ = embed(None)
    ours, implementations = embed("CUSTOM")
    assert implementations == {GatherTorchImpl}
    assert (stock[0] - stock[1]).norm() > 0.1, "embeddings too alike to prove anything"
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)


def test_cross_attention(tmp_path: pathlib.Path) -> None:
    import numpy as np
    from transformers import AutoConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    config = AutoConfig.for_model(
        "whisper",
        d_model=256,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        vocab_size=VOCAB_SIZE,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        decoder_start_token_id=256,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    randomise(model, small="embed_tokens")
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "WhisperProcessor"}))
    noise = np.random.default_rng(0)
    inputs = [
        {
            "encoder_prompt": {
                "prompt": "",
                "multi_modal_data": {"audio": (noise.standard_normal(16000 * seconds).astype("float32"), 16000)},
            },
            "decoder_prompt": {"prompt_token_ids": [256] + [65 + seconds] * 4},
        }
        for seconds in (1, 5, 9)
    ]

    def transcribe(backend: str | None) -> tuple[list[list[int]], set[type]]:
        from vllm import SamplingParams

        llm, implementations = engine(tmp_path, backend, max_model_len=448)
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.5)
        tokens = [list(output.outputs[0].token_ids) for output in llm.generate(inputs, sampling, use_tqdm=False)]
        del llm
        shut_down()
        return tokens, implementations

    stock, _ = transcribe(None)
    ours, implementations = transcribe("CUSTOM")
    assert all(issubclass(implementation, GatherTorchImpl) for implementation in implementations)
    assert len(implementations) == 2  # decoder self-attention, and vLLM's subclass for cross attention
    assert ours == stock
    assert all(len(set(tokens)) >= 20 for tokens in ours)


@pytest.mark.parametrize("fast_prefill", [False, True], ids=["every layer", "fast prefill"])
@pytest.mark.parametrize("budget", [None, 48], ids=["whole", "chunked"])
def test_layers_that_share_a_cache(model: ModelFactory, budget: int | None, fast_prefill: bool) -> None:
    path = model(
        "gemma4_text",
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 3,
        global_head_dim=64,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB_SIZE,
    )
    settings = {**batching(budget), "kv_sharing_fast_prefill": fast_prefill}
    check(path, prompts(6, 300, shortest=80), **settings)


@pytest.mark.parametrize("budget", [None, 48], ids=["whole", "chunked"])
def test_chunked_local_attention(model: ModelFactory, budget: int | None) -> None:
    """vLLM cuts the requests of such layers into virtual ones, in a subclass of our builder."""
    path = model(
        "llama4_text",
        attention_chunk_size=64,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=256,
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=True,
    )
    check(path, prompts(6, 300, shortest=80), block_size=32, **batching(budget))
