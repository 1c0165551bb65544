"""The documents: their links, tests, commands, settings, figures and log lines are those of the repository."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_kda_plugin import cli
from vllm_kda_plugin.attention.stats import AttentionStats
from vllm_kda_plugin.config import PluginConfig

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
OPERATING, PERFORMANCE, REMAKE = (ROOT / "docs" / f"{name}.md" for name in ("operating", "performance", "remake"))
every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))


def read(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def fenced(text: str, kind: str) -> list[str]:
    """Blocks of code of a kind, "" for those that name none; these hold commands."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for its_kind, block in blocks if its_kind == kind]


def inline(text: str) -> list[str]:
    """What stands between backticks, but for blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def headings(text: str) -> set[str]:
    """Anchors, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(text: str) -> Iterator[list[str]]:
    """Arguments of every ``vllm-kda`` command line that names a subcommand, in blocks or between backticks."""
    lines = [line for block in fenced(text, "") for line in block.splitlines()]
    for line in [*lines, *inline(text)]:
        if line.startswith("vllm-kda "):
            yield shlex.split(line, comments=True)[1:]


@every_document
def test_relative_links_resolve(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", read(document)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        assert not anchor or anchor in headings(read(target)), link


def test_every_document_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([^)\s#]+)\)", read(ROOT / "README.md")))
    assert {str(document.relative_to(ROOT)) for document in DOCUMENTS} - {"README.md"} <= linked


@every_document
def test_files_exist(document: Path) -> None:
    for name in re.findall(r"`((?:tests|docs|csrc|vllm_kda_plugin)/[\w./*-]*)(?:::|`)", read(document)):
        if "fatbin" not in name and "NAME" not in name:  # the first is only there once kernels are compiled
            assert (ROOT / name).exists() or list(ROOT.glob(name)), name


@every_document
def test_tests_exist(document: Path) -> None:
    for name, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", read(document)):
        tree = ast.parse(read(ROOT / name))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{name}::{test}"


@pytest.mark.parametrize("section", ["### Attention, against stock FLASH_ATTN", "### KDA layers, against stock KDA"])
def test_every_feature_has_a_test_or_says_that_it_has_none(section: str) -> None:
    rows = re.findall(r"^\|(.+)\|$", read(OPERATING).partition(section)[2].partition("\n### ")[0], re.MULTILINE)
    assert len(rows) > 20
    for row in rows[2:]:
        feature, _, *tests = row.split("|")
        assert len(tests) == 2, feature
        assert any("::test_" in test or "not tested" in test for test in tests), feature


@every_document
def test_commands_are_understood(document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (
        "doctor",
        "demo",
        "bench_gather",
        "bench_kda",
        "bench_attention",
        "bench_serve",
        "bench_report",
        "bench_compare",
    ):
        monkeypatch.setattr(cli, f"_{name}", lambda **options: 0)
    for arguments in commands(read(document)):
        if arguments[-1] == "--calibrate":  # said in a sentence
            arguments.append("FILE")
        assert cli.main(arguments) == 0, arguments


def test_every_setting_is_in_the_readme() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(VLLM_KDA_\w+)` \|([^|]*)\|", read(ROOT / "README.md"), re.MULTILINE)
    assert sorted(key for key, _, _ in rows) == sorted(PluginConfig.model_fields)
    for key, variable, default in rows:
        assert variable == f"VLLM_KDA_{key.upper()}"
        assert default.strip() == str(PluginConfig.model_fields[key].default).replace("False", "false")


def test_every_counter_is_told() -> None:
    table = read(OPERATING).partition("| counter |")[2].partition("\n\n")[0]
    told = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(told) == sorted(["pid", *(field.name for field in dataclasses.fields(AttentionStats))])


def test_ratios_are_those_of_the_measurements() -> None:
    section = read(OPERATING).partition("## When it helps")[2].partition("\n## ")[0]
    ratios = set(re.findall(r"(?<![\d.])\d\.\d\d+(?![\d.])", section))
    assert len(ratios) > 20
    assert not ratios - set(re.findall(r"(?<![\d.])\d\.\d\d+(?![\d.])", read(PERFORMANCE)))


def test_every_published_figure_can_be_remade() -> None:
    published = {tuple(arguments) for arguments in commands(read(PERFORMANCE))}
    assert published <= {tuple(arguments) for arguments in commands(read(REMAKE))}


def formats() -> Iterator[str]:
    """Format strings of every line that the package logs."""
    for file in sorted((ROOT / "vllm_kda_plugin").rglob("*.py")):
        for node in ast.walk(ast.parse(read(file))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                text: Any = node.args[0]
                if re.fullmatch("(info|warning|error)(_once)?", node.func.attr) and isinstance(text, ast.Constant):
                    yield str(text.value)


def test_log_lines_are_those_of_the_code() -> None:
    known = [re.escape(text).replace("%s", ".+") for text in formats() if text != "%s"]
    lines = [line for block in fenced(read(OPERATING), "log") for line in block.splitlines()]
    assert len(lines) > 10
    for line in lines:
        assert any(re.fullmatch(pattern, line) for pattern in known), line


def test_script_to_profile_runs() -> None:
    [script] = fenced(read(ROOT / "CONTRIBUTING.md"), "python")
    small = script.replace("range(3)", "range(1)").replace("(2048,)", "(64,)")
    assert small.count("64") == 1
    exec(small, {})
