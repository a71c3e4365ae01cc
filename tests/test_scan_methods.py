"""`filter_scan` with every method: rules in its steps, eager calls, export, static functions,
and `carry_gradient`."""

import functools as ft
import gc
import types
import weakref
from collections.abc import Callable

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError
from eqx_grads.testing import assert_trees_close
from jax import export

from .helpers import compilations


pytestmark = pytest.mark.versions


WEIGHT = 0.5 * jr.normal(jr.key(0), (3, 3))
H, XS = jr.normal(jr.key(1), (3,)), jr.normal(jr.key(2), (12, 3))


def tanh_step(h, x):
    h = jnp.tanh(h @ WEIGHT + x)
    return h, h


def gradient(step, h=H, xs=XS, **options):
    def loss(h, xs):
        last, _ = eqg.filter_scan(step, h, xs, **options)
        return jnp.sum(last**2)

    return jax.grad(loss, (0, 1))(h, xs)


# ---------------------------------------------------------------- D3


def closure(k, x):
    g = eqg.custom_vjp(lambda x: k * x)
    g.def_fwd(lambda x: (g(x), None))
    g.def_bwd(lambda _, ct: (k * ct,))
    return g(x)


def keyword_only(k, x):
    @eqg.custom_vjp
    def g(x, *, k):
        return k * x

    g.def_fwd(lambda x, *, k: (g(x, k=k), None))
    g.def_bwd(lambda _, ct, *, k: (k * ct,))
    return g(x, k=k)


def nondifferentiable(k, x):
    return eqg.nondifferentiable(k) * x


HOLDERS = (closure, keyword_only, nondifferentiable)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": "replay"},
        {"truncate": 4, "checkpoint": "auto"},
    ],
)
def test_rules_that_close_over_a_traced_value(holder, options):
    """D3: a value without a derivative is not an obstacle, as long as nobody asks for its
    derivative."""

    @ft.partial(jax.jit, static_argnums=0)
    def both(options, k):
        step = lambda h, x: (jnp.tanh(holder(k, h) + x), None)
        return gradient(step, **dict(options))

    plain = {"truncate": 4, "checkpoint": 1} if "truncate" in options else {}
    got, expected = (both(tuple(o.items()), 0.5) for o in (options, plain))
    assert_trees_close(got, expected)


@pytest.mark.parametrize(("checkpoint", "truncate"), [("replay", None), ("auto", 4), (None, 4)])
def test_the_error_of_a_rule_is_not_swallowed(checkpoint, truncate):
    """D3: where the derivative is asked for, the rule's error is raised."""

    def loss(k):
        step = lambda h, x: (jnp.tanh(closure(k, h) + x), None)
        options = {"checkpoint": checkpoint, "truncate": truncate}
        return jnp.sum(eqg.filter_scan(step, H, XS, **options)[0])

    with pytest.raises(RuleError, match="with respect to a value that it closes over"):
        jax.jit(jax.grad(loss))(0.5)


def test_a_replay_in_forward_mode_needs_no_reverse_derivative():
    """D3: only what is asked for is differentiated."""

    def last(h, checkpoint):
        def step(h, x):
            root = jax.lax.while_loop(lambda r: r < 2, lambda r: 1.5 * r, 1 + jnp.abs(h))
            return jnp.tanh(root + x), None

        return eqg.filter_scan(step, h, XS[:, 0], checkpoint=checkpoint)[0]

    for checkpoint in ("replay", "auto"):
        got = jax.jvp(ft.partial(last, checkpoint=checkpoint), (0.5,), (1.0,))
        assert_trees_close(got, jax.jvp(ft.partial(last, checkpoint=None), (0.5,), (1.0,)))
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.grad(last)(0.5, checkpoint)


# ---------------------------------------------------------------- D5


def count_of_third_call(run):
    run()
    run()
    with compilations() as found:
        run()
    return len(found)


def _clipped(h):
    return eqg.clip_gradient(h, -1.0, 1.0)


def elementwise_step(h, x):
    h = jnp.tanh(h * x)
    return h, h


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checkpoint": 3},
        {"checkpoint": "auto"},
        {"truncate": 5, "checkpoint": "replay", "reverse": True},
        {"online": True},
        {"online": "e-prop"},
        {"carry_gradient": _clipped},
    ],
)
def test_eager_derivatives_compile_once(options):
    """B12: of a step that stays the same, all methods and both modes, to second order."""

    def loss(h):
        last, ys = eqg.filter_scan(elementwise_step, h, XS, **options)
        return jnp.sum(last) + jnp.sum(ys)

    gradient = jax.grad(loss)
    assert count_of_third_call(lambda: gradient(H)) == 0
    assert count_of_third_call(lambda: jax.jvp(loss, (H,), (H,))) == 0
    assert count_of_third_call(lambda: jax.jvp(gradient, (H,), (H,))) == 0
    assert_trees_close(gradient(H), jax.jit(gradient)(H))


