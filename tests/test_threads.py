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
import time
import weakref

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads._jaxprs import versions
from eqx_grads._rules import rule

from .helpers import assert_close, compilations


N_THREADS = 8


@pytest.fixture(autouse=True)
def _take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def in_threads(fn, rounds=1):
    """The results of `fn(i)` in eight threads, of which each round begins in all at once."""
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


def elementwise(a):
    return eqg.elementwise(lambda x: a * jnp.sin(x), lambda out, x: a * jnp.cos(x))


def by_gradient(a):
    def f(x):
        return a * jnp.sin(x), lambda ct: a * jnp.cos(x) * ct

    return eqg.custom_gradient(f)


RULES = (forward, reverse, both, elementwise, by_gradient)


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


def _fresh_rules(kinds, ways):
    """Also with an `a` that is traced, and closed over."""

    def run(i):
        x, a = numbers(i)
        make = kinds[i % len(kinds)]
        traced = jax.jit(lambda x, a: jax.value_and_grad(make(a))(x))(x, a)
        return [way(make(a), x) for way in ways[i % 2 :: 2]], traced

    got = in_threads(run)
    for i in range(N_THREADS):
        x, a = numbers(i)
        plain = lambda x, a=a: a * jnp.sin(x)
        expected = [way(plain, x) for way in ways[i % 2 :: 2]]
        assert_close(got[i], (expected, (plain(x), a * jnp.cos(x))), eps=200)


@pytest.mark.slow
def test_fresh_rules():
    _fresh_rules(RULES, WAYS[::2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", RULES)
def test_fresh_rules_of_one_kind(kind):
    _fresh_rules((kind,), WAYS)
    _fresh_rules((kind,), WAYS[1:])


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


def test_a_shared_rule(monkeypatch):
    """The checks of a rule are remembered for the types of its arguments. Each thread brings
    other types, of which few are remembered."""
    monkeypatch.setattr(rule.CheckCache, "most", 2)

    def run(i):
        for n in range(i % 3, i % 3 + 3):
            layer, x = Scale(jnp.array(2.0)), jnp.ones(n)
            gradient = eqx.filter_grad(lambda pair: pair[0](pair[1]))((layer, x))
            assert_close((gradient[0].weight, gradient[1]), (jnp.array(float(n)), 2.0 * x))

    in_threads(run)


class Slow:
    """A key that lets another thread have its turn whenever it is looked up."""

    def __hash__(self):
        time.sleep(0)
        return 0


class _Call:
    flat = property(lambda self: self)
    operands = ()

    def key(self, operands):
        return Slow()


def test_what_is_remembered_of_a_rule_may_be_forgotten_meanwhile(monkeypatch):
    """Another thread may clear the cache between any two look-ups."""
    monkeypatch.setattr(rule.CheckCache, "most", 1)
    cache = rule.CheckCache()
    got = in_threads(lambda i: [cache.get(_Call(), "check", lambda: i) for _ in range(200)])
    assert {x for results in got for x in results} <= set(range(N_THREADS))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoint",
    ["replay", *(pytest.param(c, marks=pytest.mark.slow) for c in (None, "sqrt", "auto", 2))],
)
def test_a_shared_step(checkpoint):
    """Eagerly: the body of the scan is kept for the next call, of whichever thread."""
    xs = jnp.linspace(-1.0, 1.0, 7)

    def loss(scan, h, xs, **options):
        h, ys = scan(shared_step, h, xs, **options)
        return h + jnp.sum(ys)

    def run(i):
        x, _ = numbers(i)
        return jax.value_and_grad(ft.partial(loss, eqg.filter_scan), (0, 1))(
            x, xs[: 5 + i % 3], checkpoint=checkpoint
        )

    got = in_threads(run, rounds=2)
    for i in range(N_THREADS):
        x, _ = numbers(i)
        expected = jax.value_and_grad(ft.partial(loss, jax.lax.scan), (0, 1))(
            x, xs[: 5 + i % 3]
        )
        assert_close((got[2 * i], got[2 * i + 1]), (expected, expected), eps=100)


def test_an_eager_scan_is_compiled_once():
    """The program is kept for the next call, of whichever thread."""
    run = lambda i: eqg.filter_scan(shared_step, jnp.asarray(0.3), jnp.ones(9))[0]
    expected = run(0)
    with compilations() as found:
        got = in_threads(run, rounds=2)
    assert not found
    assert got == [expected] * 2 * N_THREADS


@pytest.mark.slow
def test_control_flow_and_recurrences():
    def program(x, cond, while_loop, recurrence):
        x = cond(x > 0, lambda x: jnp.sin(x), lambda x: x, x)
        x = while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.cos(s[1])), (0, x))[1]
        return recurrence(jnp.full(5, x), jnp.ones(5))[-1]

    def by_hand(a, b):
        h = jnp.zeros(())
        hs = []
        for i in range(len(a)):
            h = a[i] * h + b[i]
            hs.append(h)
        return jnp.stack(hs)

    ours = lambda x: program(x, eqg.filter_cond, eqg.filter_while_loop, eqg.linear_recurrence)
    plain = lambda x: program(x, jax.lax.cond, jax.lax.while_loop, by_hand)
    got = in_threads(lambda i: jax.jvp(ours, (numbers(i)[0],), (1.0,)))
    for i in range(N_THREADS):
        assert_close(got[i], jax.jvp(plain, (numbers(i)[0],), (1.0,)), eps=100)


