"""`explain_nan`: which call, step, layer and operation a record names."""

import inspect

import equinox as eqx
import equinox.internal as eqxi  # noqa: TID251, a loop that its users call directly
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from jax.scipy.special import betaln

from .helpers import skip_without_checkpointed_loops


BAD = {"a": jnp.ones(3), "b": jnp.zeros(3)}
ONE = jnp.array(1.0)


@pytest.fixture(autouse=True)
def _mixed_promotion():
    """The losses are what users write."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def line_of(fn, mark):
    source, first = inspect.getsourcelines(fn)
    (i,) = (i for i, text in enumerate(source) if f"# {mark}" in text)
    return first + i


# ---------------------------------------------------------------- calls of one function


def length(x):
    return jnp.sqrt(jnp.sum(x**2))


def through(x):
    return length(x)


def in_a_scan(x):
    step = lambda c, x: (c, length(x))
    return jnp.sum(jax.lax.scan(step, 0, x[None])[1])


class Length(eqx.Module):
    eps: jax.Array

    def __call__(self, x):
        return length(x) + self.eps


HELPERS = {
    "function": length,
    "of a function": through,
    "scan": in_a_scan,
    "filter_jit": eqx.filter_jit(length),
}


@pytest.mark.parametrize("name", HELPERS)
@pytest.mark.parametrize("bad", ["FIRST", "BOTH"])
def test_the_call_of_a_function_that_is_called_twice(name, bad):
    def loss(model):
        a = HELPERS[name](model["a"])  # FIRST
        b = HELPERS[name](model["b"])  # SECOND
        return a + b

    zeros = {"FIRST": "a", "SECOND": "b", "BOTH": "ab"}[bad]
    model = {key: jnp.zeros(3) if key in zeros else jnp.ones(3) for key in "ab"}
    report = eqg.explain_nan(loss, model)
    marks = ["SECOND", "FIRST"] if bad == "BOTH" else [bad]  # in backward order
    lines = [line_of(test_the_call_of_a_function_that_is_called_twice, mark) for mark in marks]
    assert [r.caller for r in report.found] == [
        f"test_explain_nan_places.py:{line}, in `loss`" for line in lines
    ]
    assert {r.line for r in report.found} == {LENGTH_LINE}
    for line in lines:
        assert f"test_explain_nan_places.py:{line}" in str(report)


LENGTH_LINE = inspect.getsourcelines(length)[1] + 1


def test_the_layer_tells_two_calls_apart():
    model = [(Length(ONE), jnp.ones(3)), (Length(ONE), jnp.zeros(3))]

    def loss(model):
        (f, x), (g, y) = model
        fx = f(x)
        return fx + g(y)

    (record,) = eqg.explain_nan(loss, model).found
    assert (record.path, record.caller) == ("[1][0]", "")


# ---------------------------------------------------------------- steps


def outputs(fn):
    def loss(w, xs):
        step = lambda c, x: (c, fn(w, x))
        return jnp.sum(jax.lax.scan(step, 0.0, xs)[1])

    return loss


def test_a_nan_in_the_data_and_a_root_at_other_steps():
    """A `where` drops both: they have the same kind and the same operation."""

    def loss(w, xs):
        step = lambda c, x: (c, jnp.sqrt(w + x))
        ys = jax.lax.scan(step, 0.0, xs)[1]
        return jnp.sum(jnp.where(xs > 0, ys, 0.0))

    xs = jnp.ones(10).at[2].set(jnp.nan).at[7].set(-3.0)
    root, data = eqg.explain_nan(loss, ONE, xs).found
    assert {root.kind, data.kind} == {"dead branch"}
    assert (root.step, root.count) == ((7,), 1)
    assert (data.step, data.count) == ((2,), 1)
    assert data.cure.startswith("`xs` holds the NaN")


# ---------------------------------------------------------------- layers of Equinox

LAYERS = {
    "RMSNorm": lambda eps: eqx.nn.RMSNorm(4, eps=eps),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_equinox_is_a_library(name):
    layer, x = LAYERS[name](0.0), jnp.ones((2, 4)).at[1].set(0.0)

    def loss(layer, x):
        return jnp.sum(jax.vmap(layer)(x))  # HERE

    (record,) = eqg.explain_nan(loss, layer, x).found
    assert (record.line, record.path) == (line_of(loss, "HERE"), name)
    assert record.library.startswith("equinox/nn/_normalisation.py:")
    assert "the argument `eps`" in record.cure
    assert "is in a library" in record.cure
    assert not eqg.explain_nan(loss, LAYERS[name](1e-5), x)


def test_a_layer_that_calls_the_users_function_is_no_library():
    model = eqx.nn.Lambda(lambda x: jnp.sum(jnp.log(x)))
    loss = lambda model, x: model[0](model[1] * x)
    (record,) = eqg.explain_nan(loss, (model, ONE), jnp.zeros(2)).found
    assert record.library == ""


def test_a_distribution_of_jax_is_a_library():
    loss = lambda scale: jnp.sum(jax.scipy.stats.norm.logpdf(1.0, 0.0, scale))
    report = eqg.explain_nan(loss, jnp.zeros(2))
    assert report
    assert all("/scipy/stats/norm.py:" in record.library for record in report.found)


# ---------------------------------------------------------------- the kind is the operation


def test_one_fault_in_several_branches_of_a_function_of_jax():
    (record,) = eqg.explain_nan(lambda p: betaln(p[0], p[1]), jnp.array([0.0, 1.0])).found
    assert (record.kind, record.primitive) == ("true singularity", "lgamma")


# ---------------------------------------------------------------- texts


@pytest.mark.slow
def test_each_place_in_the_rule_of_a_loop_of_a_library():
    """To the loss, all that such a loop runs is one operation: only the first place was found,
    and again after its cure. The steps were the steps of the loop in the rule, which runs some
    steps forward and others backward."""
    skip_without_checkpointed_loops()
    n_steps = 6

    def field(theta, v):
        s = jnp.linalg.norm(v, axis=-1, keepdims=True)
        d = jnp.where(s > 0, v / s, 0.0)
        return theta * jnp.array([[1.0], [0.0]]) - theta * s**2 * d

    def loss(theta):
        def advance(carry):
            i, v, saved = carry
            v = v + 0.1 * field(theta, v)
            return i + 1, v, saved.at[i].set(v)

        start = jnp.array(0), jnp.zeros((2, 2)), jnp.zeros((n_steps, 2, 2))
        loop = eqxi.while_loop(
            lambda carry: carry[0] < n_steps,
            advance,
            start,
            max_steps=n_steps,
            checkpoints=3,
            kind="checkpointed",
            buffers=lambda carry: carry[2],
        )
        return jnp.sum(loop[2] ** 2)

    report = eqg.explain_nan(loss, jnp.array(0.7))
    assert [(r.primitive, "v / s" in r.code) for r in report.found] == [
        ("div", True),
        ("sqrt", False),
    ]
    assert all(r.step == () for r in report.found)
    assert "step" not in str(report).splitlines()[2]
