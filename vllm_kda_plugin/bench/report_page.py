"""The page of ``vllm-kda bench report``: one HTML file that needs no other, made from the folder's JSON and plots."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from vllm_kda_plugin.bench.compare import kind_of

PAGE = "report.html"
_MOST_OPEN_ROWS = 24

_TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>vllm-kda-plugin on {{ device }}</title>
<style>
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --bad: #c22; --good: #181; }
@media (prefers-color-scheme: dark) { :root { --bad: #f77; --good: #7c7; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0 1rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th { background: var(--soft); }
tbody tr:hover { background: var(--soft); }
code, pre { font: .85rem/1.4 ui-monospace, monospace; background: var(--soft); }
code { padding: .1rem .3rem; overflow-wrap: anywhere; }
pre { padding: .7rem; overflow-x: auto; }
img { max-width: 100%; max-height: 42rem; background: #fff; display: block; }
summary { cursor: pointer; padding: .3rem 0; }
.failed, .interrupted { color: var(--bad); font-weight: 600; }
.done { color: var(--good); }
nav a { margin-right: 1rem; }
</style>
</head>
<body>
<h1>vllm-kda-plugin on {{ device }}</h1>
<nav>{% for part in parts %}<a href="#{{ part.name }}">{{ part.name }}</a>{% endfor %}</nav>
<h2>What was measured, and on what</h2>
{% macro pairs(title, found) %}
{% if found %}
<table><thead><tr><th colspan="2">{{ title }}</th></tr></thead><tbody>
{% for name, value in found.items() %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}
</tbody></table>
{% endif %}
{% endmacro %}
{{ pairs("Machine", report.machine) }}
{{ pairs("Versions", report.versions) }}
{{ pairs("Variables", report.variables) }}
<div class="wide"><table>
<thead><tr><th>part</th><th>state</th><th class="n">took</th><th>began</th><th>command, or why not</th></tr></thead>
<tbody>
{% for part in parts %}
<tr><td><a href="#{{ part.name }}">{{ part.name }}</a></td><td class="{{ part.row.state }}">{{ part.row.state }}</td>
<td class="n">{% if part.row.seconds is not none %}{{ "%.0f" | format(part.row.seconds) }} s{% endif %}</td>
<td>{{ part.row.began or "" }}</td>
<td>{% if part.row.command %}<code>{{ part.row.command }}</code>{% endif %}{{ part.row.reason or "" }}</td></tr>
{% endfor %}
</tbody></table></div>
{% for part in parts %}
<h2 id="{{ part.name }}">{{ part.title }}</h2>
{% if part.row.state != "done" %}
<p class="{{ part.row.state }}">{{ part.row.state | capitalize }}{% if part.row.reason %}: {{ part.row.reason }}{% endif
%}.{% if part.partial %} What follows is what it had written; it may be wrong or lack cases.{% endif %}</p>
{% endif %}
{% if part.row.tail %}<p>The last lines it said:</p><pre>{{ part.row.tail | join("\n") }}</pre>{% endif %}
{% if part.notes %}<ul>{% for note in part.notes %}<li>{{ note }}</li>{% endfor %}</ul>{% endif %}

{% for table in part.tables %}
{% set shut = table.rows | length > most_open_rows %}
{% if shut %}<details><summary>{{ table.title }}, {{ table.rows | length }} rows</summary>
{% else %}<h3>{{ table.title }}</h3>{% endif %}
<div class="wide"><table>
<thead><tr>{% for column in table.columns %}<th{% if loop.index > table.words %} class="n"{% endif %}>{{ column }}</th>
{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>{% for cell in row %}<td{% if loop.index > table.words %} class="n"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% if shut %}</details>{% endif %}
{% endfor %}
{% if part.plot %}<img alt="The plot of {{ part.name }}" src="{{ part.plot }}">{% endif %}
{% endfor %}
</body>
</html>
"""
_TITLES = {
    "gather": "Gather of paged KV cache",
    "attention": "Attention, a layer's part of a step",
    "kda": "KDA prefill, the kernels",
    "kda-overhead": "KDA prefill, what allocating costs",
    "serve": "In vLLM's engine",
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells as words."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int
    """How many columns from the left hold no numbers."""


Report = Mapping[str, Any]
Told = tuple[list[str], list[Table]]
"""Sentences, and the tables after them."""


def write(folder: Path, report: Report) -> None:
    """Write the page from the record of a report, and the JSON and plots beside it."""
    partial = folder / f"partial-{PAGE}"
    partial.write_text(render(folder, report), encoding="utf-8")
    partial.replace(folder / PAGE)


def render(folder: Path, report: Report) -> str:
    """The page."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    parts = [_part(folder, name, row) for name, row in report["parts"].items()]
    device = report["machine"].get("GPU, driver") or report["machine"].get("processor", "")
    template = environment.from_string(_TEMPLATE)
    return template.render(report=report, device=device, parts=parts, most_open_rows=_MOST_OPEN_ROWS)


def tables(report: Report) -> Told:
    """What a benchmark's JSON says; nothing if no benchmark wrote it so."""
    kind = kind_of(report)
    if kind is None:
        return ["Its JSON is not what vllm-kda bench writes."], []
    try:
        return _TELL[kind](report)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return [f"Its JSON is not as bench {kind} writes it: {error!r}."], []


def _part(folder: Path, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    done = row["state"] == "done"
    file = folder / (f"{name}.json" if done else f"partial-{name}.json")
    notes: list[str] = []
    found: list[Table] = []
    partial = False
    if row["state"] in ("done", "failed", "interrupted"):
        try:
            notes, found = tables(json.loads(file.read_text(encoding="utf-8")))
            partial = not done
        except (OSError, ValueError) as error:
            notes = [f"Its JSON cannot be read: {error}."] if done else []
    plot = folder / f"{name}.png"
    row = {**dict.fromkeys(("seconds", "began", "command", "reason", "tail")), **row}
    return {
        "name": name,
        "title": _TITLES.get(name, name),
        "row": row,
        "partial": partial,
        "notes": notes,
        "tables": found,
        "plot": _data_uri(plot) if done and plot.exists() else None,
    }


def _data_uri(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def _gather(report: Report) -> Told:
    peers = ("reference", "index_select", "cp_gather_cache")
    rows = report["cases"]
    names = {"hot_us": "us", "cold_us": "cold us", "hot_tb_per_s": "TB/s", "hot_share_of_copy": "of copy"}
    names |= {"cold_share_of_copy": "cold of copy"} | {f"{peer}_hot_us": f"{peer} us" for peer in peers}
    keys = [key for key in names if any(key in row for row in rows)]
    cells = [
        [
            row["case"],
            f"{row['tokens']:,}",
            *(_share(row.get(k)) if "share" in k else _number(row.get(k)) for k in keys),
        ]
        for row in rows
    ]
    notes = [
        f"A large copy: {report['copy_tb_per_s']:.3g} TB/s read and written.",
        "Of copy: speed beside a copy of as many bytes.",
        "Cold: nothing in the L2 cache; all else: the same buffers every time.",
    ]
    for row in rows:
        where = f"{row['case']}, {row['tokens']:,} tokens"
        notes += [f"{where}: {row[key]}." for key in ("wrong", "skipped") if key in row]
        notes += [f"{where}: {peer} is not timed, it {why}." for peer, why in row.get("peers_without_time", {}).items()]
    found = [Table("All cases", ["case", "tokens", *(names[key] for key in keys)], cells, 1)]
    host = [[entry, _number(us)] for entry, us in (report["host_us"] or {}).items()]
    return notes, found + ([Table("The host's time of a call", ["function", "us"], host, 1)] if host else [])


def _attention(report: Report) -> Told:
    summary = report.get("summary", {})
    means = [
        [name, _number(mean["mean"]), f"{mean['cells']:,}"]
        for name, mean in summary.get("means", {}).items()
        if mean["mean"]
    ]
    notes = ["Ratio: time of vLLM's FLASH_ATTN over ours, above 1 where ours is faster; in brackets quartiles."]
    if summary:
        notes.append(f"{summary['cells']} cells: {summary['below']} below 0.98, {summary['wrong']} wrong.")
    rows = [
        [
            *_place(row),
            row["path"],
            _number(row["stock_us"]),
            _number(row["ours_us"]),
            f"{row['ratio']:.3f} ({row['ratio_quartiles'][0]:.2f} to {row['ratio_quartiles'][1]:.2f})"
            + (" WRONG" if "wrong" in row else ""),
        ]
        for row in report["cases"]
    ]
    peers = [
        [row["name"], *_place(row), _number(row["us"]), _number(row["stock_us"]), _number(row["ratio"])]
        for row in report["peers"]
        if "us" in row
    ]
    notes += [f"{row['name']}: {row['error']}." for row in report["peers"] if "error" in row and "query" not in row]
    place = ["heads", "page", "batch", "query after context"]
    found = [
        Table("Geometric means of the ratio", ["of", "mean", "cells"], means, 1),
        Table("All cases", [*place, "path", "stock us", "ours us", "ratio"], rows, 5),
        Table("vLLM's other backends", ["backend", *place, "us", "FLASH_ATTN us", "FLASH_ATTN / it"], peers, 5),
    ]
    return notes, [table for table in found if table.rows]


def _place(row: Mapping[str, Any]) -> list[str]:
    heads = f"{row['num_heads']}/{row['num_kv_heads']} of {row['head_size']}"
    return [heads, str(row["page_size"]), row["batch"], row["size"]]


def _kda(report: Report) -> Told:
    rows = report["cases"]
    names = list(dict.fromkeys(name for row in rows for name in row.get("providers", {})))
    cells = []
    for row in rows:
        line = [row["gate"], row["decay"], row["sequences"], str(row["heads"]), _number(row["floor_us"])]
        for name in names:
            one = row.get("providers", {}).get(name, {})
            us, error = _number(one.get("us")), f"{one['error_out']:.1e}" if one else ""
            line += [us + (" WRONG" if name in row.get("wrong", []) else ""), error]
        cells.append([*line, row.get("skipped", "")])
    columns = ["gate", "decay", "sequences", "heads", "floor us"]
    columns += [word for name in names for word in (f"{name} us", f"{name} error")] + ["skipped"]
    if not any(row[-1] for row in cells):
        columns, cells = columns[:-1], [row[:-1] for row in cells]
    notes = ["Floor: every byte read or written once, at the speed of a large copy. Error: of the output, to float64."]
    notes += [f"Left out: {name}: {reason}." for name, reason in report["left_out"].items()]
    return notes, [Table("All cases", columns, cells, 3)]


def _kda_overhead(report: Report) -> Told:
    rows = report["cases"]
    stock = any("stock_ms" in row for row in rows)
    cells = [
        [row["provider"], f"{row['tokens']:,}", _number(row["before_ms"]), _number(row["after_ms"])]
        + [f"{row['speedup']:.2f}x"]
        + ([_number(row.get("stock_ms"))] if stock else [])
        for row in rows
    ]
    columns = ["kernel", "tokens", "allocating ms", "workspace ms", "speed-up", *(["stock ms"] if stock else [])]
    notes = ["One call from an idle device to an idle device, host and device together."]
    return notes, [Table("All cases", columns, cells, 1)]


def _serve(report: Report) -> Told:
    names = [engine["backend"] for engine in report["engines"]]
    load, decode = report["load"], report["decode"]
    rows = []
    for row in report["first_token"]:
        times = [f"{1e3 * s:,.1f} ms" for s in row["median_s"]]
        rows.append([f"first token of a prompt of {row['prompt_tokens']:,}", *times, *_ratio(row)])
    speeds = [f"{speed:,.0f} tokens/s" for speed in decode["median_tokens_per_s"]]
    rows.append([f"decode, {load['decode_requests']} requests", *speeds, *_ratio(decode)])
    settings = ", ".join(f"{name} {value}" for name, value in report["settings"].items())
    notes = [
        f"Medians of {load['rounds']} rounds.",
        f"Ratio: how many times as fast as {names[1]} {names[0]} is; beside it the lowest and highest of a round.",
        f"Engines: {settings}.",
    ]
    for what, title in (("first", "First tokens"), ("decoded", "Decoded tokens")):
        differ = report["tokens"][what]
        said = f"{len(differ['differ_at'])} differ" if differ["differ_at"] else "the same in both"
        notes.append(f"{title} of {differ['prompts']} prompts: {said}.")
    notes += [f"{engine['backend']} ran {', '.join(engine['classes'])}." for engine in report["engines"]]
    return notes, [Table("Both engines", ["", *names, "ratio", "of a round"], rows, 1)]


def _ratio(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['ratio']:.3f}x", f"{min(row['round_ratios']):.3f} to {max(row['round_ratios']):.3f}"]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1e4 else f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


_TELL: dict[str, Callable[[Report], Told]] = {
    "gather": _gather,
    "attention": _attention,
    "kda": _kda,
    "kda-overhead": _kda_overhead,
    "serve": _serve,
}
