"""Runs vLLM's engine in this process and says what ran."""

from __future__ import annotations

import dataclasses
import gc
import random
from typing import Any

from vllm_kda_plugin.attention.stats import STATS

IMPLEMENTATION = "vllm_kda_plugin.attention.impl.GatherTorchImpl"


@dataclasses.dataclass
class Run:
    """What an engine did: token ids of each prompt of each round, and which attention ran."""

    rounds: list[list[list[int]]]
    cached_tokens: list[int]
    """Prompt tokens found in the prefix cache, summed over the prompts of each round."""
    preemptions: int
    implementations: set[str]
    """Class names of the attention layers' implementations."""
    gathers: int
    """Gathers that our implementation did."""

    @property
    def tokens(self) -> list[list[int]]:
        return self.rounds[-1]


def prompts(count: int, longest: int, seed: int = 0, shortest: int = 1) -> list[str]:
    """Varied printable prompts; a byte of text is a token."""
    rng = random.Random(seed)
    alphabet = [chr(c) for c in range(32, 127)]
    return ["".join(rng.choices(alphabet, k=rng.randint(shortest, longest))) for _ in range(count)]


def run(
    model: str,
    texts: list[str],
    *,
    backend: str | None,
    max_tokens: int = 64,
    rounds: int = 1,
    repetition_penalty: float = 1.0,
    **engine: Any,
) -> Run:
    """Generate greedily in float32, ``rounds`` times over, in a fresh engine that is torn down again.

    Args:
        model: a folder.
        texts: the prompts.
        backend: ``attention_backend`` of the engine, None for vLLM's own choice.
        max_tokens: generated for each prompt.
        rounds: how often the same prompts are sent, one batch after the other.
        repetition_penalty: above 1, keeps a model that falls into a loop from repeating itself.
        engine: further arguments of ``vllm.LLM``.
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False,
        "attention_backend": backend,
        **engine,
    }
    gathers = STATS.gathers
    llm = LLM(model, **settings)
    try:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        implementations = {_class_name(type(layer.impl)) for layer in layers if hasattr(layer, "impl")}
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, repetition_penalty=repetition_penalty
        )
        tokens, cached = [], []
        for _ in range(rounds):
            outputs = llm.generate(texts, sampling, use_tqdm=False)
            tokens.append([list(output.outputs[0].token_ids) for output in outputs])
            cached.append(sum(output.num_cached_tokens or 0 for output in outputs))
        preemptions = sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    return Run(tokens, cached, preemptions, implementations, STATS.gathers - gathers)


def _class_name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
