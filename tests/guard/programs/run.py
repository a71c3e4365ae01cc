"""A number of random cases from a seed: the same in every run, and none twice."""

import dataclasses
from collections.abc import Iterator

from .cases import Batch, Case, judge, Wrong
from .draw import batches


def fresh_batches(start: int, n_cases: int) -> Iterator[Batch]:
    """Batches with `n_cases` cases in all; no two differ in values only."""
    seen: set[Case] = set()
    for batch in batches(start):
        fresh = [case for case in batch.cases if case.kind not in seen]
        fresh = fresh[: n_cases - len(seen)]
        seen.update(case.kind for case in fresh)
        if fresh:
            yield dataclasses.replace(batch, cases=tuple(fresh))
        if len(seen) >= n_cases:
            return


def wrong_cases(start: int, n_cases: int) -> list[Wrong]:
    """The cases among `n_cases` that differ from the reference."""
    return [wrong for batch in fresh_batches(start, n_cases) for wrong in judge(batch)]
