"""`check_gradients` finds every planted fault of a model, and accuses no right model."""

import pytest
import eqx_grads.testing as eqgt

from .model_faults import FAULTS
from .right_models import RIGHT


def assert_found(name):
    fault = FAULTS[name]
    fn, model, *args = fault.make()
    report = eqgt.check_gradients(fn, model, *args, raises=False)
    assert {found.path for found in report.found} == set(fault.wrong), str(report)
    for found in report.found:
        assert found.kind == fault.kind, str(report)
        assert found.layer == fault.layer, str(report)
        assert found.function == fault.function, str(report)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name):
    assert_found(name)


@pytest.mark.parametrize("name", RIGHT)
def test_right_model_is_not_accused(name):
    fn, model, *args = RIGHT[name]()
    report = eqgt.check_gradients(fn, model, *args)
    print(report)
    assert not report