# ------------------------------------------------------------------ layers


LAYERS = {
    "GRU": lambda: nn.GRU(3, 4, key=jr.key(0)),
    "LSTM": lambda: nn.LSTM(3, 4, key=jr.key(0)),
    "LRU": lambda: nn.LRU(3, 4, 4, key=jr.key(0)),
    "MinGRU": lambda: nn.MinGRU(3, 4, key=jr.key(0)),
    "LIF": lambda: nn.LIF(3, 4, 0.9, key=jr.key(0)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["GRU", *(pytest.param(n, marks=pytest.mark.slow) for n in list(LAYERS)[1:])]
)
def test_a_shared_layer(name):
    """Each thread traces it for a batch of another size, vmapped, and compiled."""
    layer = LAYERS[name]()

    def gradient(i):
        xs = jr.normal(jr.key(i % 2), (1 + i % 2, 2, 5, 3))

        def loss(layer, xs):
            out = jax.vmap(layer)(xs)
            return sum(jnp.sum(jnp.square(jnp.abs(y))) for y in jax.tree.leaves(out))

        return eqx.filter_jit(eqx.filter_grad(loss))(layer, xs)

    expected = [gradient(0), gradient(1)]
    assert_close(in_threads(gradient), expected * (N_THREADS // 2), eps=500)


# ------------------------------------------------------------------ probes and diagnoses


@pytest.mark.slow
def test_probes():
    def run(i):
        x, a = numbers(i)

        def loss(x, slots):
            step = lambda h, slot: (eqg.probe(jnp.tanh(a * h), slot), None)
            return eqg.filter_scan(step, x, slots)[0]

        _, statistics = jax.jit(jax.grad(loss, (0, 1)))(x, eqg.GradientStatistics(4))
        return statistics.norm

    for i, norm in enumerate(in_threads(run)):
        x, a = numbers(i)
        hs = [x]
        for _ in range(4):
            hs.append(float(jnp.tanh(a * hs[-1])))
        slopes = [a * (1 - h**2) for h in hs[1:]]
        expected = [np.prod(slopes[k + 1 :]) for k in range(4)]
        assert_close(norm, jnp.array(expected, norm.dtype), eps=100)


def _nan_of(i, x):
    """The loss of thread `i`, whose fault is in a line of its own."""
    if i % 4 == 0:
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))  # line of 0
    if i % 4 == 1:
        return jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0))  # line of 1
    if i % 4 == 2:
        return jnp.sum(jnp.where(x > 0, 1.0 / x, 0.0))  # line of 2
    return jnp.sum(jnp.where(x > 0, x**0.5, 0.0))  # line of 3


