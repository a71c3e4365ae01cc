"""What no other quick test noticed in a mutant of the library (`make mutants`)."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads._rules.rule import CheckCache
from jax.experimental import checkify  # noqa: TID251  an interpreter of others

from .helpers import assert_close


# ---------------------------------------------------------------- rules


def test_a_value_with_something_that_is_no_gradient():
    f = eqg.custom_gradient(lambda x: (x * x, 2 * x))
    with pytest.raises(eqg.RuleError, match="did not return a value and a function"):
        jax.grad(f)(2.0)


def test_the_partials_of_an_elementwise_function_may_be_a_list():
    f = eqg.elementwise(jnp.multiply, lambda out, x, y: [y, x])
    assert_close(jax.grad(f, (0, 1))(2.0, 3.0), (3.0, 2.0))


@pytest.mark.parametrize("decorator", [eqg.custom_jvp, eqg.custom_vjp])
def test_a_decorated_function_has_the_name_of_the_function(decorator):
    def cube(x):
        """x to the third."""
        return x**3

    decorated = decorator(cube)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(decorated, name) == getattr(cube, name)


def test_checks_are_kept_for_so_many_types_of_arguments():
    f = eqg.custom_jvp(jnp.sin)
    f.def_jvp(lambda primals, tangents: (f(*primals), jnp.cos(*primals) * tangents[0]))
    cache = CheckCache()
    for i in range(CheckCache.most + 1):
        cache.get(_CallOfType(i), "check", lambda: None)
    assert 0 < len(cache._results) <= CheckCache.most


class _CallOfType:
    operands = ()

    def __init__(self, i):
        self.i = i

    @property
    def flat(self):
        return self

    def key(self, operands):
        return self.i


def test_the_function_of_a_batching_rule_may_use_the_name_of_the_axis():
    @eqg.custom_jvp
    def centered(x):
        return x - jax.lax.pmean(x, "batch")

    @centered.def_vmap
    def centered_vmap(size, batched, x):
        return x - jnp.mean(x, 0), True

    @centered.def_jvp
    def centered_jvp(primals, tangents):
        return centered(*primals), tangents[0] - jax.lax.pmean(tangents[0], "batch")

    x = jnp.array([1.0, 2.0, 6.0])
    assert_close(jax.vmap(centered, axis_name="batch")(x), x - 3.0)


def test_checkify_of_a_call_with_an_unused_output_and_a_constant():
    factor = jnp.array([2.0, 3.0])

    @eqg.custom_jvp
    def f(x):
        checkify.check(jnp.all(x > 0), "negative")
        return factor * x**2, jnp.exp(x)

    @f.def_jvp
    def f_jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        exp = jnp.exp(x)
        return (factor * x**2, exp), (2 * factor * x * t, exp * t)

    x = jnp.array([1.0, 2.0])
    value = lambda x: jnp.sum(checkify.checkify(f)(x)[1][0])
    assert_close(jax.jit(jax.grad(value))(x), 2 * factor * x)
    assert_close(jax.jvp(jax.jit(value), (x,), (x,))[1], jnp.sum(2 * factor * x * x))


# ---------------------------------------------------------------- recurrent layers


@pytest.mark.parametrize(
    ("make", "batch", "mapped"),
    [
        *[(nn.GRU, batch, name) for batch in (None, 2) for name in ("xs", "state", "lengths")],
        (nn.LSTM, 2, "state"),
        (nn.RNN, 2, "state"),
    ],
)
def test_vmap_over_one_argument_of_a_recurrent_layer(make, batch, mapped, getkey):
    """The arguments that are not mapped are the same for every example."""
    layer = make(3, 4, key=getkey())
    sizes = () if batch is None else (batch,)
    xs = jr.normal(getkey(), (*sizes, 5, 3))
    state = jax.tree.map(lambda s: jr.normal(getkey(), s.shape), layer(xs)[1])
    lengths = jnp.full(sizes, 4)
    several = lambda x: jnp.stack([x, x + 0.3, -x])
    args = {"xs": xs, "state": state, "lengths": lengths}
    args[mapped] = jax.tree.map(several, args[mapped])
    if mapped == "lengths":
        args["lengths"] = jnp.stack([lengths, lengths - 2, lengths - 4])
    axes = {name: 0 if name == mapped else None for name in args}

    def call(layer, xs, state, lengths):
        return layer(xs, state, lengths=lengths)

    def vmapped(layer, xs, state):
        axes_of_args = (None, *axes.values())
        return eqx.filter_vmap(call, in_axes=axes_of_args)(layer, xs, state, args["lengths"])

    def one_by_one(layer, xs, state):
        given = {"xs": xs, "state": state, "lengths": args["lengths"]}
        example = lambda i: given | {mapped: jax.tree.map(lambda x: x[i], given[mapped])}
        outs = [call(layer, **example(i)) for i in range(3)]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *outs)

    def both(f):
        def loss(inputs):
            out = f(*inputs)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), out

        run = eqx.filter_value_and_grad(loss, has_aux=True)
        return eqx.filter_jit(run)((layer, args["xs"], args["state"]))

    assert_close(both(vmapped), both(one_by_one), tolerance=1e-5)


# ---------------------------------------------------------------- scans


@pytest.mark.parametrize("reverse", [False, True])
def test_truncation_of_steps_that_run_once_keeps_the_derivative_of_the_first_carry(reverse):
    """A step with an effect is not run again, so its own loop is cut: at every window but the
    first, which the first carry enters."""
    xs = jnp.linspace(-1.0, 1.0, 7)

    def loss(h, effect):
        def step(h, x):
            if effect:
                jax.debug.callback(lambda: None)
            h = jnp.tanh(0.7 * h + x)
            return h, h

        return jnp.sum(eqg.filter_scan(step, h, xs, truncate=3, reverse=reverse)[1])

    def first_window(h):
        steps = xs[::-1] if reverse else xs
        total = 0.0
        for x in steps[:3]:
            h = jnp.tanh(0.7 * h + x)
            total += h
        return total

    expected = jax.grad(first_window)(0.3)
    assert abs(expected) > 0.1
    assert_close(jax.grad(loss)(0.3, True), expected)
    assert_close(jax.grad(loss)(0.3, False), expected)
