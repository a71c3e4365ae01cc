"""Functions and rules that hold traced values, each other or themselves: the values become
operands, or the error names the place. And values that must not be differentiated."""

import contextlib
import functools as ft
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .helpers import assert_close, checking_leaks, fails_with_remat3, REMAT3_HAS_NO_TRANSPOSE


pytestmark = pytest.mark.versions

X, MANY = jnp.array(0.7), jnp.linspace(0.5, 1.5, 3)


# ---------------------------------------------------------------- ways to hold a value
# Each makes a function of the other arguments of `fn(a, *args)`.


def closure(fn, a):
    return lambda *args: fn(a, *args)


def default_argument(fn, a):
    def held(*args, a=a):
        return fn(a, *args)

    return held


class Holder(eqx.Module):
    a: jax.Array
    fn: Any

    def method(self, *args):
        return self.fn(self.a, *args)

    def __call__(self, *args):
        return self.fn(self.a, *args)


def bound_method(fn, a):
    return Holder(a, fn).method


def nested_function(fn, a):
    inner = lambda: a
    middle = lambda: inner()
    return lambda *args: fn(middle(), *args)


def nested_default(fn, a):
    def inner(*, a=a):
        return a

    return lambda *args: fn(inner(), *args)


def compiled_function(fn, a):
    inner = jax.jit(lambda b: a + 0 * b)
    return lambda *args: fn(inner(1.0), *args)


def rule_of_jax(fn, a):
    inner = jax.custom_jvp(lambda b: a * b)
    inner.defjvp(lambda primals, tangents: (inner(*primals), a * tangents[0]))
    return lambda *args: fn(inner(1.0), *args)


def containers(fn, a):
    kept = {"list": [(a, "text")]}
    return lambda *args: fn(kept["list"][0][0], *args)


# With the name of the value in an error.
WAYS = {
    closure: "closes over.\n  at `a`, held by `<lambda>`",
    default_argument: "keyword-only argument.\n  at `a`",
    ft.partial: r"closes over.\n  at `args\[0\]`, held by `_value`",
    bound_method: "closes over.\n  at `self.a`",
    nested_function: "closes over.\n  at `a`, held by `<lambda>`",
    nested_default: "closes over",
    compiled_function: "closes over.\n  at `a`, held by `<lambda>`",
    rule_of_jax: "closes over.\n  at `a`, held by `<lambda>`",
    containers: r"closes over.\n  at `kept\['list'\]\[0\]\[0\]`, held by `<lambda>`",
}
# The leak checker finds it without a rule of ours: https://github.com/jax-ml/jax/pull/34216
LEAKY = (rule_of_jax,)


def _value(a, x, _):
    return jnp.sin(x) * a


def _jvp(a, primals, tangents):
    (x, _), (t_x, t_a) = primals, tangents
    return jnp.sin(x) * a, jnp.cos(x) * a * t_x + jnp.sin(x) * t_a


def _fwd(a, x, b):
    return jnp.sin(x) * a, (x, b)


def _bwd(a, residuals, ct):
    x, _ = residuals
    return jnp.cos(x) * a * ct, jnp.sin(x) * ct


def op(hold, a, who):
    """`sin(x) * b` of `x` and `b`. Who holds the equal value `a` uses that instead of `b`."""

    def pick(name, fn):
        last = lambda args: args[0][-1] if type(args[0]) is tuple else args[-1]
        return hold(fn, a) if name in who else lambda *args: fn(last(args), *args)

    if "jvp" in who:
        f = eqg.custom_jvp(pick("function", _value))
        f.def_jvp(pick("rule", _jvp))
        return f
    f = eqg.custom_vjp(pick("function", _value))
    f.def_fwd(pick("fwd", _fwd))
    f.def_bwd(pick("bwd", _bwd))
    return f


# ---------------------------------------------------------------- where the value comes from
# `f_of(a)` is `sin(x) * a` as a function of `x` and `a`, made where `a` is traced.


