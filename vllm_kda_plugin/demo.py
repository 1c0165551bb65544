"""``vllm-kda demo``: stock vLLM serves a small model through our attention backend, start to finish."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import shutil
import signal
import tempfile
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vllm_kda_plugin.serving import Server, ServerError
from vllm_kda_plugin.tiny_model import write_model

if TYPE_CHECKING:
    from openai import OpenAI

# Far fewer tokens a step than the long prompt has, so that its prefill takes several steps.
CHUNK_TOKENS = 256
MAX_TOKENS = 48
_SERVE = ["--attention-backend", "CUSTOM", "--max-model-len", "2048", "--max-num-batched-tokens", str(CHUNK_TOKENS)]
_SERVE += ["--enable-prompt-tokens-details"]
# The CPU build compiles for minutes otherwise, and takes most of the memory for its KV cache.
_SERVE_CPU = ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
_SERVE_GPU = ["--dtype", "bfloat16"]

# The small model's tokenizer makes one token of each byte, so these 1,404 characters are 1,404 tokens.
_STORY = "".join(f"On day {day:02d} the ship logged {day * 37 % 90:02d} knots and clear skies. " for day in range(27))
PROMPTS = {
    "short, and the engine's first": "Where does a long prompt spend its time?",
    "long, prefill in chunks": _STORY + "When was it fastest?",
    "same start, prefix cache": _STORY + "How many days passed?",
}


@dataclasses.dataclass
class Completion:
    """One completion; ``first_token_s`` is seconds from the request to its first token."""

    title: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float


class DemoError(RuntimeError):
    """The server ran, but not as the demo promises."""


def run() -> int:
    """Run the demo and print its result; returns the exit code for the shell."""
    console = Console()
    errors = Console(stderr=True)
    # Told to end, we end as on Ctrl-C: the exception unwinds the `with` that owns the server.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has us ignore it
        signal.signal(signal.SIGHUP, _hang_up)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="vllm-kda-demo-"))
    log = folder / "server.log"
    try:
        _show(console, folder, log)
    except (ServerError, DemoError) as error:
        errors.print(f"[bold red]The demo failed.[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        shutil.rmtree(folder / "model", ignore_errors=True)  # the log stays
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        errors.print("Interrupted; no server is left running.")
        return 130
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _hang_up(number: int, frame: FrameType | None) -> NoReturn:
    """The terminal was closed: end as on Ctrl-C, but say nothing, for printing would fail."""
    signal.signal(number, signal.SIG_IGN)  # the shell and the kernel both send it
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    raise KeyboardInterrupt


def _show(console: Console, folder: pathlib.Path, log: pathlib.Path) -> None:
    on_cpu = vllm_is_cpu_build()
    with console.status("Writing a small model to disk ..."):
        model = _model(folder / "model")
    console.print(f"Wrote a small model with random weights to {model}.", highlight=False, soft_wrap=True)

    args = _SERVE + (_SERVE_CPU if on_cpu else _SERVE_GPU)
    console.print(Text(f"Starting: vllm serve MODEL {' '.join(args)}"), soft_wrap=True)
    with console.status("") as status:

        def waiting(passed_s: float) -> None:
            status.update(f"Waiting for the server, {passed_s:.0f} s (it takes 30 s to 3 minutes) ...")

        server = Server(model, log, args, env={"VLLM_KDA_LOG_STATS": "1"}, on_wait=waiting)
        with server:
            console.print(f"The server answers at {server.base_url}.", highlight=False)
            status.update("Sending completions ...")
            completions = _ask(server)
            status.update("Ending the server ...")
    _print_completions(console, completions)
    _print_counters(console, server.stats())
    check(completions, server, gathers=on_cpu)
    if not on_cpu:
        console.print("On CUDA this version does not gather yet, so only the class that ran was checked.")
    console.print("[bold green]vLLM served the model through our backend.[/]")


def _model(folder: pathlib.Path) -> pathlib.Path:
    try:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        return write_model(folder)
    except (ImportError, RuntimeError) as error:  # torch or transformers missing, or unfit for each other
        raise DemoError(f"Could not write a small model ({error}); `vllm-kda doctor` says what to fix.") from error


def vllm_is_cpu_build() -> bool:
    """Whether vLLM would run on the CPU here, by vLLM's own rule: "cpu" in its version."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError as error:
        raise DemoError("vLLM is not installed for this Python; `vllm-kda doctor` says what to install.") from error


def check(completions: list[Completion], server: Server, *, gathers: bool) -> None:
    """Raise DemoError unless our class ran in the engine, the prefix cache was hit and, if wanted, it gathered."""
    stats = server.stats()
    tail = f"The server's last lines:\n{server.tail()}"
    if not any(counters["implementation"].startswith("vllm_kda_plugin.") for counters in stats):
        raise DemoError(f"No engine process reported that our attention backend ran. {tail}")
    if gathers and not sum(counters["gathers"] for counters in stats):
        raise DemoError(f"Our attention backend ran but gathered nothing. {tail}")
    if not completions[-1].cached_tokens:
        raise DemoError(f"The repeated prompt did not hit the prefix cache. {tail}")


def _ask(server: Server) -> list[Completion]:
    # One client for all: to import and build it takes longer than a first token does.
    with _client(server) as client:
        return [_complete(client, server, title, prompt) for title, prompt in PROMPTS.items()]


def _complete(client: OpenAI, server: Server, title: str, prompt: str) -> Completion:
    text, usage, first_token_s = "", None, 0.0
    try:
        start = time.perf_counter()
        for part in _stream(client, server.model, prompt):
            if part.choices:
                first_token_s = first_token_s or time.perf_counter() - start
                text += part.choices[0].text
            usage = part.usage or usage
    except Exception as error:  # whatever it is, the lines of the server explain it
        raise DemoError(f"Request '{title}' failed: {error}\nThe server's last lines:\n{server.tail()}") from error
    if usage is None:
        raise DemoError(f"Request '{title}' ended without usage figures.\nThe server's last lines:\n{server.tail()}")
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    return Completion(title, text, usage.prompt_tokens, cached or 0, first_token_s)


def _client(server: Server) -> OpenAI:
    import httpx
    from openai import OpenAI

    # trust_env=False: the loopback never goes through a proxy, whatever http_proxy says.
    http = httpx.Client(trust_env=False, timeout=300)
    return OpenAI(base_url=f"{server.base_url}/v1", api_key="none", http_client=http, max_retries=0)


def _stream(client: OpenAI, model: str, prompt: str) -> Any:
    return client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )


def _print_completions(console: Console, completions: list[Completion]) -> None:
    console.print("\nCompletions (the weights are random, so the text means nothing):")
    for done in completions:
        console.print(
            f"  [bold]{done.title}[/]: {done.prompt_tokens} prompt tokens, {done.cached_tokens} of them cached, "
            f"first token after {done.first_token_s * 1000:.1f} ms",
            soft_wrap=True,
        )
        # repr: random bytes must not reach the terminal as control characters.
        console.print(Text(f"    {done.text!r}", "dim"), soft_wrap=True)


def _print_counters(console: Console, stats: list[dict[str, Any]]) -> None:
    for counters in stats:
        table = Table(title=f"Attention in engine process {counters['pid']}", title_justify="left", show_header=False)
        table.add_row("class that ran", Text(counters["implementation"], overflow="fold"))
        table.add_row("gathers done", f"{counters['gathers']:,}")
        table.add_row("tokens gathered", f"{counters['gathered_tokens']:,}")
        table.add_row("bytes gathered (K and V)", f"{counters['gathered_bytes']:,}")
        console.print()
        console.print(table)
