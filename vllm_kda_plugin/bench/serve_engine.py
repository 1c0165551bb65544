"""One of the engines that ``vllm-kda bench serve`` compares: vLLM's, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from vllm_kda_plugin.bench.serve_worker import WorkerExtension
from vllm_kda_plugin.machine import NAMES

_SEED = 20
_STOP_TIMEOUT_S = 20.0
_END_TIMEOUT_S = 5.0
_OURS = "vllm_kda_plugin."
_EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
# Of two engines that share a GPU. Each counts the other's memory as taken, so twice this must leave some.
MEMORY_SHARE = 0.45


class BenchError(RuntimeError):
    """An engine does not start, or does not do what is to be measured."""


def prepare_environment(offline: bool) -> None:
    """Set what vLLM reads when it is imported. Variables that are set stay, but engines get their own process.

    Args:
        offline: the model is on disk, so that no hub need be asked.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    wanted |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def end_engines() -> None:
    """End this process's children and theirs, whatever they are doing."""
    import psutil  # type: ignore[import-untyped, unused-ignore]

    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    for child in psutil.wait_procs(children, timeout=_END_TIMEOUT_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            # Python's own one ends with us, and tidies up after the others.
            if not any("resource_tracker" in argument for argument in child.cmdline()):
                child.kill()


class Engine:
    """vLLM with one attention backend.

    Args:
        backend: a value of ``--attention-backend``.
        randomize: replace the weights, which must be of a dummy load, by random ones that are the same each time.
        settings: arguments of ``vllm.LLM``.

    Raises:
        BenchError: it does not start.
    """

    def __init__(self, backend: str, randomize: bool, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.backend = backend
        try:
            # The prefix cache would answer for a prompt that is sent to the engine again.
            self._llm = LLM(
                attention_backend=backend,
                worker_extension_cls=_EXTENSION,
                enable_prefix_caching=False,
                disable_log_stats=False,
                skip_tokenizer_init=True,
                use_tqdm_on_load=False,
                **settings,
            )
        except Exception as error:  # whatever it is, the engine's own lines explain it
            raise BenchError(f"vLLM did not start with {backend}: {error}") from error
        self.vocab_size: int = self._llm.llm_engine.model_config.get_vocab_size()
        if randomize:
            self._llm.collective_rpc("kda_randomize", args=(_SEED,))

    def first_token(self, prompt: Sequence[int]) -> tuple[float, list[int]]:
        """Seconds from handing over token ids to holding the first greedy token, and that token."""
        begin = time.perf_counter()
        (output,) = self._generate([prompt], 1)
        return time.perf_counter() - begin, list(output.outputs[0].token_ids)

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        """Greedy tokens a second of requests that decode together, and the ``num_tokens`` tokens of each.

        Timed by the engine, from a request's first token to its last, and the median request counts: the engine
        may start on the first ones before it has them all.
        """
        outputs = self._generate(prompts, num_tokens)
        spans = [output.metrics.last_token_ts - output.metrics.first_token_ts for output in outputs]
        speed = len(prompts) * (num_tokens - 1) / statistics.median(spans)
        return speed, [list(output.outputs[0].token_ids) for output in outputs]

    def attention(self) -> dict[str, Any]:
        """Classes and counters of the engine's attention, see :class:`WorkerExtension`.

        Raises:
            BenchError: another backend ran than was asked for; vLLM may choose one without a word.
        """
        found: dict[str, Any] = self._llm.collective_rpc("kda_attention")[0]
        ran = [name for name in found["classes"] if name.startswith(_OURS)]
        if self.backend in NAMES:
            # Layers that the backend does not do, such as MLA, are the platform's.
            as_asked = bool(ran) and found["stats"]["implementation"].startswith(_OURS)
        else:
            as_asked = not ran and self.backend in found["backends"]
        if not as_asked:
            raise BenchError(f"{self.backend} was asked for, but vLLM ran {', '.join(found['classes'])}")
        return found

    def close(self) -> None:
        """End the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown(timeout=_STOP_TIMEOUT_S)

    def _generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return list(self._llm.generate(asked, sampling, use_tqdm=False))
