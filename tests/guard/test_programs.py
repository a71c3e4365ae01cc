"""Random programs with random rules, in random chains of transformations.

Each result has to be the result of the same program without the library: with plain loops, and
with plain autodiff. Where the rule is not autodiff's, the reference has the same rule by
`jax.custom_jvp` or `jax.custom_vjp`. A program is a call of a random function, or a scan of one. A
chain has up to five transformations, loops and ops.

A program and a chain are a case. Cases that differ in values only count as one. The quick test
has few cases, which have all productions of the grammar (`programs/coverage.py`). If the
grammar changes, `python -m tests.guard.programs choose` finds new ones.

`make fuzz SEED=1000 CASES=500` runs others. A fault that another test found becomes a
production.
"""

import dataclasses

import jax
import pytest

from .programs.cases import Batch, Case, judge
from .programs.chains import Step
from .programs.coverage import chosen_batches, missing
from .programs.formulas import Formula, Term
from .programs.functions import Function, Leaf
from .programs.run import fresh_batches, wrong_cases
from .programs.scans import Call, Scan


# fmt: off
SEEDS = (
    1125, 1772, 1819, 3635, 4257, 4576, 4794, 4994, 5393, 6992, 7139, 7946,
    8445, 9933, 10228, 10977, 11446, 11452, 11558, 11850, 11853, 12743, 13791, 13961,
    13970, 14691, 18422, 18513, 18530, 20053, 20363, 20364, 20526, 21050, 21385, 21775,
    21780, 22940, 23131, 24986, 25418, 25483, 25932, 26652, 26887, 26931, 27260, 27408,
    27505, 28233, 28509, 29197, 29469, 33107, 34381, 34404, 35083, 36301, 36696, 37141,
    37581, 37974, 38686, 38729, 39036, 39829,
)
# fmt: on


def test_all_productions():
    assert not missing(chosen_batches(SEEDS))


@pytest.mark.parametrize(
    "batch", chosen_batches(SEEDS), ids=lambda batch: f"{len(batch.cases)}"
)
def test_quick(batch):
    assert not judge(batch)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1, 41))
def test_many(start):
    assert not wrong_cases(start, 200)
    jax.clear_caches()


def test_reproducible():
    first, second = (list(fresh_batches(3, 60)) for _ in range(2))
    assert first == second
    kinds = [case.kind for batch in first for case in batch.cases]
    assert len(kinds) == len(set(kinds)) == 60
    assert eval(repr(first[-1])) == first[-1]  # what a failure prints can be pasted


@pytest.mark.parametrize("style", ["jvp", "vjp"])
@pytest.mark.parametrize("is_scan", [False, True])
def test_wrong_rule_is_found(style, is_scan, monkeypatch):
    """The reference is that of another formula: as if the rule had a wrong factor."""
    leaves = (Leaf("float32", (3,)), Leaf("float32", (3,), 1))
    right = Formula((Term(0.5, ((0, "sin"), (1, "tanh"))),), "float32", (3,))
    out = ("tuple", ("leaf", 0), ("none",)) if is_scan else ("leaf", 0)
    args = (("leaf", 0), ("leaf", 1))
    function = Function(leaves, args, out, (right,), style=style)
    program = Scan(function, 4, (1,), checkpoint=2) if is_scan else Call(function)
    chain = (Step("jit"), Step("grad", (0, 1)))
    assert not judge(Batch((Case(program, chain),)))
    partial = Formula.partial
    factor = lambda self, *args: 1.01 * partial(self, *args)
    monkeypatch.setattr(Formula, "partial", factor)
    other = dataclasses.replace(function, nested=True)  # not the one that was traced already
    program = dataclasses.replace(program, function=other)
    (wrong,) = judge(Batch((Case(program, chain),)))
    assert "instead of" in wrong.reason
