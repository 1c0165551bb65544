"""The real engine on CUDA: CUSTOM gives the tokens of vLLM's FLASH_ATTN, in bfloat16, with CUDA graphs."""

from __future__ import annotations

import os
import pathlib
from typing import Any

# Read when vLLM is imported: the engine in this process, no network, no usage report.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import pytest

from tests.support.engine import Run, prompts, run
from vllm_kda_plugin.tiny_model import write_model

BACKENDS = {
    "FLASH_ATTN": "vllm.v1.attention.backends.flash_attn.FlashAttentionImpl",
    "CUSTOM": "vllm_kda_plugin.attention.flash.GatherFlashAttentionImpl",
    "GATHER_FLASH_ATTN": "vllm_kda_plugin.attention.flash.GatherFlashAttentionImpl",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_model(tmp_path_factory.mktemp("model"))


def generate(model: pathlib.Path, backend: str, texts: list[str], **settings: Any) -> Run:
    ran = run(str(model), texts, backend=backend, **{"dtype": "bfloat16", "enforce_eager": False, **settings})
    assert ran.implementations == {BACKENDS[backend]}
    return ran


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 64, "max_num_seqs": 16}, {"rounds": 2, "block_size": 32}],
    ids=["plain", "chunked prefill", "prefix cache"],
)
def test_tokens_of_stock(model: pathlib.Path, settings: dict[str, Any]) -> None:
    texts = prompts(16, 400)
    stock = generate(model, "FLASH_ATTN", texts, **settings)
    assert all(len(set(tokens)) >= 20 for tokens in stock.tokens)
    for name in ("CUSTOM", "GATHER_FLASH_ATTN"):
        assert generate(model, name, texts, **settings).rounds == stock.rounds