def jit_and_grad(f_of):
    f = lambda x, a: f_of(a)(x, a)
    return jax.jit(jax.value_and_grad(f))(X, MANY[0]), jax.value_and_grad(jax.jit(f))(
        X, MANY[0]
    )


def scan(f_of):
    """The gradient outside of the scan, and inside."""

    def loss(x, many):
        body = lambda x, a: (f_of(2 * a)(x, 2 * a), jax.grad(f_of(a))(x, a))
        x, slopes = jax.lax.scan(body, x, many)
        return x, slopes

    outside = jax.value_and_grad(loss, has_aux=True)(X, MANY)
    return outside, jax.grad(jax.jit(loss), has_aux=True)(X, MANY)


def vmap(f_of):
    """The gradient outside of the map, and inside; `x` batched, and not."""
    f = lambda x, a: f_of(a)(x, a)
    total = lambda x, many: jnp.sum(jax.vmap(f, in_axes=(None, 0))(x, many))
    found = [jax.grad(f_)(X, MANY) for f_ in (total, jax.jit(total))]
    return (
        found,
        jax.vmap(jax.grad(f), in_axes=(None, 0))(X, MANY),
        jax.vmap(jax.grad(f))(MANY, MANY),
    )


def agree(f_of, value=lambda x, a: jnp.sin(x) * a, leaky=False):
    with contextlib.nullcontext() if leaky else checking_leaks():
        got = [order(f_of) for order in (jit_and_grad, scan, vmap)]
    assert_close(got, _expected(value))


@ft.cache
def _expected(value):
    return [order(lambda a: value) for order in (jit_and_grad, scan, vmap)]


WHO = ("jvp, function", "jvp, rule", "function", "fwd", "bwd")
ALL = ("jvp, function, rule", "function, fwd, bwd")
# What holds a value is emptied in the same way for both kinds of rules.
CASES = [(closure, who) for who in WHO] + [(h, ALL[i % 2]) for i, h in enumerate(WAYS)]


@pytest.mark.parametrize(("hold", "who"), CASES)
def test_held(hold, who):
    agree(lambda a: op(hold, a, who.split(", ")), leaky=hold in LEAKY)


@pytest.mark.parametrize("who", ["jvp, rule", "bwd"])
def test_rules_are_differentiated_with_respect_to_what_they_hold(who):
    """The value does not depend on what only a rule holds, but the first derivative does."""
    for hold in (closure, ft.partial, bound_method):
        slope = lambda a, h=hold: jax.grad(op(h, a, who.split(", ")))(X, jnp.array(2.0))
        assert_close(jax.grad(slope)(X), jnp.cos(X))
        assert_close(jax.grad(jax.jit(slope))(X), jnp.cos(X))


def _rules_that_name_each_other(a):
    even = eqg.custom_jvp(lambda x, _: jnp.cos(x) * a)
    even.def_jvp(lambda p, t: (even(*p), -odd(*p) * t[0]))
    odd = eqg.custom_jvp(lambda x, _: jnp.sin(x) * a)
    odd.def_jvp(lambda p, t: (odd(*p), even(*p) * t[0]))
    return odd


def _cycle_through_a_container(a):
    table = {"a": a}
    table["f"] = f = eqg.custom_jvp(lambda x, _: jnp.sin(x) * table["a"])
    f.def_jvp(lambda p, t: (table["f"](*p), jnp.cos(p[0]) * table["a"] * t[0]))
    return f


def test_cycles():
    agree(_rules_that_name_each_other)
    agree(_cycle_through_a_container)


def test_recursion():
    """A function that calls itself, and closes over itself."""

    def f_of(a):
        power = eqg.custom_vjp(lambda x, n=3: a if n == 0 else x * power(x, n - 1))
        power.def_fwd(lambda x, n=3: (power(x, n), (x, n)))
        power.def_bwd(lambda r, ct: (ct * r[1] * power(r[0], r[1] - 1), None))
        return lambda x, _: power(x, 3)

    agree(f_of, lambda x, a: a * x**3)


