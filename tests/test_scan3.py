"""JAX's unfinished switch `jax_scan3`: our loops run without it and say so, and are right."""

import ast
import contextlib
import pathlib

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from .helpers import assert_close


SOURCES = sorted(pathlib.Path(eqg.__file__).parent.rglob("*.py"))
SAYS_SO = "ignore:JAX's switch `jax_scan3` is on"
needs_switch = pytest.mark.skipif(
    not hasattr(jax.config, "jax_scan3"), reason="This version of JAX has no such switch."
)
CELL = eqx.nn.GRUCell(3, 4, key=jr.key(0))
XS = jr.normal(jr.key(1), (6, 3))


@contextlib.contextmanager
def scan3():
    jax.config.update("jax_scan3", True)
    try:
        yield
    finally:
        jax.config.update("jax_scan3", False)


def scanned(**options):
    def loss(cell, xs):
        step = lambda h, x: (cell(x, h), h[0])
        h, ys = eqg.filter_scan(step, jnp.full(4, 0.1), xs, **options)
        return jnp.sum(h**2) + jnp.sum(jnp.sin(ys))

    return loss


def nested(cell, xs):
    """A scan of JAX, in the steps of one of ours."""
    inner = lambda h, x: (jnp.tanh(h + x), None)
    step = lambda h, x: (jax.lax.scan(inner, h, jnp.stack([x, -x]))[0], h[0])
    h, ys = eqg.filter_scan(step, jnp.zeros(3), xs, checkpoint="replay")
    return jnp.sum(h) + jnp.sum(ys) * jnp.sum(cell.bias)


def online(cell, xs):
    decay = cell.bias_n[:3]
    step = lambda h, x: (jnp.tanh(decay * h + x), h)
    return jnp.sum(
        eqg.filter_scan(step, jnp.zeros(3), jax.lax.stop_gradient(xs), online=True)[1]
    )


def layer(make, *sizes, **options):
    def loss(cell, xs):
        run = make(*sizes, key=jr.key(2), **options)
        out = jax.tree.leaves(run(xs))[0]
        return jnp.sum(jnp.sin(jnp.real(out))) * jnp.sum(cell.bias)

    return loss


LOSSES = {
    "reverse": scanned(reverse=True),
    "2": scanned(checkpoint=2),
    "sqrt": scanned(checkpoint="sqrt"),
    "replay, reverse": scanned(checkpoint="replay", reverse=True),
    "auto": scanned(checkpoint="auto"),
    "truncate, replay": scanned(truncate=3, checkpoint="replay"),
    "nested": nested,
    "online": online,
    "linear_recurrence": lambda cell, xs: (
        jnp.sum(eqg.linear_recurrence(jax.nn.sigmoid(xs), xs, method="scan"))
        + jnp.sum(cell.bias)
    ),
    "GRU": layer(nn.GRU, 3, 4),
    "LSTM": layer(nn.LSTM, 3, 4),
    "LRU": layer(nn.LRU, 3, 4, 4),
    "zero_safe": eqg.zero_safe(
        lambda cell, xs: jnp.sum(jax.lax.scan(lambda h, x: (h * x, h), cell.bias_n[:3], xs)[1])
    ),
}


def _some_are_quick(names):
    quick = ("replay, reverse", "GRU")
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.slow
@needs_switch
@pytest.mark.filterwarnings(SAYS_SO)
@pytest.mark.parametrize("name", _some_are_quick(LOSSES))
def test_gradients(name):
    grad = eqx.filter_grad(lambda args: LOSSES[name](*args))
    batched = jax.vmap(lambda xs: eqx.filter(grad((CELL, xs)), eqx.is_array))
    expected = jax.jit(batched)(jnp.stack([XS, 0.5 * XS]))
    with scan3():
        assert_close(jax.jit(batched)(jnp.stack([XS, 0.5 * XS])), expected, eps=100)


@pytest.mark.slow
@needs_switch
@pytest.mark.filterwarnings(SAYS_SO)
def test_eager():
    loss = LOSSES["replay, reverse"]
    derivatives = eqx.filter_value_and_grad(loss), lambda cell, xs: loss(cell, xs)
    expected = [derive(CELL, XS) for derive in derivatives]
    with scan3():
        assert_close([derive(CELL, XS) for derive in derivatives], expected, eps=100)


@needs_switch
def test_says_so():
    with scan3(), pytest.warns(UserWarning, match=r"`jax_scan3` is on, and `eqx_grads` runs"):
        eqg.filter_scan(lambda h, x: (h + x, h), jnp.zeros(3), XS)
    # `jax.config` is as it was, and JAX's own scan is untouched.
    with scan3(), contextlib.suppress(UserWarning):
        assert jax.config.jax_scan3
        with pytest.raises(NotImplementedError, match="Scan3"):
            jax.grad(lambda x: jax.lax.scan(lambda h, x: (h + x, h), 0.0, x)[0])(jnp.ones(3))


@pytest.mark.slow
@needs_switch
@pytest.mark.filterwarnings(SAYS_SO)
@pytest.mark.parametrize(
    "explain",
    [
        eqg.explain_nan,
        *(
            pytest.param(explain, marks=pytest.mark.slow)
            for explain in (eqg.explain_zero, eqg.explain_memory, eqg.gradient_flow)
        ),
    ],
    ids=lambda explain: explain.__name__,
)
def test_diagnosis_of_a_scan_of_jax(explain):
    def loss(cell, xs):
        step = lambda h, x: (cell(x, h), jnp.sqrt(0.0 * h[0]))
        h, ys = jax.lax.scan(step, jnp.zeros(4), xs)
        return jnp.sum(h) + jnp.sum(ys)

    expected = str(explain(loss, CELL, XS))
    with scan3():
        assert str(explain(loss, CELL, XS)) == expected


@pytest.mark.slow
@needs_switch
@pytest.mark.filterwarnings(SAYS_SO)
def test_check_rule():
    square = eqg.custom_vjp(lambda x: x * x)
    square.def_fwd(lambda x: (x * x, x))
    square.def_bwd(lambda x, ct: (2 * x * ct,))
    with scan3():
        eqgt.check_rule(square, jnp.array([0.5, -1.5]))


@needs_switch
def test_a_jax_with_another_way_to_switch(monkeypatch):
    with scan3():
        monkeypatch.setattr(jax.config, "_value_holders", {})
        with pytest.raises(
            NotImplementedError, match=r"can't run with JAX's switch `jax_scan3`"
        ):
            eqg.filter_scan(lambda h, x: (h + x, h), jnp.zeros(3), XS)
        monkeypatch.undo()


@pytest.mark.slow
def test_every_loop_runs_without_the_switch():
    loops = {"jax.lax.scan", "jax.lax.fori_loop", "jax.lax.map"}
    found = {
        str(path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in loops
    }
    assert {pathlib.Path(path).name for path in found} == {"plain_scan.py"}, "Use `lax_scan`."
