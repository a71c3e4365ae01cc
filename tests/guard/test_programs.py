"""Random programs with random rules, in random chains of transformations.

What they compute has to be what the same chain computes of the undecorated function. A program
is a call of a random function, or a scan of one; a chain has up to five transformations.

A program and a chain are counted as a case. Two cases differ in the structure, shapes and
dtypes of the arguments and outputs, in the formulas, in the style of the rule, in the options
of the scan, in the transformations or in what is perturbed, batched or carried in these;
cases that differ in values only are one. What makes them fast are small shapes, references
that the variants of a program share, and one compiled program for up to 18 cases: 250 to 650
cases in a minute of one CPU, 400 on average, measured on two cores of a loaded machine
without a compilation cache. So each third of the slow tests, which is what CI runs, needs
about eight minutes on two cores.

`make fuzz SEED=1000 CASES=500` runs others. A case that was wrong becomes a test with a name,
in the file of what was wrong.
"""

import dataclasses

import jax
import pytest

from .fuzz.cases import Batch, Case, judge
from .fuzz.chains import Step
from .fuzz.formulas import Formula, Term
from .fuzz.programs import Function, Leaf
from .fuzz.run import fresh_batches, wrong_cases
from .fuzz.scans import Call, Scan


def test_quick():
    assert not wrong_cases(0, 60)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1, 101))
def test_many(start):
    assert not wrong_cases(start, 200)
    jax.clear_caches()


@pytest.mark.thorough
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
