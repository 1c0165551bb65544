"""A bar that shows how far a benchmark is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that moves on and shows the words each time it is told some."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        told = 0

        def tell(words: str) -> None:
            nonlocal told
            bar.update(task, description=words, completed=told)
            told += 1

        yield tell