class Cell(eqx.Module):
    weight: jax.Array
    activation: Callable

    def step(self, h, x):
        return self.activation(h @ self.weight + x), None


def test_new_modules_compile_once():
    """B12: the arrays of a Module are operands. JAX compiles each new step."""
    activation = lambda x: jnp.tanh(x)
    with_array = lambda i: Cell(i * WEIGHT, activation)
    for i in (1.0, 2.0):
        cell = with_array(i)
        expected = jax.lax.scan(lambda h, x: (jnp.tanh(h @ cell.weight + x), None), H, XS)  # noqa: B023
        assert_trees_close(eqg.filter_scan(cell.step, H, XS), expected)
    numbers = iter((1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    value = lambda: eqg.filter_scan(with_array(next(numbers)).step, H, XS)
    assert count_of_third_call(value) == 0
    loss = lambda cell: jnp.sum(eqg.filter_scan(cell.step, H, XS, checkpoint=3)[0])
    assert count_of_third_call(lambda: eqx.filter_grad(loss)(with_array(next(numbers)))) == 0


def test_numbers_in_xs():
    """A1: they are static, in contrast to numbers in the carry. The witness is a Python
    loop."""

    def step(h, x):
        a, s = x
        return h + s * (a + float(np.copysign(2.0, s.real))), None

    for dtype, values in (
        (jnp.zeros(()).dtype, (2.0, 3.0, 2.0, 0.0, -0.0)),
        (jnp.zeros((), complex).dtype, (2j, 3j, 2j, 1 + 2j)),
    ):
        xs, init = jnp.arange(3).astype(dtype), jnp.zeros((), dtype)
        for s in values:
            got = complex(eqg.filter_scan(step, init, (xs, s))[0])
            assert got == sum(s * (a + float(np.copysign(2.0, s.real))) for a in range(3))


@pytest.mark.thorough
def test_nothing_is_kept_alive():
    """D5: neither the step nor what it holds, nor a compiled program of each call."""

    def run(scan):
        weight = WEIGHT + 0

        def step(h, x):
            return jnp.tanh(h @ weight + x), None

        for _ in range(3):
            scan(step, H, XS)
        return weakref.ref(step), weakref.ref(weight)

    def census():
        gc.collect()
        functions = sum(isinstance(x, types.FunctionType) for x in gc.get_objects())
        return functions, len(jax.devices()[0].client.live_executables())

    def growth(scan):
        for _ in range(3):
            run(scan)
        before = census()
        for _ in range(rounds):
            run(scan)
        return [b - a for a, b in zip(before, census(), strict=True)]

    rounds = 10
    step, weight = run(eqg.filter_scan)
    gc.collect()
    assert step() is None
    assert weight() is None
    # What is kept of a call is kept `rounds` times. A few objects more or less are caches of
    # JAX that other tests have filled.
    for ours, theirs in zip(growth(eqg.filter_scan), growth(jax.lax.scan), strict=True):
        assert ours - theirs < rounds


def test_a_step_of_a_transformed_function_is_not_kept():
    """D5: it may close over a tracer."""
    seen = []

    def loss(w):
        def step(h, x):
            return jnp.tanh(h @ w + x), None

        seen.append(weakref.ref(step))
        return jnp.sum(eqg.filter_scan(step, H, XS)[0])

    with jax.checking_leaks():
        jax.grad(loss)(WEIGHT)
        jax.vmap(loss)(WEIGHT[None])
        jax.jit(loss)(WEIGHT)
    gc.collect()
    assert not any(ref() for ref in seen)


# ---------------------------------------------------------------- D6


def exported(symbols, shapes, **options):
    """The gradient of a scan as it is exported with symbolic shapes, and as it is."""

    def loss(w, h, xs):
        step = lambda h, x: (jnp.tanh(h @ w + x), None)
        return jnp.sum(eqg.filter_scan(step, h, xs, **options)[0])

    sizes = dict(zip(symbols, export.symbolic_shape(", ".join(symbols)), strict=True))
    symbolic = [tuple(sizes.get(d, d) for d in shape) for shape in shapes]
    types = [jax.ShapeDtypeStruct(shape, WEIGHT.dtype) for shape in symbolic]
    program = export.export(jax.jit(jax.grad(loss, (0, 1, 2))))(*types)
    known = {"b": 5, "t": 12}
    args = [jr.normal(jr.key(len(s)), tuple(known.get(d, d) for d in s)) for s in shapes]
    return program.call(*args), jax.grad(loss, (0, 1, 2))(*args)


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", [None, 3, "sqrt", "replay", "auto"])
@pytest.mark.parametrize("truncate", [None, 5])
def test_a_symbolic_batch(checkpoint, truncate):
    """D6: there is nothing to estimate from, but a replay needs no estimate."""
    options = {"checkpoint": checkpoint, "truncate": truncate}
    assert_trees_close(*exported(["b"], [(3, 3), ("b", 3), (12, "b", 3)], **options))


@pytest.mark.thorough
@pytest.mark.parametrize("truncate", [None, 5])
def test_a_symbolic_number_of_steps(truncate):
    """D6: it can't be divided into chunks, and need not be."""
    shapes = [(3, 3), (3,), ("t", 3)]
    for checkpoint in (None, "auto"):
        options = {"checkpoint": checkpoint, "truncate": truncate}
        assert_trees_close(*exported(["t"], shapes, **options))
    with pytest.raises(RuleError, match=r"can't replay(?s:.)*number of steps is symbolic"):
        exported(["t"], shapes, checkpoint="replay", truncate=truncate)
    if truncate is None:
        with pytest.raises(RuleError, match=r"into chunks(?s:.)*number of steps is symbolic"):
            exported(["t"], shapes, checkpoint="sqrt")


# ---------------------------------------------------------------- D7


def multiply(a):
    return lambda h: h * a


def by_keyword(a):
    def fn(h, *, a=a):
        return h * a

    return fn


CONTROL_FLOW = {
    "cond": lambda f, g: eqg.filter_cond(True, lambda: (f, 1.0), lambda: (g, 2.0)),
    "scan": lambda f, g: eqg.filter_scan(
        lambda c, _: ((g, c[1] + 1), None), (f, 0.0), length=1
    )[0],
    "while": lambda f, g: eqg.filter_while_loop(
        lambda c: c[1] < 1, lambda c: (g, c[1] + 1), (f, 0.0)
    ),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("make", [multiply, by_keyword])
@pytest.mark.parametrize("kind", CONTROL_FLOW)
def test_static_functions_that_close_over_arrays(kind, make, jit):
    """D7: the same if they hold the same array; a clear error if not, and never an ambiguous
    truth value."""

    def run(a, b):
        fn, number = CONTROL_FLOW[kind](make(a), make(b))
        return fn(jnp.ones(3)), number

    a, b = jnp.arange(3.0), jnp.arange(3.0) + 1
    same = lambda a: run(a, a)
    assert_trees_close((jax.jit(same) if jit else same)(a), (a, jnp.array(1.0)))
    with pytest.raises(RuleError, match=r"static"):
        (jax.jit(run) if jit else run)(a, b)


# ---------------------------------------------------------------- D12


def raw_identity(h):
    @jax.custom_vjp
    def f(h):
        return h

    f.defvjp(lambda h: (h, None), lambda _, ct: (0.5 * ct,))
    return f(h)


KEEPS = {
    "identity": lambda h: h,
    "rule": _clipped,
    "raw rule": raw_identity,
    "replaced": lambda h: eqg.replace_gradient(h, jnp.sin(h)),
    "where": lambda h: jnp.where(h > 0, h, jax.lax.stop_gradient(h)),
    "cond": lambda h: jax.lax.cond(h[0] > 0, eqg.reverse_gradient, lambda h: h, h),
    "jit and checkpoint": lambda h: jax.jit(jax.checkpoint(_clipped))(h),
}
CHANGES = {
    "scaled": lambda h: 2 * h,
    "constant": jnp.zeros_like,
    "permuted": lambda h: h[::-1],
    "rule": lambda h: eqg.ste.round(h),
    "where": lambda h: jnp.where(h > 0, h, 0.0),
    "in a rule": eqg.custom_vjp(lambda h: h + 1),
}
CHANGES["in a rule"].def_fwd(lambda h: (h + 1, None))
CHANGES["in a rule"].def_bwd(lambda _, ct: (ct,))


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"checkpoint": "replay"}, {"truncate": 4}])
@pytest.mark.parametrize("name", KEEPS)
def test_carry_gradient_that_keeps_the_value(name, options):
    """D12: an identity is seen through rules, calls and choices."""
    fn = KEEPS[name]
    step = lambda h, x: tanh_step(fn(h), x)
    got = gradient(tanh_step, carry_gradient=fn, **options)
    assert_trees_close(got, gradient(step, **options))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_carry_gradient_that_changes_the_value(name, jit):
    """D12: it used to pass silently."""
    run = lambda h: eqg.filter_scan(tanh_step, h, XS, carry_gradient=CHANGES[name])
    with pytest.raises(RuleError, match=r"does not return the carry(?s:.)*replace_gradient"):
        (jax.jit(run) if jit else run)(H)


def test_carry_gradient_that_swaps_two_parts():
    """D12: each array has to be the one in its place."""
    step = lambda carry, x: (carry, None)
    with pytest.raises(RuleError, match=r"(?s)does not return the carry.*at carry\['a'\]"):
        eqg.filter_scan(
            step,
            {"a": H, "b": H},
            XS,
            carry_gradient=lambda c: {"a": c["b"], "b": c["a"]},
        )
