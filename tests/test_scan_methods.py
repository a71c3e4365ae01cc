"""How `filter_scan` chooses what is saved and recomputed, and what each method can't do."""

import dataclasses
import functools as ft
import gc
import types
import weakref
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError
from eqx_grads._control_flow import scan
from eqx_grads._control_flow.replay import Replayed
from eqx_grads._control_flow.scan_backward import Checkpointed, Loop, Plain
from eqx_grads._control_flow.truncated import Truncated
from eqx_grads.testing import assert_trees_close
from jax import export

from .helpers import compilations
from .test_scan import temp_bytes


METHODS = (Plain(), Checkpointed(2), Replayed(), Replayed(only_if_better=True))
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


# ---------------------------------------------------------------- the choice


@pytest.fixture
def methods(monkeypatch):
    """The methods that have run, in order."""
    ran = []
    for cls in (Plain, Checkpointed, Replayed, Truncated):
        run = cls.run

        def recorded(self, loop, run=run):
            ran.append((self, loop.counts))
            return run(self, loop)

        monkeypatch.setattr(cls, "run", recorded)
    return ran


AUTO = Replayed(only_if_better=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Plain()),
        ({"checkpoint": 5}, Checkpointed(5)),
        ({"checkpoint": 500}, Checkpointed(12)),
        ({"checkpoint": "sqrt"}, Checkpointed(3)),
        ({"checkpoint": "replay"}, Replayed()),
        ({"checkpoint": "auto"}, AUTO),
        ({"checkpoint": "auto", "unroll": 2}, Plain()),
        ({"truncate": 4}, Truncated(Plain(), 4)),
        ({"truncate": 4, "checkpoint": "sqrt"}, Truncated(Checkpointed(2), 4)),
        ({"truncate": 4, "checkpoint": "replay"}, Truncated(Replayed(), 4)),
        ({"truncate": 4, "checkpoint": "auto"}, Truncated(AUTO, 4)),
        ({"truncate": 12}, Plain()),
    ],
)
def test_the_choice(options, expected, methods):
    jax.make_jaxpr(lambda h: eqg.filter_scan(tanh_step, h, XS, **options))(H)
    assert methods[0] == (expected, False)


def test_methods_are_frozen():
    for method in (*METHODS, Truncated(Plain(), 3)):
        assert hash(method) == hash(dataclasses.replace(method))
        with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
            method.window = 3


def printing(h, x):
    jax.debug.callback(lambda: None)
    return tanh_step(h, x)


def communicating(h, x):
    return tanh_step(jax.lax.pmean(h, "i"), x)


def calling_the_host(h, x):
    same = jax.pure_callback(lambda x: x, x, jax.lax.stop_gradient(x))
    return tanh_step(h, same)


def drawing(h, x):
    key = jr.key(0, impl="rbg")
    return tanh_step(h, x + jr.normal(key, x.shape))


def looping(h, x):
    count = lambda: jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
    return tanh_step(h, x + jax.lax.cond(x[0] > 0, count, lambda: 0))


REASONS = {
    "a step has side effects": printing,
    "a step communicates over the named axis 'i'": communicating,
    "a step calls the host": calling_the_host,
    "a step draws random bits": drawing,
    "a step has a `while_loop` in a branch": looping,
}


@pytest.mark.parametrize("truncate", [None, 4])
@pytest.mark.parametrize("reason", REASONS)
def test_the_error_names_the_reason(reason, truncate, methods):
    """And no other. `"auto"` takes another method, and `truncate` needs less than a replay."""
    step = REASONS[reason]
    options = {"truncate": truncate}
    over_batch = lambda h, c: jax.vmap(
        lambda h: gradient(step, h, checkpoint=c, **options), axis_name="i"
    )(h)
    h = jnp.stack([H, -H])
    with pytest.raises(RuleError, match=reason) as error:
        over_batch(h, "replay")
    message = str(error.value)
    assert reason in message
    assert not any(other in message for other in REASONS if other != reason)
    methods.clear()
    auto = over_batch(h, "auto")
    runs_once = step in (printing, communicating)
    expected = Plain() if truncate is None or runs_once else Truncated(Plain(), truncate)
    assert methods[0] == (expected, truncate is not None and runs_once)
    assert_trees_close(auto, over_batch(h, None))


