"""Whether the tests would notice: key lines are changed one at a time, and some test must fail each time.

    python tests/mutations.py            # all of them, some minutes
    python tests/mutations.py --list
    python tests/mutations.py NAME...

Each mutation is applied to a copy of the checkout of its own. Before that its tests must pass on an unchanged copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("vllm_kda_plugin", "csrc", "tests", "docs")
TIME_LIMIT = 900  # seconds of the tests of one mutation, or of all that are unchanged

GATHER = ("tests/unit/test_gather.py", "tests/unit/test_gather_torch.py")
PLAN = ("tests/unit/test_gather_plan.py",)
PLANNER = ("tests/unit/test_planner.py",)
STEPS = ("tests/unit/test_steps.py",)
SDPA = ("tests/unit/test_sdpa.py",)
LAYER = ("tests/engine/test_layer.py",)
PREFILL = ("tests/unit/test_kda_prefill.py",)
REFERENCE = ("tests/unit/test_kda_reference.py",)
WORKSPACE = ("tests/engine/test_kda_layer.py",)
NATIVE = ("tests/unit/test_kda_native.py",)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A wrong line, and the tests of which one must notice."""

    name: str
    file: str
    old: str
    """In the file exactly once."""
    new: str
    tests: tuple[str, ...]


def _of(file: str, tests: tuple[str, ...], *changes: tuple[str, str, str]) -> list[Mutation]:
    stem = Path(file).stem
    return [Mutation(f"{stem}: {name}", file, old, new, tests) for name, old, new in changes]


