"""The pytest plugin: the fixtures `check_rule` and `check_gradients`, and their seed as an
option of the command line.

A module of its own, as pytest loads plugins in every run: importing `eqx_grads`, and with it
JAX, would make each of them slow, and would come before the import hooks of jaxtyping.
"""

import sys
from collections.abc import Generator
from typing import Any

import pytest


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("eqx-grads")
    group.addoption(
        "--eqx-grads-seed",
        type=int,
        default=0,
        help="seed of the random directions along which the fixtures look",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: Any) -> Generator[None, Any, Any]:
    """Leaves the first line of a failed check in pytest's summary of failures. On a server of
    continuous integration (`CI=1`) the summary would repeat the whole report."""
    result = yield
    testing = sys.modules.get("eqx_grads.testing")
    if call.excinfo is None or testing is None:
        return result
    if isinstance(call.excinfo.value, testing.RuleCheckError | testing.GradientCheckError):
        place = getattr(result.longrepr, "reprcrash", None)
        if place is not None:  # `--tb=native` has none
            place.message = place.message.partition("\n")[0]
    return result


@pytest.fixture
def check_rule(request):
    """`eqx_grads.testing.check_rule` with the seed of the command line. Its report is
    shown with the test's output if the test fails, for whatever reason."""
    import eqx_grads.testing as eqgt

    return _with_report(request, eqgt.check_rule)


@pytest.fixture
def check_gradients(request):
    """`eqx_grads.testing.check_gradients` with the seed of the command line. Its report is
    shown with the test's output if the test fails, for whatever reason."""
    import eqx_grads.testing as eqgt

    return _with_report(request, eqgt.check_gradients)


def _with_report(request: pytest.FixtureRequest, run: Any) -> Any:
    def check(fn, /, *args, raises=True, **kwargs):
        kwargs.setdefault("seed", request.config.getoption("--eqx-grads-seed"))
        report = run(fn, *args, raises=False, **kwargs)
        if raises:
            report.raise_if_failed()  # pytest shows the report as the text of the exception
        request.node.add_report_section("call", "eqx_grads", str(report))
        return report

    return check