@pytest.mark.slow
def test_gradient_flow_sees_the_steps():
    """Without a mark that the scan knows: it asks for visible steps."""

    class Model(eqx.Module):
        cell: eqx.nn.GRUCell

        def __call__(self, xs, **options):
            step = lambda h, x: (self.cell(x, h), None)
            return eqg.filter_scan(step, jnp.zeros(3), xs, **options)[0]

    model = Model(eqx.nn.GRUCell(3, 3, key=jr.key(0)))
    flow = lambda **options: eqg.gradient_flow(
        lambda model: jnp.sum(model(XS, **options)), model
    )["cell"]
    assert_trees_close(flow(checkpoint="replay"), flow())
    assert_trees_close(flow(checkpoint="sqrt"), flow())
    cut = flow(truncate=4, checkpoint="auto")
    assert not cut[:8].any()
    assert_trees_close(cut[8:], flow()[8:])


def test_one_trace_of_the_body():
    """To choose and to run: `program` is traced once."""
    traces = []

    def step(h, x):
        traces.append(x)
        return tanh_step(h, x)

    jax.make_jaxpr(lambda h: eqg.filter_scan(step, h, XS, checkpoint="auto"))(H)
    assert len(traces) == 1


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
        {"checkpoint": "auto"},
        {"truncate": 4},
        {"truncate": 4, "checkpoint": "replay"},
    ],
)
def test_rules_that_close_over_a_traced_value(holder, options):
    """D3: a value without a derivative is no obstacle, as long as that is not asked for."""

    @ft.partial(jax.jit, static_argnums=0)
    def both(options, k):
        step = lambda h, x: (jnp.tanh(holder(k, h) + x), None)
        return gradient(step, **dict(options))

    plain = {"truncate": 4, "checkpoint": 1} if "truncate" in options else {}
    got, expected = (both(tuple(o.items()), 0.5) for o in (options, plain))
    assert_trees_close(got, expected)


@pytest.mark.parametrize("checkpoint", ["replay", "auto", None])
@pytest.mark.parametrize("truncate", [None, 4])
def test_the_error_of_a_rule_is_not_swallowed(checkpoint, truncate):
    """D3: where that derivative is asked for, the error is that of the rule."""

    def loss(k):
        step = lambda h, x: (jnp.tanh(closure(k, h) + x), None)
        options = {"checkpoint": checkpoint, "truncate": truncate}
        return jnp.sum(eqg.filter_scan(step, H, XS, **options)[0])

    with pytest.raises(RuleError, match="with respect to a value that it closes over"):
        jax.jit(jax.grad(loss))(0.5)


@pytest.mark.parametrize("holder", HOLDERS)
def test_truncation_keeps_its_constant_memory(holder):
    """D3: a window is recomputed whatever the steps close over, and also if they can't be
    vectorized."""

    def needed(steps, extra):
        def loss(h, k, xs):
            def step(h, x):
                h = jnp.tanh(holder(k, h) + x)
                return (extra(h, x)[0] if extra else h), None

            return jnp.sum(eqg.filter_scan(step, h, xs, truncate=50)[0])

        return temp_bytes(jax.grad(loss), jnp.ones(32), 0.5, jnp.ones(steps))

    looping_step = lambda h, x: (h + looping(jnp.zeros(3), x * jnp.ones(3))[0][0], None)
    for extra in (None, looping_step):
        assert needed(100_000, extra) - needed(1000, extra) <= 2 * 4 * 99_000


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


def with_static_leaves(carry, x):
    h, activation, n = carry
    return (activation(h @ WEIGHT + x), activation, n), (h, activation, "name")


def _clipped(h):
    return eqg.clip_gradient(h, -1.0, 1.0)


def elementwise_step(h, x):
    h = jnp.tanh(h * x)
    return h, h


OPTIONS = (
    {},
    {"checkpoint": 3},
    {"checkpoint": "sqrt"},
    {"checkpoint": "replay"},
    {"checkpoint": "auto"},
    {"truncate": 5},
    {"truncate": 5, "checkpoint": "auto"},
    {"reverse": True, "unroll": 2},
)


@pytest.mark.parametrize("options", OPTIONS)
def test_eager_calls_compile_once(options):
    """D5: as `jax.lax.scan` does for the same function."""
    run = lambda: eqg.filter_scan(tanh_step, H, XS, **options)
    assert count_of_third_call(run) == 0
    assert_trees_close(run(), jax.jit(run)())
    init = (H, jnp.tanh, 3)
    run = lambda: eqg.filter_scan(with_static_leaves, init, XS, **options)
    assert count_of_third_call(run) == 0
    (h, activation, n), (_, activations, name) = run()
    expected, _ = eqg.filter_scan(lambda h, x: tanh_step(h, x), H, XS, **options)
    assert_trees_close(h, expected)
    assert (activation, n, activations, name) == (jnp.tanh, 3, jnp.tanh, "name")