def test_what_a_function_closes_over_need_not_be_a_pytree():
    def make(registry):
        f = eqg.custom_jvp(lambda x: x * len(registry))
        f.def_jvp(lambda p, t: (f(p[0]), len(registry) * t[0]))
        return f

    for registry in ({int: 1, str: 2}, {1: 1, "a": 2}, {1, "b"}, [iter([1]), object()]):
        assert jax.grad(make(registry))(1.0) == 2.0


def test_a_cell_without_a_tracer_is_shared():
    """D12: with the original."""
    calls = 0

    def loss(x, a):
        def fn(x):
            nonlocal calls
            calls += 1
            return jnp.sin(x) * a

        f = eqg.custom_jvp(fn)
        f.def_jvp(lambda p, t: (f(*p), jnp.cos(*p) * a * t[0]))
        return f(x)

    jax.jit(loss)(1.0, 2.0)
    assert calls == 1


# ---------------------------------------------------------------- errors

ORDERS = {
    "grad": lambda f: jax.grad(f)(X),
    "grad(jit)": lambda f: jax.grad(jax.jit(f))(X),
    "jit(grad)": lambda f: jax.jit(jax.grad(f))(X),
    "scan": lambda f: jax.grad(
        lambda a: jax.lax.scan(lambda c, _: (c + f(a), None), a, None, length=2)[0]
    )(X),
    "vmap": lambda f: jax.vmap(jax.grad(f))(jnp.ones(2)),
}


@pytest.mark.parametrize("hold", WAYS)
def test_differentiating_what_is_held(hold):
    """Never a silent zero. The error has the user's name for it."""
    for who in ("jvp, function", "function, fwd, bwd"):
        for order in ORDERS.values():
            with pytest.raises(eqg.RuleError, match=WAYS[hold]):
                order(lambda a, who=who: op(hold, a, who.split(", "))(2.0, 1.0))


