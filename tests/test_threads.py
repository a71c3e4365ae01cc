"""Eight threads that trace, differentiate and run at once: right numbers, and no state left.

Functions are fresh in each round, so that they are traced at once; others are shared, and so is
what the library keeps of them. Threads take turns much more often than they usually do.
"""

import contextvars
import functools as ft
import gc
import pkgutil
import sys
import threading
import weakref

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .helpers import assert_close, compilations


pytestmark = pytest.mark.versions


N_THREADS = 8


@pytest.fixture(autouse=True)
def _take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


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
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[i, r] for i in range(N_THREADS) for r in range(rounds)]


def numbers(i):
    """Thread `i`'s own."""
    return 0.3 + 0.1 * i, 1.0 + 0.2 * i


# ------------------------------------------------------------------ rules


def forward(a):
    """`a sin(x)`, with a rule that closes over `a`."""
    f = eqg.custom_jvp(lambda x: a * jnp.sin(x))
    f.def_jvp(lambda primals, tangents: (f(*primals), a * jnp.cos(primals[0]) * tangents[0]))
    return f


def reverse(a):
    f = eqg.custom_vjp(lambda x: a * jnp.sin(x))
    f.def_fwd(lambda x: (f(x), x))
    f.def_bwd(lambda x, ct: (a * jnp.cos(x) * ct,))
    f.def_vmap(lambda size, batched, x: (f(x), batched[0]))
    return f


def both(a):
    f = reverse(a)
    f.def_jvp(lambda primals, tangents: (f(*primals), a * jnp.cos(primals[0]) * tangents[0]))
    return f


RULES = (forward, reverse, both)


def _scanned(f, x):
    return jax.lax.scan(lambda h, _: (f(h), h), x, None, length=3)[0]


def _replayed(f, x):
    return eqg.filter_scan(lambda h, _: (f(h), h), x, None, length=3, checkpoint="replay")[0]


# By all transformations. All but the first trace.
WAYS = (
    lambda f, x: f(x),
    lambda f, x: jax.grad(f)(x),
    lambda f, x: jax.jit(jax.grad(f))(x),
    lambda f, x: jax.grad(jax.jit(f))(x),
    lambda f, x: jax.jvp(f, (x,), (2.0,)),
    lambda f, x: jax.vmap(jax.grad(f))(jnp.full(2, x)),
    lambda f, x: jax.hessian(f)(x),
    lambda f, x: jax.grad(ft.partial(_scanned, f))(x),
    lambda f, x: jax.grad(ft.partial(_replayed, f))(x),
    lambda f, x: jax.grad(jax.checkpoint(f))(x),
)


@pytest.mark.slow
def test_fresh_rules():
    """Also with an `a` that is traced, and closed over."""

    def run(i):
        x, a = numbers(i)
        make = RULES[i % len(RULES)]
        traced = jax.jit(lambda x, a: jax.value_and_grad(make(a))(x))(x, a)
        return [way(make(a), x) for way in WAYS[i % 2 :: 2]], traced

    got = in_threads(run)
    for i in range(N_THREADS):
        x, a = numbers(i)
        plain = lambda x, a=a: a * jnp.sin(x)
        expected = [way(plain, x) for way in WAYS[i % 2 :: 2]]
        assert_close(got[i], (expected, (plain(x), a * jnp.cos(x))), eps=200)


class Scale(eqx.Module):
    weight: jax.Array

    @eqg.custom_vjp
    def __call__(self, x):
        return self.weight * jnp.sum(x)

    @__call__.def_fwd
    def _fwd(self, x):
        return self(x), (self, x)

    @__call__.def_bwd
    def _bwd(residuals, ct):
        self, x = residuals
        ct_self = eqg.tangents.of(self, weight=ct * jnp.sum(x))
        return ct_self, jnp.full(x.shape, self.weight * ct)


def test_errors_are_those_of_the_thread():
    def run(i):
        f = eqg.custom_jvp(lambda x: x)
        f.def_jvp(lambda primals, tangents: (f(*primals), jnp.ones(i + 2)))
        with pytest.raises(eqg.RuleError, match=rf"float\d\d\[{i + 2}\]"):
            jax.grad(f)(0.3)

    in_threads(run, rounds=2)


# ------------------------------------------------------------------ scans


def shared_step(h, x):
    return jnp.tanh(0.9 * h + x), h


def test_an_eager_scan_is_compiled_once():
    """The program is kept for the next call, of whichever thread."""
    run = lambda i: eqg.filter_scan(shared_step, jnp.asarray(0.3), jnp.ones(9))[0]
    expected = run(0)
    with compilations() as found:
        got = in_threads(run, rounds=2)
    assert not found
    assert got == [expected] * 2 * N_THREADS


# ------------------------------------------------------------------ no state is left


def _variables():
    """The context variables of the package."""
    found = []
    for info in pkgutil.walk_packages(eqg.__path__, "eqx_grads."):
        module = sys.modules.get(info.name)
        for x in vars(module or object).values():
            if isinstance(x, contextvars.ContextVar):
                found.append(x)
    return set(found)


def test_context_variables_are_of_one_thread():
    """A thread that trains meanwhile does not see what a diagnosis sets."""
    variables = _variables()
    assert len(variables) >= 4
    defaults = {v: v.get() for v in variables}
    inside, done = threading.Event(), threading.Event()
    changed = []

    def loss(model):
        changed.extend(v for v in variables if v.get() != defaults[v])
        inside.set()
        assert done.wait(60)
        return model(jnp.ones(2))

    diagnosis = threading.Thread(target=lambda: eqg.gradient_flow(loss, Scale(jnp.array(2.0))))
    diagnosis.start()
    assert inside.wait(60)
    try:
        assert {v: v.get() for v in variables} == defaults
    finally:
        done.set()
        diagnosis.join()
    assert changed
    assert {v: v.get() for v in variables} == defaults


def _raise(x):
    raise ValueError("the user's")


@pytest.mark.slow
def test_nothing_stays_alive():
    """No tracers of threads that are over, and no steps that are gone."""
    steps = []

    def run(i):
        x, a = numbers(i)
        f = both(a)
        step = lambda h, x: (f(h) + x, None)
        steps.append(weakref.ref(step))
        with pytest.raises(ValueError, match="the user's"):
            jax.jit(jax.grad(lambda x: _raise(f(x))))(x)
        return jax.grad(lambda x: eqg.filter_scan(step, x, jnp.ones(3))[0])(x)

    in_threads(run)
    gc.collect()
    tracers = [x for x in gc.get_objects() if isinstance(x, jax.core.Tracer)]
    in_threads(run)
    gc.collect()
    assert len([x for x in gc.get_objects() if isinstance(x, jax.core.Tracer)]) <= len(tracers)
    assert not any(step() for step in steps)