MUTATIONS = [
    *_of(
        "vllm_kda_plugin/kernels/gather_torch.py",
        GATHER,
        ("sign of the offset", "stride // step) + (slots - block", "stride // step) - (slots - block"),
        ("heads apart", "device=slots.device) * (head_stride // step)", "device=slots.device) * head_stride"),
        ("slot 0 is none", "wanted = slots >= 0", "wanted = slots > 0"),
        ("sign of the position", "(starts - ends + lens)[request]", "(starts + ends - lens)[request]"),
        ("a table just wide enough", "if longest > max_blocks * block_size:", "if longest >= max_blocks * block_size:"),
        ("a slot past the cache", "most >= num_blocks * block_size:", "most > num_blocks * block_size:"),
        ("rounded twice", "towards_zero.view(torch.int32) | inexact", "nearest.view(torch.int32)"),
    ),
    *_of(
        "vllm_kda_plugin/kernels/gather.py",
        GATHER,
        ("a slot past the cache", "(slot_mapping >= num_slots)", "(slot_mapping > num_slots)"),
        ("a slot of -2", "(slot_mapping < -1)", "(slot_mapping < -2)"),
        ("cu_seqlens that fall by one", "cu_seqlens_k.diff() < 0", "cu_seqlens_k.diff() < -1"),
        ("cu_seqlens that start late", "if first != 0:", "if first < 0:"),
        ("a row too few", "if total > rows:", "if total > rows + 1:"),
        ("as many rows as needed", "if total > rows:", "if total >= rows:"),
        ("a block past the cache", "(slots >= num_blocks * block_size)", "(slots > num_blocks * block_size)"),
    ),
    *_of(
        "vllm_kda_plugin/kernels/gather_plan.py",
        PLAN,
        ("a block too few", "-(-num_rows * token_vecs // (threads", "(num_rows * token_vecs // (threads"),
        ("alignment of outputs", "vector = math.gcd(16, cache_step, out_step)", "vector = math.gcd(16, cache_step)"),
        ("one scale for all heads", "one_run and not conversion:", "one_run:"),
        (
            "V has strides of its own",
            "planes[0].byte_strides != planes[1].byte_strides",
            "planes[0].out != planes[1].out",
        ),
        ("division rounded down", "multiplier = -(-(1 << shift) // number)", "multiplier = (1 << shift) // number"),
        ("the last piece of a token", "-(-token_vecs // pieces), pieces", "token_vecs // pieces, pieces"),
    ),
    *_of(
        "vllm_kda_plugin/attention/planner.py",
        PLANNER,
        ("sign of the margin", "step_us(chosen) > (1 - _MARGIN)", "step_us(chosen) > (1 + _MARGIN)"),
        ("sign of a request's margin", 'weighed["paged"] *= 1 - _MARGIN', 'weighed["paged"] *= 1 + _MARGIN'),
        ("the dearer one", "stock if step_us(chosen) > (1", "stock if step_us(chosen) < (1"),
        ("alone, sign of the margin", 'step_us(["fresh"]) < (1 - _MARGIN)', 'step_us(["fresh"]) < (1 + _MARGIN)'),
        ("what just fits is cut", "if keys <= self.capacity:", "if keys < self.capacity:"),
        ("what does not fit is whole", "if keys <= self.capacity:", "if keys <= self.capacity + 1:"),
        ("partial results take no room", "self.workspace_bytes - self.partial_bytes(query))", "self.workspace_bytes)"),
        ("parts begin within a page", "return room - room % self.layer.page_size if", "return room if"),
        ("calls are free", "0.0 if first else measured.call_us)", "0.0)"),
        ("keys of a window", "else min(context, self.window))", "else min(context, self.window + 1))"),
        ("gain and cost", "* penalty > gather_us", "* penalty < gather_us"),
        ("a gather is free", "moved / (measured.gather_tbps * 1e6) + extra", "extra"),
    ),
    *_of(
        "vllm_kda_plugin/attention/steps.py",
        STEPS,
        ("what just fits is apart", "tokens + keys > planner.capacity:", "tokens + keys >= planner.capacity:"),
        ("one token too many", "tokens + keys > planner.capacity:", "tokens + keys > planner.capacity + 1:"),
        ("keys before the first", "starts = [end - length for", "starts = [end - length + 1 for"),
        ("the last key of the context", "range(0, context, room), start=1", "range(0, context - 1, room), start=1"),
        ("keys past the context", "[min(room, context - start)], part)", "[room], part)"),
        ("the last request of a run", "slice(at, at + int(used[-1]) + 1)", "slice(at, at + int(used[-1]))"),
        ("verifications are prefills", "queries > (0 if", "queries >= (0 if"),
        ("heads of a part", "size = -(-total // parts)", "size = total // parts"),
    ),
    *_of(
        "vllm_kda_plugin/attention/calls.py",
        STEPS,
        ("context is causal", "causal=not context,", "causal=True,"),
        ("the sink counts twice", "s_aux=None if context else sinks,", "s_aux=sinks,"),
        ("sums written where they are read", "merged = ready.sums[part % 2]", "merged = ready.sums[0]"),
        ("query heads of a part", "slice(call.kv_heads.start * group,", "slice(call.kv_heads.start,"),
    ),
    *_of(
        "vllm_kda_plugin/attention/metadata.py",
        LAYER,
        ("a window's first key", "context - self.window + 1)", "context - self.window + 2)"),
        ("a key before the window", "context - self.window + 1)", "context - self.window)"),
        ("what just fits is apart", "num_keys > self.max_gather_tokens:", "num_keys >= self.max_gather_tokens:"),
        ("one token too many", "num_keys > self.max_gather_tokens:", "num_keys > self.max_gather_tokens + 1:"),
        ("padding is a request", "if num_queries == 0:", "if num_queries < 0:"),
    ),
    *_of(
        "vllm_kda_plugin/attention/impl.py",
        LAYER,
        ("a window of one more", "return (sliding_window - 1, ", "return (sliding_window, "),
        ("slots of -1 are written", "kept = slot_mapping >= 0", "kept = slot_mapping >= -1"),
    ),
    *_of(
        "vllm_kda_plugin/attention/sdpa.py",
        SDPA,
        ("causal offset", "first, last = context + tile.start,", "first, last = context + tile.start + 1,"),
        ("the query's own key", "min(end, last + right + 1)", "min(end, last + right)"),
        ("the last key of a window", "hidden |= distance < -left", "hidden |= distance <= -left"),
        ("the first key of a window", "max(first_key, first - left)", "max(first_key, first - left + 1)"),
        ("the diagonal", "hidden |= distance > right", "hidden |= distance >= right"),
        ("square, but later", "square = causal and context == first_key and", "square = causal and"),
        ("all seen, strictness", "first + right >= high - 1)", "first + right >= high - 2)"),
        ("rows past the window", "end + left - context)", "end + left - context - 1)"),
        ("the sink's sign", "sinks = self.sinks.to(logits.dtype)", "sinks = -self.sinks.to(logits.dtype)"),
    ),
    *_of(
        "vllm_kda_plugin/kda/prefill.py",
        PREFILL,
        ("any strides of tokens", 'or (strides and _lies_apart(tensor, "heads" in strides))):', "or strides):"),
        ("any batch stride", "if not (tensor.is_contiguous() or", "if not (tensor[-1:].is_contiguous() or"),
        ("tokens that overlap", "tensor.stride(1) >= token.numel())", "tensor.stride(1) > 0)"),
        (
            "cu_seqlens that fall by one",
            "if bounds[0] != 0 or min(lens, default=0) < 0",
            "if bounds[0] != 0 or min(lens, default=0) < -1",
        ),
        ("cu_seqlens that start late", "if bounds[0] != 0 or", "if bounds[0] < 0 or"),
        ("a token too many", "bounds[-1] > num_tokens:", "bounds[-1] > num_tokens + 1:"),
        ("as many tokens as there are", "bounds[-1] > num_tokens:", "bounds[-1] >= num_tokens:"),
        ("a byte too few", "if a.workspace.numel() < need:", "if a.workspace.numel() < need - 1:"),
        ("as many bytes as needed", "if a.workspace.numel() < need:", "if a.workspace.numel() <= need:"),
        ("parts of the workspace overlap", "self.used += _round_up(size)", "self.used += size // 2"),
        (
            "neighbours in memory",
            "start < ends[name][1] and ends[name][0] < end:",
            "start <= ends[name][1] and ends[name][0] <= end:",
        ),
        ("a checkpoint past the end", "not 0 <= at <= length", "not 0 <= at <= length + 1"),
        ("a row past the pool", "all(0 <= row < num_rows for", "all(0 <= row <= num_rows for"),
        ("a longer sequence than said", "max(lens, default=0) > max_seqlen:", "max(lens, default=0) > max_seqlen + 1:"),
    ),
    *_of(
        "vllm_kda_plugin/kda/reference.py",
        REFERENCE,
        ("sign of the error", "update[begin:end] -= reading", "update[begin:end] += reading"),
        ("cu_seqlens that fall by one", "min(lens, default=0) < 0", "min(lens, default=0) < -1"),
        ("the checkpoint's token", "offsets[n] == token + 1:", "offsets[n] == token:"),
        ("padding of a chunk", "row < size", "row <= size"),
    ),
    *_of(
        "vllm_kda_plugin/kda/workspace.py",
        WORKSPACE,
        (
            "a token too few",
            "sizes = self.max_tokens, self.max_sequences",
            "sizes = self.max_tokens - 1, self.max_sequences",
        ),
        (
            "a state too few",
            "sizes = self.max_tokens, self.max_sequences",
            "sizes = self.max_tokens, self.max_sequences - 1",
        ),
        ("the largest step is refused", "0 <= num_tokens <= self.max_tokens", "0 <= num_tokens < self.max_tokens"),
        (
            "a larger step is allowed",
            "num_sequences <= self.max_sequences)",
            "num_sequences <= self.max_sequences + 1)",
        ),
        ("whose states are reserved", "final_state=not self.provider.pools,", "final_state=self.provider.pools,"),
    ),
    *_of(
        "csrc/kda_prefill_sm90.cu",
        NATIVE,
        (
            "a token past the sequence is read",
            "copy_async(tile + row * kRow, from, row < left)",
            "copy_async(tile + row * kRow, from, row <= left)",
        ),
        ("a token past the sequence is written", "if (token < work.tokens) {", "if (token <= work.tokens) {"),
        ("gates past the sequence", "word(stage.g, row, thread) = kClosed;", "word(stage.g, row, thread) = 0;"),
        ("the diagonal of M", "const bool first = column <= row,", "const bool first = column < row,"),
        ("the diagonal blocks of L", "at[0] = column + i < row ?", "at[0] = column + i + 1 < row ?"),
        ("no barrier before the products", "    ptx::barrier(1 + pair, 64);\n    // By the same", "    // By the same"),
        ("the ring is not waited for", "(chunk / kStages - 1) & 1", "(chunk / kStages) & 1"),
        ("a row past the pool", "if (row >= 0 && row < args.num_rows) {", "if (row >= 0 && row <= args.num_rows) {"),
        ("the checkpoint's chunk", "offset / kChunk - 1 - work.first_chunk", "offset / kChunk - work.first_chunk"),
        ("the last segment", "work.is_last = !tokens || left <= tokens;", "work.is_last = !tokens || left < tokens;"),
        ("the first sequence of a number", "tokens, plus_one) <= number;", "tokens, plus_one) < number;"),
        ("three segments", "if (segments < 3) return;", "if (segments < 4) return;"),
        ("what the states before leave", "sums[tile][0][i] + (sums[tile][1][i] +", "(sums[tile][1][i] +"),
    ),
]


