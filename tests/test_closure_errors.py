"""Traced values that can't be hoisted, or not be differentiated: errors that say so."""

import collections
import dataclasses
import functools as ft
import types
from collections.abc import Callable

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .rules.holding import (
    another_with_a_rule,
    bound_method,
    callable_module,
    closure,
    containers,
    default_argument,
    HOLDERS,
    jitted_inner_function,
    nested_function,
    partial,
    partial_by_keyword,
    raw_custom_jvp,
    x,
)


# What each way of holding a value is called in the error.
NAMES = {
    closure: "closes over.\n  at `a`, held by `held`",
    default_argument: "keyword-only argument.\n  at `a`",
    partial: r"closes over.\n  at `args\[0\]`, held by `value`",
    partial_by_keyword: "keyword-only argument.\n  at `a`",
    bound_method: "closes over.\n  at `self.a`",
    callable_module: "closes over.\n  at `a`",
    nested_function: "closes over.\n  at `a`, held by `inner`",
    jitted_inner_function: "closes over.\n  at `a`, held by `inner`",
    raw_custom_jvp: "closes over.\n  at `a`, held by `inner`",
    another_with_a_rule: "closes over.\n  at `a`, held by `<lambda>`",
    containers: r"closes over.\n  at `kept\['list'\]\[0\]\[0\]`, held by `held`",
}
ORDERS = {
    "grad": lambda f: jax.grad(f)(x()),
    "grad(jit)": lambda f: jax.grad(jax.jit(f))(x()),
    "jit(grad)": lambda f: jax.jit(jax.grad(f))(x()),
    "jvp": lambda f: jax.jvp(f, (x(),), (x(),)),
    "scan": lambda f: jax.grad(
        lambda a: jax.lax.scan(lambda c, _: (c + f(a), None), a, None, length=2)[0]
    )(x()),
    "vmap": lambda f: jax.vmap(jax.grad(f))(jnp.ones(2)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(x()),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("holders", ["jvp, function", "jvp, both", "vjp, function", "vjp, all"])
@pytest.mark.parametrize("hold", NAMES)
def test_differentiating_what_is_held(hold, holders, order):
    """Never a silent zero. The error has the user's name for it."""
    op, holders = HOLDERS[holders]
    with pytest.raises(eqg.RuleError, match=NAMES[hold]):
        ORDERS[order](lambda a: op(hold, a, holders)(2.0, 1.0))


def decorated(get, a):
    """A function and rules, all of which hold what `get` does."""
    f = eqg.custom_jvp(lambda x: jnp.sin(x) * get())
    f.def_jvp(lambda primals, tangents: (f(*primals), jnp.cos(*primals) * get() * tangents[0]))
    return f


class Plain:
    """No tree: how to make another one is not known."""

    def __init__(self, a):
        self.a = a

    def method(self):
        return self.a


class Slots:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a


@dataclasses.dataclass
class Data:
    a: object


def attribute(a):
    plain = Plain(a)
    return lambda: plain.a


def attribute_of_attribute(a):
    plain = Plain(Plain([a]))
    return lambda: plain.a.a[0]


def method_of_a_plain_object(a):
    return Plain(a).method


def slots(a):
    slots = Slots(a)
    return lambda: slots.a


def dataclass(a):
    data = Data(a)
    return lambda: data.a


def namespace(a):
    space = types.SimpleNamespace(a=a)
    return lambda: space.a


def element_of_a_set(a):
    kept = {HashableByIdentity(a)}
    return lambda: next(iter(kept)).a


class HashableByIdentity(Plain):
    pass


def element_of_a_deque(a):
    kept = collections.deque([a])
    return lambda: kept[0]


def attribute_of_a_function(a):
    def inner():
        return inner.a

    inner.a = a
    return inner


def attribute_of_a_class(a):
    class Config:
        scale = a

    return lambda: Config.scale


def cached_function(a):
    @ft.lru_cache
    def inner():
        return a

    return inner


NOT_HOISTED = {
    attribute: r"inside a `Plain`, .*\n  at `plain\.a`",
    attribute_of_attribute: r"inside a `Plain`, .*\n  at `plain\.a\.a\[0\]`",
    method_of_a_plain_object: "inside a `Plain`",
    slots: r"inside a `Slots`, .*\n  at `slots\.a`",
    dataclass: r"inside a `Data`, .*\n  at `data\.a`",
    namespace: r"inside a `SimpleNamespace`, .*\n  at `space\.a`",
    element_of_a_set: "inside a `",
    element_of_a_deque: "inside a `deque`",
    attribute_of_a_function: "traced value",
    attribute_of_a_class: "traced value",
    cached_function: "traced value",
}


@pytest.mark.parametrize("order", ["jit(grad)", "grad(jit)", "scan", "vmap"])
@pytest.mark.parametrize("make", NOT_HOISTED)
def test_a_place_that_can_not_be_emptied(make, order):
    """What is found is named; the message says what to do instead."""
    one = jnp.array(1.0)
    runs = {
        "jit(grad)": lambda f: jax.jit(lambda a: jax.grad(f(a))(one))(x()),
        "grad(jit)": lambda f: jax.grad(jax.jit(lambda x, a: f(a)(x)))(one, x()),
        "scan": lambda f: jax.grad(
            lambda c: jax.lax.scan(lambda c, a: (f(a)(c), None), c, jnp.ones(2))[0]
        )(one),
        "vmap": lambda f: jax.grad(lambda c: jnp.sum(jax.vmap(lambda a: f(a)(c))(jnp.ones(2))))(
            one
        ),
    }
    with pytest.raises(eqg.RuleError, match=NOT_HOISTED[make]):
        runs[order](lambda a: decorated(make(a), a))


def test_a_set_of_tracers_is_no_worse_than_a_set():
    """Tracers have no hash, so only what holds one can be in a set."""
    with pytest.raises(TypeError, match="nhashable"):
        jax.jit(lambda a: {a})(1.0)


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


def test_a_foreign_object_without_tracers_is_left_alone():
    """Anything may be closed over that holds none."""
    plain, kept = Plain(jnp.array(2.0)), {1, 2}

    def f_of(a):
        f = eqg.custom_jvp(lambda x: jnp.sin(x) * a * plain.a * len(kept))
        f.def_jvp(lambda p, t: (f(*p), jnp.cos(*p) * a * plain.a * len(kept) * t[0]))
        return f

    slope = jax.grad(jax.jit(lambda x, a: f_of(a)(x)))(x(), x())
    assert jnp.allclose(slope, jnp.cos(x()) * x() * 4)


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


def _by_partial(w):
    return ft.partial(jnp.multiply, w)


def _by_method(w):
    return Plain(w).method


@pytest.mark.parametrize(
    ("act", "scale", "name"),
    [
        (_by_closure, lambda w: jnp.sin, r"`w`, held by `self\.act`"),
        (_by_partial, lambda w: jnp.sin, r"`args\[0\]`, held by `self\.act`"),
        (lambda w: jnp.sin, _by_closure, r"`w`, held by `self\.scales\[0\]`"),
        (
            lambda w: _by_closure(_by_closure(w)(1.0)),
            lambda w: jnp.sin,
            r"`w`, held by `self\.act`",
        ),
        (lambda w: jax.jit(_by_closure(w)), lambda w: jnp.sin, r"`w`, held by .*`self\.act`"),
    ],
)
def test_a_field_whose_function_holds_the_value(act, scale, name):
    """The error names the field. What it says to do works."""
    loss = lambda w: Dense(act(w), [scale(w)])(3.0)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        with pytest.raises(
            eqg.RuleError, match=f"among its arguments closes over.\n  at {name}"
        ):
            transform(loss)(2.0)


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
