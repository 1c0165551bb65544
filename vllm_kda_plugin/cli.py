"""The ``vllm-kda`` command. Each subcommand is imported only when it runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLOT_FORMATS = (".pdf", ".png", ".svg")
REPORT_PARTS = ("gather", "attention", "kda", "kda-overhead", "serve")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's) and return the exit code."""
    parser = argparse.ArgumentParser(prog="vllm-kda", description="Tools of the vllm-kda-plugin for vLLM.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, summary in (
        ("doctor", _doctor, "say whether the plugin can work here, and how to fix what is wrong"),
        ("demo", _demo, "serve a small model through our attention backend and show what ran"),
    ):
        commands.add_parser(name, help=summary, description=summary).set_defaults(run=run)
    summary = "measure what the plugin is made of, beside other ways of doing the same"
    benches = commands.add_parser("bench", help=summary, description=summary).add_subparsers(
        required=True, metavar="WHAT"
    )
    summary = "measure the gather of paged KV cache; on a CPU it is torch that is measured"
    gather = benches.add_parser("gather", help=summary, description=summary)
    _add_files(gather)
    gather.add_argument(
        "--num-tokens",
        type=_positive,
        nargs="+",
        metavar="N",
        help="measure one request of each of these sizes, in every layout, in place of the usual sizes",
    )
    gather.set_defaults(run=_bench_gather)
    summary = "measure the kernels of a KDA prefill, and how exact they are; on a CPU it is torch that is measured"
    kda = benches.add_parser("kda", help=summary, description=summary)
    _add_files(kda)
    kda.add_argument(
        "--overhead", action="store_true", help="measure what a layer pays for allocating, in place of the kernels"
    )
    kda.set_defaults(run=_bench_kda)
    summary = "measure attention steps beside vLLM's FLASH_ATTN on the same tensors; needs a GPU"
    attention = benches.add_parser("attention", help=summary, description=summary)
    _add_files(attention)
    attention.add_argument(
        "--calibrate",
        type=_new_file,
        metavar="FILE",
        help="measure no grid but what planning on this GPU rests on; kda_plugin.calibration reads it from here",
    )
    attention.set_defaults(run=_bench_attention)
    summary = "time to first token and tokens per second of two attention backends in vLLM's engine"
    serve = benches.add_parser("serve", help=summary, description=summary)
    serve.add_argument("--model", help="what vllm serve takes, in place of one with random weights")
    serve.add_argument(
        "--backends",
        nargs=2,
        metavar=("BACKEND", "OTHER"),
        help="two values of --attention-backend, in place of CUSTOM and FLASH_ATTN (on a CPU: CPU_ATTN)",
    )
    serve.add_argument("--prompt-tokens", type=_positive, nargs="+", metavar="N", help="lengths of the prompts")
    serve.add_argument("--chunk", type=_positive, metavar="N", help="prompt tokens computed in one step")
    serve.add_argument("--eager", action="store_true", help="neither compile the model nor use CUDA graphs")
    _add_files(serve)
    serve.set_defaults(run=_bench_serve)
    summary = "run every benchmark that this machine can run, one after the other, and write one HTML page"
    report = benches.add_parser("report", help=summary, description=summary)
    report.add_argument(
        "folder", type=Path, metavar="DIR", help="where everything goes; what is complete there is not run again"
    )
    report.add_argument("--only", nargs="+", choices=REPORT_PARTS, metavar="PART", help="run these parts and no other")
    report.set_defaults(run=_bench_report)
    summary = "what got slower and faster between two reports, or two JSON files of one benchmark"
    compare = benches.add_parser("compare", help=summary, description=summary)
    for name, which in (("before", "a report's folder, or what --json wrote"), ("after", "the same of another run")):
        compare.add_argument(name, type=Path, metavar="AB"[name == "after"], help=which)
    compare.add_argument(
        "--threshold",
        type=_percent,
        default=3.0,
        metavar="PERCENT",
        help="list what takes this much more time in one than in the other (default: 3)",
    )
    compare.add_argument(
        "--fail-above", type=_percent, metavar="PERCENT", help="exit with 1 if a figure got slower by more than this"
    )
    compare.set_defaults(run=_bench_compare)
    arguments = vars(parser.parse_args(argv))
    return int(arguments.pop("run")(**arguments))


def _add_files(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--json", type=_new_file, metavar="FILE", help="write all figures here")
    bench.add_argument("--plot", type=_plot_file, metavar="FILE", help="plot here, as .png, .svg or .pdf")


def _doctor() -> int:
    from vllm_kda_plugin import doctor

    return doctor.run()


def _demo() -> int:
    from vllm_kda_plugin import demo

    return demo.run()


def _bench_gather(json: Path | None, plot: Path | None, num_tokens: Sequence[int] | None) -> int:
    try:
        from vllm_kda_plugin.bench import gather
    except (ImportError, ValueError) as error:  # no torch, or a wrong VLLM_KDA_CHECK
        print(error, file=sys.stderr)
        return 1
    return gather.run(json, plot, num_tokens)


def _bench_kda(json: Path | None, plot: Path | None, overhead: bool) -> int:
    try:
        from vllm_kda_plugin.bench import kda
    except (ImportError, ValueError) as error:  # no torch, or a wrong VLLM_KDA_CHECK
        print(error, file=sys.stderr)
        return 1
    return kda.run(json, plot, overhead)


def _bench_attention(json: Path | None, plot: Path | None, calibrate: Path | None) -> int:
    if calibrate and (json or plot):
        print("--calibrate measures no grid, so --json and --plot do not go with it", file=sys.stderr)
        return 2
    try:
        from vllm_kda_plugin.bench import attention
    except (ImportError, ValueError) as error:  # no torch, or a wrong VLLM_KDA_CHECK
        print(error, file=sys.stderr)
        return 1
    return attention.run(json, plot, calibrate)


def _bench_serve(**options: Any) -> int:
    try:
        from vllm_kda_plugin.bench import serve
    except ImportError as error:  # no torch
        print(error, file=sys.stderr)
        return 1
    return serve.run(**options)


def _bench_report(folder: Path, only: Sequence[str] | None) -> int:
    from vllm_kda_plugin.bench import report

    return report.run(folder, only)


def _bench_compare(**options: Any) -> int:
    from vllm_kda_plugin.bench import compare

    return compare.run(**options)


def _new_file(text: str) -> Path:
    """A file that can be written, so that nothing is measured in vain."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, must be a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no folder, so {text} cannot be written")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} may not be written by you")
    return path


def _plot_file(text: str) -> Path:
    if Path(text).suffix.lower() not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"{text} must end in one of {', '.join(PLOT_FORMATS)}")
    return _new_file(text)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a whole number from 1")
    return number


def _percent(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a number from 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
