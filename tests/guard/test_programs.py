"""Random programs with random rules, in random chains of transformations.

Each result has to be the result of the same program without the library: with plain loops, and
with plain autodiff. Where the rule is not autodiff's, the reference has the same rule by
`jax.custom_jvp` or `jax.custom_vjp`. A program is a call of a random function, or a scan of
one. A chain has up to five transformations, loops and ops.

A program and a chain are a case. Cases that differ in values only count as one. `test_quick`
has few cases, which have all productions of the grammar (`programs/coverage.py`). If the
grammar changes, `python -m tests.guard.programs choose` finds new ones.

`python -m tests.guard.programs 1000 500` runs others. A fault that another test found becomes a
production.
"""

import dataclasses

import jax
import pytest

from .programs.cases import Batch, Case, judge
from .programs.chains import Step
from .programs.coverage import chosen_batches, missing
from .programs.draw import wrong_cases
from .programs.formulas import Formula, Term
from .programs.functions import Function, Leaf
from .programs.scans import Call, Scan


pytestmark = [pytest.mark.versions, pytest.mark.x64]


# fmt: off
SEEDS = (
    269, 777, 796, 1934, 4576, 5856, 7024, 7946, 8081, 8301, 8816, 9158, 11816, 11853, 12035,
    12399, 12743, 13961, 15270, 16331, 17260, 17289, 18692, 19089, 20826, 21539, 22218, 23678,
    24003, 24320, 26355, 26860, 27036, 28233, 28344, 30196, 33739, 34030, 34104, 36301, 36493,
    38246, 40138, 40962, 42478, 43202, 43452, 44007, 47707, 47724, 50966, 52074, 52544, 52660,
    52831, 53779, 56299, 56306, 56709, 57051, 57527, 57573, 58357, 58449,
)  # fmt: skip
# fmt: on


def test_all_productions():
    assert not missing(chosen_batches(SEEDS), 3_000)


@pytest.mark.parametrize(
    "batch", chosen_batches(SEEDS), ids=lambda batch: f"{len(batch.cases)}"
)
def test_quick(batch):
    cases = tuple(case for case in batch.cases if not _is_wrong_with_remat3(case))
    assert not judge(dataclasses.replace(batch, cases=cases))


def _is_wrong_with_remat3(case):
    """With `jax_remat3`, JAX itself is wrong (`REMAT3_HAS_NO_SECOND_ORDER` in `helpers.py`)."""
    program = case.program
    is_checkpointed = isinstance(program, Scan) and program.checkpoint is not None
    has_own = program.function.is_raw or program.function.has_own_derivative
    return getattr(jax.config, "jax_remat3", False) and is_checkpointed and has_own


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1, 41))
def test_many(start):
    assert not wrong_cases(start, 200)
    jax.clear_caches()


@pytest.mark.parametrize("style", ["jvp", "vjp"])
@pytest.mark.parametrize("is_scan", [False, True])
def test_wrong_rule_is_found(style, is_scan, monkeypatch):
    """The reference has another formula: as if the rule had a wrong factor."""
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
