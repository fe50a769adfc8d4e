"""The types of figures. Files in this folder draw figures from results, if the results have what a figure needs."""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchsparsekv_benchmarks.report.load import Result


@dataclass(frozen=True)
class Drawn:
    """A figure, what it shows, and what it was made from."""

    figure: Any
    caption: str
    sources: tuple[Result, ...]
    tag: str = ""  # tells figures of one kind apart, as by model


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    provided_by: str  # the command whose file it needs
    draw: Callable[[Any, list[Result]], list[Drawn]]  # (pyplot, results)
    leads: bool = False  # it stands before the table of scores


def of(results: list[Result], *benchmarks: str) -> list[Result]:
    return [r for r in results if r.benchmark in benchmarks]


def by_model(results: list[Result]) -> list[list[Result]]:
    """Results that may stand in one figure: the same model on the same hardware with the same versions."""
    groups: dict[tuple, list[Result]] = {}
    for r in results:
        groups.setdefault((r.about_model, r.hardware, r.versions), []).append(r)
    return list(groups.values())