def copy_checkout(to: Path) -> Path:
    """What tests read, without what builds and runs left there."""
    to.mkdir()
    built = shutil.ignore_patterns("__pycache__", ".*")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, to / folder, ignore=built)
    for leftover in ("fatbin", "csrc"):
        shutil.rmtree(to / "vllm_kda_plugin" / "kernels" / leftover, ignore_errors=True)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, to)
    return to


def mutate(tree: Path, mutation: Mutation) -> None:
    """Apply it.

    Raises:
        ValueError: its old text is not in the file exactly once.
    """
    file = tree / mutation.file
    text = file.read_text(encoding="utf-8")
    if (found := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: {mutation.old!r} is in {mutation.file} {found} times, must be once")
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def run_tests(tree: Path, tests: Sequence[str], output: Path) -> int | None:
    """Exit status of pytest, which ends at the first failure; None if it did not end in time."""
    # One thread: the tensors are small, and other threads only wait.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    with output.open("w", encoding="utf-8") as file:
        try:
            return subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=tree,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=TIME_LIMIT,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def verdict(status: int | None, output: str) -> tuple[bool, str]:
    """Whether a mutation was noticed, and what is said of it."""
    if status == 0:
        return False, "survived"
    if status not in (1, None):  # nothing was collected, or a wrong argument
        return False, f"pytest ended with {status}: {output.strip().splitlines()[-1]}"
    if status is None:
        return True, "no end"
    failed = [line.split(" - ")[0].partition("::")[2] for line in output.splitlines() if line.startswith("FAILED ")]
    return True, ", ".join(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 if a mutation survives."""
    parser = argparse.ArgumentParser(description="Change key lines one at a time; some test must fail each time.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only mutations whose name holds this")
    parser.add_argument("--list", action="store_true", help="print the mutations and run nothing")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTATIONS if not options.names or any(name in m.name for name in options.names)]
    if not chosen:
        parser.error(f"no mutation is called {' or '.join(options.names)}; --list prints all")
    console = Console()
    if options.list:
        table = Table("mutation", "instead of", "is", title=f"{len(chosen)} mutations")
        for mutation in chosen:
            table.add_row(*map(repr_of, (mutation.name, mutation.old, mutation.new)))
        console.print(table)
        return 0

    table = Table("mutation", "noticed by", "seconds")
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        output = Path(folder, "output")
        tests = list(dict.fromkeys(test for mutation in chosen for test in mutation.tests))
        tree = copy_checkout(Path(folder, "unchanged"))
        status = run_tests(tree, tests, output)
        shutil.rmtree(tree)
        if status != 0:
            console.print(output.read_text(encoding="utf-8"), markup=False, highlight=False)
            console.print(f"{' '.join(tests)} must pass on what is unchanged, found exit status {status}.")
            return 1
        for number, mutation in enumerate(chosen, 1):
            began = time.monotonic()
            tree = copy_checkout(Path(folder, "changed"))
            mutate(tree, mutation)
            noticed, said = verdict(run_tests(tree, mutation.tests, output), output.read_text(encoding="utf-8"))
            shutil.rmtree(tree)
            survivors += not noticed
            table.add_row(
                repr_of(mutation.name), repr_of(said), f"{time.monotonic() - began:.0f}", style="" if noticed else "red"
            )
            console.print(f"{number}/{len(chosen)} {mutation.name}: {said}", markup=False, highlight=False)
    console.print(table)
    console.print(f"{len(chosen) - survivors} of {len(chosen)} were noticed.")
    return 1 if survivors else 0


def repr_of(text: str) -> str:
    """Text as a cell of a table, brackets and all."""
    return text.replace("[", r"\[").strip()


if __name__ == "__main__":
    sys.exit(main())
