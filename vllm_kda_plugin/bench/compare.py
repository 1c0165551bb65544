"""``vllm-kda bench compare``: what got slower and faster between two reports, or two JSON files of one benchmark.

Compared is what the plugin does, not what it is measured beside.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

KINDS = ("gather", "attention", "kda", "kda-overhead", "serve")
"""The benchmarks, and in a report's folder their JSON files without ``.json``."""
_PIPE_COLUMNS = 160
_MOST_ALONE = 6
_LOAD = ("load", "settings")


class Refused(ValueError):
    """What is to be compared cannot be; the message says why."""


class Figure(NamedTuple):
    """Something measured."""

    value: float
    unit: str
    more_is_faster: bool = False

    def __str__(self) -> str:
        return f"{self.value:,.4g} {self.unit}" if self.value < 1e3 else f"{self.value:,.0f} {self.unit}"


Figures = dict[str, Figure]


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure in both."""

    name: str
    before: Figure
    after: Figure

    @property
    def ratio(self) -> float:
        """Its time in the second over that in the first; above 1 it got slower."""
        before, after = self._times()
        return after / before

    @property
    def inverse(self) -> float:
        """Its time in the first over that in the second: what :attr:`ratio` is if the two change places."""
        before, after = self._times()
        return before / after

    @property
    def percent(self) -> float:
        """How much more time it takes."""
        return (self.ratio - 1) * 100

    def _times(self) -> tuple[float, float]:
        """Proportional to the time in the first and in the second."""
        before, after = self.before.value, self.after.value
        return (after, before) if self.after.more_is_faster else (before, after)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All figures of one benchmark."""

    changes: list[Change]
    """Slowest first."""
    only: tuple[list[str], list[str]]
    """Names of figures that the first, or the second, has alone."""

    @property
    def mean(self) -> float | None:
        """Geometric mean of all ratios; None if nothing is in both."""
        return statistics.geometric_mean(change.ratio for change in self.changes) if self.changes else None

    def beyond(self, percent: float) -> tuple[list[Change], list[Change]]:
        """What takes over ``percent`` more time in the second, and what does in the first; most of it first."""
        limit = 1 + percent / 100
        slower = [change for change in self.changes if change.ratio > limit]
        return slower, [change for change in reversed(self.changes) if change.inverse > limit]


def run(before: Path, after: Path, threshold: float, fail_above: float | None) -> int:
    """Compare and print; returns 2 if the two cannot be compared, 1 if something is slower than allowed, else 0.

    Args:
        before: a report's folder, or a JSON file of a benchmark.
        after: the same of later, or of what is to be compared with it.
        threshold: percent of time that a figure must differ by to be listed.
        fail_above: percent of time by which no figure may be slower; None allows everything.
    """
    try:
        pairs, alone = _pairs(before, after)
        found = {kind: compare(figures(kind, one), figures(kind, other)) for kind, (one, other) in pairs.items()}
        if not any(comparison.changes for comparison in found.values()):
            raise Refused(f"{before} and {after} have no figure in common")
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    for warning in dict.fromkeys(warning for kind, pair in pairs.items() for warning in differences(kind, *pair)):
        print(f"Warning: {warning}", file=sys.stderr)
    show(found, threshold)
    for kind, where in alone.items():
        print(f"{kind} is in {where} only")
    if fail_above is None:
        return 0
    failed = [f"{kind}, {change.name}" for kind, one in found.items() for change in one.beyond(fail_above)[0]]
    if failed:
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        print(f"Slower by more than {fail_above:g} %: {failed[0]}{more}", file=sys.stderr)
    return int(bool(failed))


def read(file: Path) -> dict[str, Any]:
    """What a benchmark's --json wrote; raises :class:`Refused` if it is no such file."""
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{file} cannot be read: {error}") from None
    if not isinstance(report, dict):
        raise Refused(f"{file} is not what vllm-kda bench writes")
    return report


def kind_of(report: Mapping[str, Any]) -> str | None:
    """Which benchmark wrote it, one of :data:`KINDS`; None if none of them did."""
    if not isinstance(report.get("machine"), dict) or not isinstance(report.get("versions"), dict):
        return None
    if "first_token" in report:
        return "serve"
    if not isinstance(report.get("cases"), list):
        return None
    keys = {"peers": "attention", "left_out": "kda", "host_us": "gather"}
    return next((kind for key, kind in keys.items() if key in report), "kda-overhead")


def figures(kind: str, report: Mapping[str, Any]) -> Figures:
    """The plugin's own figures in a benchmark's JSON, by names that are the same in every run; wrong ones left out.

    Raises:
        Refused: it is not as the benchmark writes it.
    """
    try:
        found = dict(_READERS[kind](report))
        if odd := [name for name, figure in found.items() if not 0 < figure.value < math.inf]:
            raise ValueError(f"{odd[0]} is no positive number")
        return found
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"a JSON of {kind} is not as vllm-kda bench writes it: {error!r}") from None


def compare(before: Figures, after: Figures) -> Comparison:
    """Figures by their names."""
    changes = [Change(name, before[name], after[name]) for name in before if name in after]
    changes.sort(key=lambda change: change.ratio, reverse=True)
    return Comparison(changes, ([n for n in before if n not in after], [n for n in after if n not in before]))


