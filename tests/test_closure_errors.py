"""Traced values that can't be hoisted, or not be differentiated: errors that say so."""

from collections.abc import Callable

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .rules.holding import (
    bound_method,
    closure,
    containers,
    default_argument,
    HOLDERS,
    jitted_inner_function,
    nested_function,
    partial,
    raw_custom_jvp,
    x,
)


pytestmark = pytest.mark.versions


# What each way of holding a value is called in the error.
NAMES = {
    closure: "closes over.\n  at `a`, held by `held`",
    default_argument: "keyword-only argument.\n  at `a`",
    partial: r"closes over.\n  at `args\[0\]`, held by `value`",
    bound_method: "closes over.\n  at `self.a`",
    nested_function: "closes over.\n  at `a`, held by `inner`",
    jitted_inner_function: "closes over.\n  at `a`, held by `inner`",
    raw_custom_jvp: "closes over.\n  at `a`, held by `inner`",
    containers: r"closes over.\n  at `kept\['list'\]\[0\]\[0\]`, held by `held`",
}
ORDERS = {
    "grad": lambda f: jax.grad(f)(x()),
    "grad(jit)": lambda f: jax.grad(jax.jit(f))(x()),
    "jit(grad)": lambda f: jax.jit(jax.grad(f))(x()),
    "scan": lambda f: jax.grad(
        lambda a: jax.lax.scan(lambda c, _: (c + f(a), None), a, None, length=2)[0]
    )(x()),
    "vmap": lambda f: jax.vmap(jax.grad(f))(jnp.ones(2)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("holders", ["jvp, function", "vjp, all"])
@pytest.mark.parametrize("hold", NAMES)
def test_differentiating_what_is_held(hold, holders, order):
    """Never a silent zero. The error has the user's name for it."""
    op, holders = HOLDERS[holders]
    with pytest.raises(eqg.RuleError, match=NAMES[hold]):
        ORDERS[order](lambda a: op(hold, a, holders)(2.0, 1.0))


def decorated(get, a):
    """A function and rules, which all hold the same value as `get`."""
    f = eqg.custom_jvp(lambda x: jnp.sin(x) * get())
    f.def_jvp(lambda primals, tangents: (f(*primals), jnp.cos(*primals) * get() * tangents[0]))
    return f


class Plain:
    """No tree: how to make another one is not known."""

    def __init__(self, a):
        self.a = a

    def method(self):
        return self.a


def attribute(a):
    plain = Plain(a)
    return lambda: plain.a


def attribute_of_a_function(a):
    def inner():
        return inner.a

    inner.a = a
    return inner


def attribute_of_a_class(a):
    class Config:
        scale = a

    return lambda: Config.scale


NOT_HOISTED = {
    attribute: r"inside a `Plain`, .*\n  at `plain\.a`",
    attribute_of_a_function: "traced value",
    attribute_of_a_class: "traced value",
}


@pytest.mark.parametrize("order", ["jit(grad)", "grad(jit)", "scan"])
@pytest.mark.parametrize("make", NOT_HOISTED)
def test_a_place_that_can_not_be_emptied(make, order):
    """The error names the place; the message says what to do instead."""
    one = jnp.array(1.0)
    runs = {
        "jit(grad)": lambda f: jax.jit(lambda a: jax.grad(f(a))(one))(x()),
        "grad(jit)": lambda f: jax.grad(jax.jit(lambda x, a: f(a)(x)))(one, x()),
        "scan": lambda f: jax.grad(
            lambda c: jax.lax.scan(lambda c, a: (f(a)(c), None), c, jnp.ones(2))[0]
        )(one),
    }
    with pytest.raises(eqg.RuleError, match=NOT_HOISTED[make]):
        runs[order](lambda a: decorated(make(a), a))


GLOBAL = None


def _reads_global(x):
    return jnp.sin(x) * GLOBAL


def _reads_global_jvp(primals, tangents):
    return jnp.sin(*primals), jnp.cos(*primals) * GLOBAL * tangents[0]


@pytest.mark.parametrize("who", ["function", "rule", "nested function"])
def test_a_traced_global(who, monkeypatch):
    fn, rule = jnp.sin, lambda primals, tangents: (jnp.sin(*primals), tangents[0])
    if who == "function":
        fn = _reads_global
    elif who == "rule":
        rule = _reads_global_jvp
    else:
        inner = _reads_global
        fn = lambda x: inner(x)
    f = eqg.custom_jvp(fn)
    f.def_jvp(rule)

    def loss(x, a):
        monkeypatch.setitem(globals(), "GLOBAL", a)
        return f(x)

    with pytest.raises(eqg.RuleError, match="from the global variable `GLOBAL`"):
        jax.grad(jax.jit(loss))(x(), x())
    with pytest.raises(eqg.RuleError, match="from the global variable `GLOBAL`"):
        jax.jit(jax.grad(loss))(x(), x())


class Dense(eqx.Module):
    act: Callable
    scales: list

    @eqg.custom_jvp
    def __call__(self, x, *, transform=jnp.negative):
        return transform(self.act(x) * self.scales[0](x))

    @__call__.def_jvp
    def _call_jvp(primals, tangents, *, transform):
        value = lambda self, x: transform(self.act(x) * self.scales[0](x))
        out, t_out = eqx.filter_jvp(value, primals, tangents)
        return out, 2 * t_out  # twice the derivative, to be told from autodiff


def _by_closure(w):
    return lambda x: x * w


@pytest.mark.parametrize("partial", [eqx.Partial, jax.tree_util.Partial])
def test_a_partial_that_is_a_tree_is_differentiated(partial):
    """As the error for a closure says."""
    loss = lambda w: Dense(partial(jnp.multiply, w), [jnp.cos])(3.0)
    assert jnp.allclose(jax.grad(loss)(2.0), -2 * 3.0 * jnp.cos(3.0))


def test_a_configuration_whose_function_holds_the_value():
    """Configuration has no derivative, also as a leaf: the error says something else."""
    loss = lambda w: Dense(jnp.sin, [jnp.cos])(3.0, transform=_by_closure(w))
    with pytest.raises(eqg.RuleError, match="`w`, held by `transform`") as error:
        jax.grad(loss)(2.0)
    assert "Make the value a positional parameter" in str(error.value)
    assert "eqx.Partial" not in str(error.value)