@pytest.mark.parametrize(
    "options",
    [
        *OPTIONS,
        {"checkpoint": 1},
        {"truncate": 5, "checkpoint": 2},
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


def test_a_function_in_a_function_compiles_once():
    """D5: closures and helpers."""
    weight, sizes = 2 * WEIGHT, (3, 3)

    def helper(h):
        return jnp.tanh(h @ weight).reshape(sizes[:1])

    def step(h, x, *, scale=0.5):
        return scale * helper(h) + x, None

    assert count_of_third_call(lambda: eqg.filter_scan(step, H, XS)) == 0
    clip = eqg.filter_scan(step, H, XS, carry_gradient=_clipped)
    assert count_of_third_call(lambda: clip) == 0


class Scaled(eqx.Module):
    """With a method that reads a global variable."""

    weight: jax.Array

    def __call__(self, x):
        return FACTOR * self.weight * x


class Pair(NamedTuple):
    h: jax.Array
    steps: jax.Array

    def next(self, x):
        return Pair(jnp.tanh(self.h @ WEIGHT + x), self.steps + 1)


@eqg.custom_jvp
def scaled(x):
    return FACTOR * x


@scaled.def_jvp
def _scaled_jvp(primals, tangents):
    return scaled(*primals), FACTOR * tangents[0]


over_batch = jax.vmap(lambda x: FACTOR * x)
FACTOR = 2.0
MODULE = Scaled(jnp.array(1.0))


def test_numbers_in_xs():
    """A1: they are static, in contrast to those in the carry. The witness is a Python loop."""

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


def times_two(h, x):
    return 2 * h + x, None


def uses_a_cell(h, x):
    return CELL(x, h), None


def uses_a_module(h, x):
    return MODULE(h) + over_batch(scaled(x)), None


def uses_a_class(pair, x):
    return pair.next(x), None


CELL = eqx.nn.GRUCell(3, 3, key=jr.key(0))
ORDINARY = {
    "function": (times_two, H),
    "cell": (uses_a_cell, H),
    "lambda": (lambda h, x: (jnp.tanh(WEIGHT @ h) + x, None), H),
    "Module": (uses_a_module, H),
    "NamedTuple": (uses_a_class, Pair(H, jnp.array(0))),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_steps_compile_once(name):
    """D5: also classes of the user's."""
    step, init = ORDINARY[name]
    assert count_of_third_call(lambda: eqg.filter_scan(step, init, XS)) == 0


def test_other_types_and_static_leaves_are_other_calls():
    """D5: the structure of `y` may depend on them."""

    def step(carry, x):
        h, n = carry
        return (h + x, n), (None if h.ndim else h) if n < 5 else (h, "large")

    for _ in range(2):
        assert eqg.filter_scan(step, (jnp.ones(2), 3), jnp.ones((4, 2)))[1] is None
        assert eqg.filter_scan(step, (1.0, 3), jnp.ones(4))[1].shape == (4,)
        assert eqg.filter_scan(step, (1.0, 7), jnp.ones(4))[1][1] == "large"


def test_an_integer_that_becomes_an_array():
    """D5: what the first call found out is known to the next."""

    def step(carry, x):
        return (carry[0] + x, carry[1] + 1), None

    run = lambda: eqg.filter_scan(step, (H, 0), XS)[0]
    assert count_of_third_call(run) == 0
    assert run()[1] == len(XS)


def test_errors_are_raised_in_every_call():
    """D5: nothing is kept of a call that failed."""
    for _ in range(3):
        with pytest.raises(RuleError, match="a step has side effects"):
            eqg.filter_scan(printing, H, XS, checkpoint="replay")
        with pytest.raises(RuleError, match="another carry"):
            eqg.filter_scan(lambda h, x: (h[:1], None), H, XS)
        with pytest.raises(RuleError, match="another carry"):
            eqg.filter_scan(shrinking, H, XS)


def shrinking(h, x):
    return h[:1], None


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


def by_default(a):
    return lambda h, a=a: h * a


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
@pytest.mark.parametrize("make", [multiply, by_default, by_keyword])
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


def test_a_loop_is_what_a_method_needs_to_know():
    """A method can be asked and run by itself."""
    loop = Loop(lambda h, x: ([h[0] + x[0]], [h[0]]), [0.0 * H], [XS], 12, False, 1)
    for method in (*METHODS, Truncated(Checkpointed(2), 5)):
        assert method.unsupported(loop) is None
        (last,), (ys,) = method.run(loop)
        assert_trees_close(last, jnp.sum(XS, 0))
        assert ys.shape == XS.shape
    assert scan.common_length(XS, None) == 12