def differences(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Why figures may differ though the plugin does not: another machine, load or setting, or not all measured."""
    for what, title in (("machine", "the machines differ"), *((name, f"{kind}, {name} differs") for name in _LOAD)):
        said = "; ".join(_unlike(before.get(what, {}), after.get(what, {})))
        if said:
            yield f"{title}: {said}"
    for report, which in ((before, "first"), (after, "second")):
        if report.get("interrupted"):
            yield f"{kind} was interrupted in the {which}"


def show(found: Mapping[str, Comparison], threshold: float) -> None:
    """Print a line for each benchmark, what is beyond the threshold, and what only one of the two has."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
    for kind, one in found.items():
        slower, faster = one.beyond(threshold)
        mean = "" if one.mean is None else f", geometric mean of the time {one.mean:.3f}x"
        counts = f"{len(slower)} slower and {len(faster)} faster by more than {threshold:g} %"
        console.print(f"{kind}: {len(one.changes)} figures in both{mean}, {counts}", soft_wrap=True)
    for index, title in enumerate(("Slower", "Faster")):
        table = Table("benchmark", "figure", title=title, title_justify="left")
        for column in ("before", "after", "time"):
            table.add_column(column, justify="right")
        for kind, one in found.items():
            for change in one.beyond(threshold)[index]:
                time = f"[{'green' if index else 'red'}]{change.percent:+.1f} %[/]"
                table.add_row(kind, escape(change.name), str(change.before), str(change.after), time)
        if table.row_count:
            console.print(table)
    for kind, one in found.items():
        for which, names in zip(("first", "second"), one.only, strict=True):
            if names:
                more = f"; and {len(names) - _MOST_ALONE} more" if len(names) > _MOST_ALONE else ""
                console.print(
                    f"{kind}, in the {which} only: {escape('; '.join(names[:_MOST_ALONE]))}{more}", soft_wrap=True
                )


def _pairs(before: Path, after: Path) -> tuple[dict[str, tuple[dict[str, Any], dict[str, Any]]], dict[str, str]]:
    """Reports by kind, and the kinds that are in one folder only, with that folder."""
    for path in (before, after):
        if not path.exists():
            raise Refused(f"{path} does not exist")
    if before.is_dir() != after.is_dir():
        raise Refused(f"{before} and {after} are a folder and a file; compare two folders or two files")
    if before.is_dir():
        ours, others = _folder(before), _folder(after)
        both = {kind: (ours[kind], others[kind]) for kind in KINDS if kind in ours and kind in others}
        if not both:
            raise Refused(f"{before} has {', '.join(ours)} and {after} has {', '.join(others)}: none is in both")
        alone = {kind: str(before if kind in ours else after) for kind in KINDS if (kind in ours) != (kind in others)}
        return both, alone
    reports = read(before), read(after)
    kinds = [_kind(file, report) for file, report in zip((before, after), reports, strict=True)]
    if kinds[0] != kinds[1]:
        raise Refused(f"{before} is of bench {kinds[0]} and {after} of bench {kinds[1]}; compare two of one kind")
    return {kinds[0]: reports}, {}


def _folder(folder: Path) -> dict[str, dict[str, Any]]:
    found = {kind: read(file) for kind in KINDS if (file := folder / f"{kind}.json").exists()}
    if not found:
        raise Refused(f"{folder} holds no finished part of a report; vllm-kda bench report {folder} makes one")
    for kind, report in found.items():
        if _kind(folder / f"{kind}.json", report) != kind:
            raise Refused(f"{folder / kind}.json is of bench {kind_of(report)}")
    return found


def _kind(file: Path, report: Mapping[str, Any]) -> str:
    kind = kind_of(report)
    if kind is None:
        raise Refused(f"{file} is none of {', '.join(KINDS)} that vllm-kda bench writes")
    return kind


def _unlike(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield f"{key} {before.get(key)} and {after.get(key)}"


def _gather(report: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    for row in report["cases"]:
        for state in ("hot", "cold"):
            if f"{state}_us" in row:
                yield f"{row['case']}, {row['tokens']:,} tokens, {state}", Figure(row[f"{state}_us"], "us")
    for entry, us in (report["host_us"] or {}).items():
        yield f"{entry}, the host's time", Figure(us, "us")


def _attention(report: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    for row in report["cases"]:
        if "wrong" not in row:
            heads = f"{row['num_heads']}/{row['num_kv_heads']} heads of {row['head_size']}"
            place = f"{heads}, page {row['page_size']}, {row['batch']}, {row['size']}"
            yield place, Figure(row["ours_us"], "us")


def _kda(report: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    for row in report["cases"]:
        place = f"{row['gate']} gate, {row['decay']} decay, {row['heads']} heads, {row['sequences']}"
        for name, measured in row.get("providers", {}).items():
            if "us" in measured and name not in row.get("wrong", []):
                yield f"{name}, {place}", Figure(measured["us"], "us")


def _kda_overhead(report: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    for row in report["cases"]:
        place = f"{row['provider']}, {row['tokens']:,} tokens"
        yield place, Figure(row["after_ms"], "ms")
        if "after" in row.get("host_us", {}):
            yield f"{place}, the host's time", Figure(row["host_us"]["after"], "us")


def _serve(report: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    backend = report["engines"][0]["backend"]
    for row in report["first_token"]:
        yield f"{backend}, first token of {row['prompt_tokens']:,}", Figure(row["median_s"][0] * 1e3, "ms")
    yield f"{backend}, decode", Figure(report["decode"]["median_tokens_per_s"][0], "tokens/s", more_is_faster=True)


_READERS: dict[str, Callable[[Mapping[str, Any]], Iterator[tuple[str, Figure]]]] = {
    "gather": _gather,
    "attention": _attention,
    "kda": _kda,
    "kda-overhead": _kda_overhead,
    "serve": _serve,
}
