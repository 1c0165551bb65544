"""The ``vllm-kda`` command. Each subcommand is imported only when it runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's) and return the exit code."""
    parser = argparse.ArgumentParser(prog="vllm-kda", description="Tools of the vllm-kda-plugin for vLLM.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, summary in (
        ("doctor", _doctor, "say whether the plugin can work here, and how to fix what is wrong"),
        ("demo", _demo, "serve a small model through our attention backend and show what ran"),
    ):
        commands.add_parser(name, help=summary, description=summary).set_defaults(run=run)
    return int(parser.parse_args(argv).run())


def _doctor() -> int:
    from vllm_kda_plugin import doctor

    return doctor.run()


def _demo() -> int:
    from vllm_kda_plugin import demo

    return demo.run()


if __name__ == "__main__":
    sys.exit(main())
