"""`explain_nan` finds planted causes at the right line, step and kind, and none elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_grads as eqg

from . import nan_causes
from .nan_causes import HEALTHY, PLANTED, Planted


def _explain(make, threshold=None):
    loss, model, *args = make()
    return eqg.explain_nan(loss, model, *args, threshold=threshold)


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_planted(case: Planted):
    report = _explain(case.make, case.threshold)
    assert report
    lines = [r.line for r in report.found if r.file == nan_causes.__file__]
    if case.lines("HERE"):
        assert set(lines) == set(case.lines("HERE")) or (
            case.others and set(case.lines("HERE")) <= set(lines)
        ), str(report)
    expected = case.lines("HERE")
    records = [r for r in report.found if r.line in expected] if expected else report.found
    for r in records[:1]:
        assert r.kind == case.kind, str(report)
        assert r.step == case.step, str(report)
        assert case.primitive in (None, r.primitive), str(report)
        assert r.path == case.path, str(report)
        assert case.index in (None, r.index), str(report)
        assert r.cure
        if case.lines("MASK"):
            assert r.mask.endswith(f"line {case.lines('MASK')[0]}"), str(report)


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_healthy(make):
    report = _explain(make)
    assert not report, str(report)
    assert str(report) == "The loss and its gradient are finite."
