"""Runs vLLM's engine in this process and says what ran."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
from collections.abc import Iterator
from typing import Any

import torch

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
    fresh_calls: int
    """Its attention calls on a step's own K and V."""
    logprobs: list[list[list[dict[int, float]]]]
    """Like ``rounds``, of each token the likeliest candidates' log-probabilities; empty if not asked for."""
    prompt_tokens: list[list[int]]
    """Token ids of the prompts themselves."""
    kda_layers: set[str]
    """Class name and provider of the KDA layers that are ours."""
    kda_prefills: int
    """Batches that the KDA layer that ran fewest ran on our path."""

    @property
    def tokens(self) -> list[list[int]]:
        return self.rounds[-1]


def prompts(count: int, longest: int, seed: int = 0, shortest: int = 1) -> list[str]:
    """Varied printable prompts; a byte of text is a token."""
    rng = random.Random(seed)
    alphabet = [chr(c) for c in range(32, 127)]
    return ["".join(rng.choices(alphabet, k=rng.randint(shortest, longest))) for _ in range(count)]


@contextlib.contextmanager
def engine(model: str, backend: str | None, **settings: Any) -> Iterator[Any]:
    """A fresh ``vllm.LLM`` in this process, torn down again; small and in float32 unless ``settings`` say otherwise.

    Args:
        model: a folder.
        backend: ``attention_backend`` of the engine, None for vLLM's own choice.
        settings: further arguments of ``vllm.LLM``.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    small: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False,
    }
    if torch.cuda.is_available():
        small["gpu_memory_utilization"] = 0.1  # what must be free at the start: tests can run side by side
    llm = LLM(model, **{**small, "attention_backend": backend, **settings})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()  # whoever still holds the engine holds no memory of the device
        del llm
        gc.collect()
        new_graph_pool()
        cleanup_dist_env_and_memory()


def new_graph_pool() -> None:
    """The next engine in this process captures into a pool of its own.

    Torch ends a capture into a pool whose graphs are all gone, and vLLM has one pool for a process.
    """
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None


def implementations(llm: Any) -> set[str]:
    """Class names of the attention layers' implementations of an engine in this process."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return {_class_name(type(layer.impl)) for layer in layers if hasattr(layer, "impl")}


def run(
    model: str,
    texts: list[str],
    *,
    backend: str | None,
    max_tokens: int = 64,
    rounds: int = 1,
    repetition_penalty: float = 1.0,
    logprobs: int | None = None,
    locked: bool = False,
    **settings: Any,
) -> Run:
    """Generate greedily, ``rounds`` times over, in an engine of its own.

    Args:
        model: a folder.
        texts: the prompts.
        backend: as for :func:`engine`.
        max_tokens: generated for each prompt.
        rounds: how often the same prompts are sent, one batch after the other.
        repetition_penalty: above 1, keeps a model that falls into a loop from repeating itself.
        logprobs: how many candidates of each token to keep.
        locked: lock vLLM's workspace once the engine has started, as it does itself after capturing CUDA graphs.
        settings: as for :func:`engine`.
    """
    from vllm import SamplingParams

    gathers, fresh_calls = STATS.gathers, STATS.fresh_calls
    with engine(model, backend, **settings) as llm, _workspace_locked(llm, locked):
        ran = implementations(llm)
        kda_layers = {f"{type(layer).__name__}: {layer.provider.name}" for layer in _ours(llm)}
        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            repetition_penalty=repetition_penalty,
            logprobs=logprobs,
        )
        tokens, cached, kept, prompt_tokens = [], [], [], []
        for _ in range(rounds):
            outputs = llm.generate(texts, sampling, use_tqdm=False)
            tokens.append([list(output.outputs[0].token_ids) for output in outputs])
            prompt_tokens = [list(output.prompt_token_ids) for output in outputs]
            cached.append(sum(output.num_cached_tokens or 0 for output in outputs))
            kept.append([candidates(output) for output in outputs])
        kda_prefills = min((layer.prefills for layer in _ours(llm)), default=0)
        preemptions = sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    return Run(
        tokens,
        cached,
        preemptions,
        ran,
        STATS.gathers - gathers,
        STATS.fresh_calls - fresh_calls,
        kept,
        prompt_tokens,
        kda_layers,
        kda_prefills,
    )


@contextlib.contextmanager
def _workspace_locked(llm: Any, locked: bool) -> Iterator[None]:
    if locked:
        llm.collective_rpc(_lock_workspace)
    yield
    if locked:
        llm.collective_rpc(_unlock_workspace)


def candidates(output: Any) -> list[dict[int, float]]:
    """Log-probabilities by token, for each token of a ``RequestOutput``; empty if none were asked for."""
    return [{token: said.logprob for token, said in place.items()} for place in output.outputs[0].logprobs or []]


def _lock_workspace(worker: Any) -> None:
    from vllm.v1.worker.workspace import lock_workspace

    lock_workspace()


def _unlock_workspace(worker: Any) -> None:
    from vllm.v1.worker.workspace import unlock_workspace

    unlock_workspace()


def _ours(llm: Any) -> list[Any]:
    """KDA layers that are ours."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "provider")]


def _class_name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
