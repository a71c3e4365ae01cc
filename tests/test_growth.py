"""Nothing is left behind by tracing, and what has been compiled is used again: also by eight
threads that trace, differentiate and run at once.

The functions of the threads are fresh in each round, so that they are traced at once. Threads
take turns much more often than they usually do.
"""

import collections
import contextvars
import functools as ft
import gc
import pkgutil
import sys
import threading
import types

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache  # noqa: TID251, to leave it
from jax.extend.core import ClosedJaxpr, Jaxpr

from .cases import CASES
from .helpers import assert_close, compilations
from .ops import sin_times_jvp, sin_times_vjp


pytestmark = pytest.mark.versions


@pytest.fixture(autouse=True, scope="module")
def _compiled_here():
    """What JAX compiles, and does not read from its cache on disk."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


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


@pytest.mark.thorough
@pytest.mark.parametrize("f", [sin_times_jvp, sin_times_vjp])
def test_100_calls_and_traces_of_the_same_function(f):
    x = jnp.array(0.7)
    grad = jax.grad(f, (0, 1))
    assert not growth(lambda: (f(x, x), grad(x, x), jax.jvp(f, (x, x), (x, x))), 100)
    assert not growth(lambda: program(lambda a: f).trace(x, x), 100)


# JAX 0.10 to 0.12 keeps a jaxpr for each `jnp.argmin` that it traces, until a cache is full.
LAYERS = [n for n in CASES if n.startswith("nn.") and n != "nn.VectorQuantizer"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_train_steps_of_a_layer_leave_nothing_behind(name):
    """Each step is new to JAX, and is freed with its program."""
    fn, args = CASES[name].make()
    arrays, static = eqx.partition((fn, args), eqx.is_inexact_array)

    def loss(arrays):
        fn, args = eqx.combine(arrays, static)
        outs = jax.tree.leaves(eqx.filter(fn(*args), eqx.is_inexact_array))
        return sum(jnp.sum(jnp.abs(x)) for x in outs)

    assert not growth(lambda: jax.jit(jax.grad(lambda arrays: loss(arrays)))(arrays), 6)


# ---------------------------------------------------------------- threads

N_THREADS = 8


def in_threads(fn, rounds=1):
    """The results of `fn(i)` in eight threads. Each round begins in all threads at once."""
    barrier = threading.Barrier(N_THREADS, timeout=300)
    results, errors = {}, []

    def run(i):
        try:
            for r in range(rounds):
                barrier.wait()
                results[i, r] = fn(i)
        except threading.BrokenBarrierError:  # another thread has failed
            pass
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(N_THREADS)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    if errors:
        raise errors[0]
    return [results[i, r] for i in range(N_THREADS) for r in range(rounds)]


def numbers(i):
    """Thread `i`'s own."""
    return 0.3 + 0.1 * i, 1.0 + 0.2 * i


def rule(a, i=0):
    """`a sin(x)`, with all rules or with the rules of one mode, which close over `a`."""
    f = eqg.custom_jvp(lambda x: a * jnp.sin(x)) if i % 3 == 1 else eqg.custom_vjp(
        lambda x: a * jnp.sin(x)
    )  # fmt: skip
    if i % 3 < 2:
        f.def_jvp(lambda p, t: (f(*p), a * jnp.cos(p[0]) * t[0]))
    if i % 3 != 1:
        f.def_fwd(lambda x: (f(x), x))
        f.def_bwd(lambda x, ct: (a * jnp.cos(x) * ct,))
        f.def_vmap(lambda size, batched, x: (f(x), batched[0]))
    return f


def _scanned(f, x, scan=jax.lax.scan, **options):
    return scan(lambda h, _: (f(h), h), x, None, length=3, **options)[0]


_replayed = ft.partial(_scanned, scan=eqg.filter_scan, checkpoint="replay")
# By all transformations. All but the first trace.
WAYS = (
    lambda f, x: jax.jit(jax.grad(f))(x),
    lambda f, x: jax.grad(jax.jit(f))(x),
    lambda f, x: jax.hessian(f)(x),
    lambda f, x: jax.grad(ft.partial(_scanned, f))(x),
    lambda f, x: jax.grad(ft.partial(_replayed, f))(x),
    lambda f, x: jax.grad(jax.checkpoint(f))(x),
)


@pytest.mark.slow
def test_fresh_rules_in_threads():
    """Also with an `a` that is traced, and closed over."""

    def run(i):
        x, a = numbers(i)
        traced = jax.jit(lambda x, a: jax.value_and_grad(rule(a, i))(x))(x, a)
        return [way(rule(a, i), x) for way in WAYS[i % 2 :: 2]], traced

    got = in_threads(run)
    for i in range(N_THREADS):
        x, a = numbers(i)
        plain = lambda x, a=a: a * jnp.sin(x)
        expected = [way(plain, x) for way in WAYS[i % 2 :: 2]]
        assert_close(got[i], (expected, (plain(x), a * jnp.cos(x))), eps=200)


def test_errors_are_those_of_the_thread():
    def run(i):
        f = eqg.custom_jvp(lambda x: x)
        f.def_jvp(lambda primals, tangents: (f(*primals), jnp.ones(i + 2)))
        with pytest.raises(eqg.RuleError, match=rf"float\d\d\[{i + 2}\]"):
            jax.grad(f)(0.3)

    in_threads(run, rounds=2)


def test_an_eager_scan_is_compiled_once():
    """The program is kept for the next call, of whichever thread."""
    step = lambda h, x: (jnp.tanh(0.9 * h + x), h)
    run = lambda i: eqg.filter_scan(step, jnp.asarray(0.3), jnp.ones(9))[0]
    expected = run(0)
    with compilations() as found:
        got = in_threads(run, rounds=2)
    assert not found
    assert got == [expected] * 2 * N_THREADS


def test_context_variables_are_of_one_thread():
    """A thread that trains meanwhile does not see what a diagnosis sets."""
    names = [info.name for info in pkgutil.walk_packages(eqg.__path__, "eqx_grads.")]
    modules = [vars(sys.modules[name]) for name in names if name in sys.modules]
    found = [x for module in modules for x in module.values()]
    variables = {x for x in found if isinstance(x, contextvars.ContextVar)}
    assert len(variables) >= 4
    defaults = {v: v.get() for v in variables}
    inside, done, changed = threading.Event(), threading.Event(), []

    def loss(model):
        changed.extend(v for v in variables if v.get() != defaults[v])
        inside.set()
        assert done.wait(60)
        return jnp.sum(model(jnp.ones(2)))

    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    diagnosis = threading.Thread(target=lambda: eqg.gradient_flow(loss, model))
    diagnosis.start()
    assert inside.wait(60)
    try:
        assert {v: v.get() for v in variables} == defaults
    finally:
        done.set()
        diagnosis.join()
    assert changed
