"""Nothing is left behind by tracing, and what has been compiled is used again."""

import collections
import gc
import types

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache  # noqa: TID251, to leave it
from jax.extend.core import ClosedJaxpr, Jaxpr

from .cases import CASES
from .leaks.captures import capturing
from .leaks.registry import op_of, WithRules
from .rules.formulas import sin_times, sin_times_cotangents
from .test_conformance import call_and_differentiate


@pytest.fixture(autouse=True, scope="module")
def _compiled_here():
    """What JAX compiles, and does not read from its cache on disk."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def batched_op():
    """With a batching rule, and so with a primitive of its own."""
    f = op_of("vjp", WithRules)

    @f.def_vmap
    def _batched(axis_size, batched, x, y):
        axes = [0 if b else None for b in batched]
        return jax.vmap(sin_times, axes, axis_size=axis_size)(x, y), True

    return f


def holding_op():
    """Its function and rules hold an array, which would stay for as long as they do."""
    zero = jnp.zeros(1000)

    def fwd(x, y):
        return f(x, y), (x, y)

    def bwd(residuals, ct):
        ct_x, ct_y = sin_times_cotangents(*residuals, ct)
        return ct_x + zero[0], ct_y

    f = WithRules.vjp(lambda x, y: sin_times(x, y) + zero[0], fwd, bwd)
    return f


def gradient_op():
    @eqg.custom_gradient
    def f(x, y):
        return sin_times(x, y), lambda ct: sin_times_cotangents(x, y, ct)

    return f


def elementwise_op():
    return eqg.elementwise(sin_times, lambda out, x, y: (jnp.cos(x) * y, jnp.sin(x)))


OPS = {
    "jvp": lambda: op_of("jvp", WithRules),
    "vjp": lambda: op_of("vjp", WithRules),
    "vmap": batched_op,
    "holding": holding_op,
    "gradient": gradient_op,
    "elementwise": elementwise_op,
}
LOOKED_FOR = (jax.core.Tracer, jax.Array, Jaxpr, ClosedJaxpr, types.FunctionType)


def census():
    """How many there are of what could be left behind."""
    gc.collect()
    count = collections.Counter()
    for obj in gc.get_objects():
        count.update(kind.__name__ for kind in LOOKED_FOR if isinstance(obj, kind))
        if str(type(obj).__module__).startswith("eqx_grads"):
            count[type(obj).__qualname__] += 1
    # The executables on the device.
    count["compiled"] = len(jax.devices()[0].client.live_executables())
    return count


def growth(step, n):
    """The objects that every step, or every second step, of `n` leaves behind. (A few new
    objects are caches of JAX.)"""
    for _ in range(5):
        step()
    before = census()
    for _ in range(n):
        step()
    return {kind: count for kind, count in (census() - before).items() if 2 * count >= n}


def program(f_of):
    """A gradient of a scan, which is new to JAX. `f_of(a)` gives the function."""

    def loss(x, a):
        f = f_of(a)
        return jax.lax.scan(lambda x, y: (f(x, y), None), x, jnp.ones(3))[0]

    return jax.jit(jax.grad(loss))


# Two for every day, and all of them with the slow tests.
FEW = [
    kind if kind in ("jvp", "vjp") else pytest.param(kind, marks=pytest.mark.slow)
    for kind in OPS
]


COUNTED_LOOPS = {
    "scan": lambda step, x: eqg.filter_scan(lambda c, _: (step(c), None), (0, x), length=3)[0],
    "while_loop": lambda step, x: eqg.filter_while_loop(lambda c: c[0] < 3, step, (0, x)),
}


@pytest.mark.parametrize("loop", COUNTED_LOOPS)
def test_10_traces_of_a_loop_that_counts(loop):
    """The counter begins as a Python integer."""
    x = jnp.array(0.7)

    def fn(x, a):
        return COUNTED_LOOPS[loop](lambda c: (c[0] + 1, c[1] * a), x)

    assert not growth(lambda: jax.make_jaxpr(lambda x, a: fn(x, a))(x, x), 10)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", FEW)
def test_100_traces_of_the_same_function(kind):
    x, f = jnp.array(0.7), OPS[kind]()
    assert not growth(lambda: program(lambda a: f).trace(x, x), 100)


@pytest.mark.parametrize("kind", ["jvp", "vjp", "gradient", "elementwise"])
@pytest.mark.slow
def test_100_traces_of_functions_that_capture_tracers(kind):
    x = jnp.array(0.7)

    def f_of(a):
        f = capturing(WithRules, kind, a)
        return lambda x, y: f(x) * y

    assert not growth(lambda: program(f_of).trace(x, x), 100)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", FEW)
def test_100_eager_calls(kind):
    x, f = jnp.array(0.7), OPS[kind]()
    grad = jax.grad(f, (0, 1))

    def step():
        f(x, x)
        grad(x, x)
        jax.jvp(f, (x, x), (x, x))

    assert not growth(step, 100)


# ------------------------------------------------------------------ compiled once


@pytest.mark.parametrize("order", ["jit", "jit(grad)", "grad(jit)", "jit(jvp)", "jit(vmap)"])
@pytest.mark.parametrize("kind", OPS)
def test_a_jitted_call_compiles_once(kind, order):
    traces, op = [], OPS[kind]()
    f = lambda *args: (traces.append(op), op(*args))[1]
    push = lambda x, y: jax.jvp(f, (x, y), (x, y))
    jitted = {
        "jit": jax.jit(f),
        "jit(grad)": jax.jit(jax.grad(f)),
        "grad(jit)": jax.grad(jax.jit(f)),
        "jit(jvp)": jax.jit(push),
        "jit(vmap)": jax.jit(jax.vmap(f)),
    }[order]
    shape = (2,) if order == "jit(vmap)" else ()
    for value in (0.1, 0.2, 0.3):
        jitted(jnp.full(shape, value), jnp.full(shape, 1 - value))
    assert len(traces) == 1


# ------------------------------------------------------------------ loops


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "filter_scan",
        "losses.chunked",
        "nn.GRU",
        "nn.Recurrent",
        "implicit",
    ],
)
def test_50_eager_calls_of_a_loop(name):
    fn, args = CASES[name].make()
    assert not growth(lambda: call_and_differentiate(fn, args, 1), 50)
