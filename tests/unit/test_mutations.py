"""The list of ``tests/mutations.py`` fits the sources, and what it says of a run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import mutations
from tests.mutations import MUTATIONS, ROOT, Mutation, mutate, verdict


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_fits_its_file(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    if mutation.file.endswith(".py"):
        ast.parse(text.replace(mutation.old, mutation.new))
    assert all((ROOT / test).is_file() for test in mutation.tests)


def test_names_are_different() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_what_is_not_there_once_is_no_mutation(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a < b or a < c")
    mutate(tmp_path, Mutation("strict", "file", "a < b", "a <= b", ()))
    assert (tmp_path / "file").read_text() == "a <= b or a < c"
    for old, times in (("a", 2), ("d", 0)):
        with pytest.raises(ValueError, match=f"is in file {times} times, must be once"):
            mutate(tmp_path, Mutation("strict", "file", old, "", ()))


def test_only_a_failed_test_or_no_end_is_noticed() -> None:
    failed = "E  assert\nFAILED tests/unit/test_steps.py::test_a[1] - assert 1 == 2\n1 failed"
    assert verdict(1, failed) == (True, "test_a[1]")
    assert verdict(None, "") == (True, "no end")
    assert verdict(0, "9 passed") == (False, "survived")
    assert verdict(4, "no such\nERROR: not found: x\n") == (False, "pytest ended with 4: ERROR: not found: x")


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutations.main(["--list", "planner: sign", "planner: keys"]) == 0
    assert "3 mutations" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        mutations.main(["nothing of this name"])