def test_a_place_that_can_not_be_emptied():
    def loss(x, a):
        get = lambda: get.a  # an attribute of a function
        get.a = a
        f = eqg.custom_jvp(lambda x: jnp.sin(x) * get())
        f.def_jvp(lambda p, t: (f(*p), jnp.cos(*p) * get() * t[0]))
        return f(x)

    for run in (jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        with pytest.raises(eqg.RuleError, match="traced value"):
            run(X, X)


class Dense(eqx.Module):
    act: Any

    @eqg.custom_jvp
    def __call__(self, x, *, transform=jnp.negative):
        return transform(self.act(x))

    @__call__.def_jvp
    def _call_jvp(primals, tangents, *, transform):
        out, t_out = eqx.filter_jvp(lambda self, x: transform(self.act(x)), primals, tangents)
        return out, 2 * t_out  # twice the derivative, to be told from autodiff


def test_what_the_errors_advise():
    """A `Partial` that is a tree is differentiated, and configuration has no derivative."""
    for partial in (eqx.Partial, jax.tree_util.Partial):
        assert jax.grad(lambda w, p=partial: Dense(p(jnp.multiply, w))(3.0))(2.0) == -6.0
    loss = lambda w: Dense(jnp.sin)(3.0, transform=closure(lambda w, x: x * w, w))
    with pytest.raises(eqg.RuleError, match="`a`, held by `<lambda>`") as error:
        jax.grad(loss)(2.0)
    assert "Make the value a positional parameter" in str(error.value)


# ---------------------------------------------------------------- rules by way of themselves
# Found by running other libraries' test suites against this one.

SURROUNDINGS = {
    "none": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda t, y: jax.vmap(f, (0, None))(t[None], y)[0],
    "scan": lambda f: lambda t, y: jax.lax.scan(lambda c, _: (f(c, y), None), t, None, 1)[0],
    "checkpoint": lambda f: jax.checkpoint(f),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_rule_that_applies_its_own_function_to_a_tangent(surroundings, request):
    if surroundings == "checkpoint":
        fails_with_remat3(request, REMAT3_HAS_NO_TRANSPOSE)
    inner, plain = SURROUNDINGS[surroundings], lambda x, y: x / y
    f = eqg.custom_jvp(lambda x, y: x / y)

    @f.def_jvp
    def f_jvp(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        return f(x, y), inner(f)(t_x, y) - f(x * t_y, y * y)

    transforms = [jax.grad, lambda f, n: jax.jit(jax.grad(f, n)), jax.jacfwd]
    if surroundings in ("none", "checkpoint"):
        transforms.append(jax.hessian)
    for transform in transforms:
        assert_close(transform(f, (0, 1))(3.0, 2.0), transform(plain, (0, 1))(3.0, 2.0))


# ---------------------------------------------------------------- not to be differentiated

FORMS = {
    "grad": lambda f: jax.grad(f, 1)(1.0, 2.0),
    "forward": lambda f: jax.jacfwd(f, 1)(1.0, 2.0),
    "jit(grad)": lambda f: jax.jit(jax.grad(f, 1))(1.0, 2.0),
    "grad(jit)": lambda f: jax.grad(jax.jit(f), 1)(1.0, 2.0),
    "vmap": lambda f: jax.vmap(jax.grad(f, 1), (None, 0))(1.0, jnp.array([2.0]))[0],
    "grad(vmap)": lambda f: jax.grad(
        lambda y: jax.vmap(f, (0, None))(jnp.ones(1), y).sum()
    )(2.0),
    "scan": lambda f: jax.grad(
        lambda y: jax.lax.scan(lambda c, _: (f(c, y), None), 1.0, None, 1)[0]
    )(2.0),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f), 1)(1.0, 2.0),
    "second order": lambda f: jax.grad(lambda y: jax.grad(f, 1)(1.0, y) * y)(1.0),
}  # fmt: skip


def _guarded(derivative_of_y):
    f = eqg.custom_vjp(lambda x, y: jnp.sin(x) * eqg.nondifferentiable(y, "y"))
    f.def_fwd(lambda x, y: (f(x, y), (x, y)))
    f.def_bwd(lambda res, ct: (ct * jnp.cos(res[0]) * res[1], derivative_of_y(res, ct)))
    return f


@pytest.mark.parametrize("form", FORMS)
def test_nondifferentiable(form):
    """With a rule that has no derivative for it, or without a rule: an error, and no silent
    zero. A derivative that a rule gives is used, and so are zeros that it gives."""
    run = FORMS[form]
    for f in (_guarded(lambda res, ct: None), lambda x, y: x * eqg.nondifferentiable(y, "y")):
        with pytest.raises(eqg.RuleError, match="y was differentiated, and must not be"):
            run(f)
    if form != "forward":
        plain = run(lambda x, y: jnp.sin(x) * y)
        assert_close(run(_guarded(lambda res, ct: ct * jnp.sin(res[0]))), plain)
        assert run(_guarded(lambda res, ct: jnp.zeros_like(res[1]))) == 0.0


def test_a_nondifferentiable_field():
    class Gate(eqx.Module):
        weight: jax.Array
        frozen: jax.Array

        @eqg.custom_vjp
        def __call__(self, x):
            return self.weight * eqg.nondifferentiable(self.frozen, "`frozen`") * x

        @__call__.def_fwd
        def _fwd(self, x):
            return self(x), (self, x)

        @__call__.def_bwd
        def _bwd(residuals, ct):
            self, x = residuals
            ct = ct * self.frozen
            return eqg.tangents.of(self, weight=ct * x), ct * self.weight

    gate, x = Gate(jnp.array(2.0), jnp.array(3.0)), jnp.array(0.5)
    with pytest.raises(eqg.RuleError, match="`frozen` was differentiated") as caught:
        jax.grad(lambda gate: gate(x))(gate)
    assert "._bwd` returns no derivative" in caught.value.__notes__[0]
    with pytest.raises(eqg.RuleError, match="`frozen` was differentiated"):
        jax.jvp(lambda gate: gate(x), (gate,), (gate,))
    trained, frozen = eqx.partition(gate, Gate(True, False))
    assert jax.grad(lambda t: eqx.combine(t, frozen)(x))(trained).weight == 1.5
    assert jax.grad(gate)(x) == 6.0