@pytest.mark.slow
def test_reports_have_lines_of_their_own():
    model = Scale(jnp.zeros(3))

    def run(i):
        return (
            eqg.explain_nan(lambda m: _nan_of(i, m.weight), model),
            eqg.explain_zero(lambda m: jnp.sum(jnp.round(m.weight * (i + 1))), model),
            eqg.explain_memory(lambda m: jnp.sum(jnp.sin(m.weight * (i + 1))), model),
        )

    for i, (nan, zero, memory) in enumerate(in_threads(run)):
        assert [record.code.endswith(f"# line of {i % 4}") for record in nan.found] == [True]
        assert [record.kind for record in zero.found] == ["rounding"]
        assert memory.found


class _Traceback:
    """Lets another thread have its turn whenever it is looked up."""

    def __hash__(self):
        time.sleep(0)
        return id(self)


def test_tracebacks_keep_their_numbers():
    """Each traceback has a number of its own, whichever thread asks first."""
    tracebacks = [_Traceback() for _ in range(50)]

    class Equation:
        def __init__(self, traceback):
            self.source_info = self
            self.traceback, self.name_stack = traceback, ""

    def run(i):
        names = {}
        for traceback in tracebacks[i:] + tracebacks[:i]:
            names[traceback] = versions._name_of_traceback(Equation(traceback))
        return [names[t] for t in tracebacks]

    n_before = len(versions._TRACEBACKS)
    got = in_threads(run)
    assert len(versions._TRACEBACKS) == n_before + len(tracebacks)
    for names in got:
        assert names == got[0]
        for traceback, name in zip(tracebacks, names, strict=True):
            assert versions._TRACEBACKS[int(name.rpartition("_")[2])] is traceback


def test_gradient_ops():
    def run(i):
        x, a = numbers(i)
        f = lambda x: jnp.where(x > 0, a * jnp.sqrt(x), 0.0)
        slope = jax.grad(eqg.zero_safe(f))(0.0)
        ops = eqg.clip_gradient(a * jnp.array(x), -0.1 * (i + 1), 0.1 * (i + 1))
        return slope, ops

    expected = [(jnp.array(0.0), jnp.array(np.prod(numbers(i)))) for i in range(N_THREADS)]
    assert_close(in_threads(run), expected)


@pytest.mark.slow
def test_checks():
    in_threads(lambda i: eqgt.check_rule(forward(numbers(i)[1]), 0.3, skip=("leaks",)))


# ------------------------------------------------------------------ host functions, solvers


def test_host_functions():
    """One that all share, with residuals on the host, and one of each thread."""

    shared = eqg.host_function(np.sin, out=lambda x: x)
    shared.def_fwd(lambda x: (np.sin(x), np.cos(x)), keep=2)
    shared.def_bwd(lambda cos, ct: (cos * ct,))

    def run(i):
        x, _ = numbers(i)
        own = eqg.host_function(lambda x: np.sin(x), out=lambda x: x)
        own.def_jvp(lambda primals, ts: (np.sin(primals[0]), np.cos(primals[0]) * ts[0]))
        x = jnp.full(3, x)
        total = lambda f: lambda x: jnp.sum(f(x))
        return jax.jit(jax.grad(total(shared)))(x), jax.jvp(own, (x,), (x,))[1]

    for i, (gradient, tangent) in enumerate(in_threads(run)):
        x = jnp.full(3, numbers(i)[0])
        assert_close((gradient, tangent), (jnp.cos(x), jnp.cos(x) * x), eps=100)


@pytest.mark.slow
def test_implicit_functions():
    pytest.importorskip("lineax")

    def run(i):
        x, a = numbers(i)
        root = eqg.implicit(lambda y, x: y**3 - a * x)(lambda x: jnp.cbrt(a * x))
        return jax.jit(jax.grad(root))(x), jax.jvp(root, (x,), (1.0,))[1]

    for i, got in enumerate(in_threads(run)):
        x, a = numbers(i)
        slope = a / 3 * (a * x) ** (-2 / 3)
        assert_close(got, (slope, slope), tolerance=1e-5)


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
    """What a diagnosis sets is not seen by a thread that trains meanwhile."""
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
