"""A slow diagnosis says on a terminal what it is doing, and nothing elsewhere."""

import io
import time

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax.numpy as jnp
import pytest
from eqx_grads._diagnosis import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def slow(w):
    time.sleep(0.1)
    return jnp.sum(w**2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "tool", [eqg.explain_nan, eqg.explain_zero, eqg.explain_memory, eqgt.check_gradients]
)
def test_on_a_terminal(tool, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", 0.01)
    monkeypatch.setattr(progress, "_INTERVAL", 0.01)
    monkeypatch.setattr("sys.stderr", Terminal())
    tool(slow, jnp.ones(3))
    text = progress.sys.stderr.getvalue()
    assert f"{tool.__name__}: tracing" in text
    assert text.endswith("\r\x1b[K")  # it is taken back


def test_what_is_quick_shows_nothing(monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", 60.0)
    monkeypatch.setattr("sys.stderr", Terminal())
    eqg.explain_nan(slow, jnp.ones(3))
    assert not progress.sys.stderr.getvalue()


def test_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    eqg.explain_nan(slow, jnp.ones(3))
    assert capsys.readouterr().err == ""


def test_an_error_ends_it(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    with pytest.raises(eqg.RuleError, match="real scalar"):
        eqg.explain_nan(lambda w: w, jnp.ones(3))
    assert progress._TEXT.get() is None
