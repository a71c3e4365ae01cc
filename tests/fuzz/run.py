"""A number of random cases from a seed: the same in every run, and none twice."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from hypothesis import given, HealthCheck, Phase, seed, settings

from .cases import Batch, batches, Case, judge, Wrong


_BATCHES = 25


def fresh_batches(start: int, n_cases: int) -> Iterator[Batch]:
    """Batches with `n_cases` cases in all, no two of which differ in values only."""
    seen: set[Case] = set()
    n_round = 0
    while len(seen) < n_cases:
        for batch in _drawn(1000 * start + n_round):
            fresh = [case for case in batch.cases if case.kind not in seen]
            fresh = fresh[: n_cases - len(seen)]
            seen.update(case.kind for case in fresh)
            if fresh:
                yield dataclasses.replace(batch, cases=tuple(fresh))
        n_round += 1


def _drawn(number: int) -> list[Batch]:
    found: list[Batch] = []

    # Nothing fails in here, so that the examples are the same whatever the outcome, and a case
    # that is wrong is not the last.
    @seed(number)
    @settings(
        max_examples=_BATCHES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(batches())
    def draw(batch: Any) -> None:
        found.append(batch)

    draw()
    return found


def wrong_cases(start: int, n_cases: int) -> list[Wrong]:
    """Of `n_cases` cases, those that differ from autodiff of the undecorated function."""
    return [wrong for batch in fresh_batches(start, n_cases) for wrong in judge(batch)]
