"""`eqg.zero_safe`: against the derivative of the branch that is taken, in high precision."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import optax
import pytest

from .helpers import assert_close, skip_without_checkpointed_loops


@dataclasses.dataclass(frozen=True)
class Case:
    """`fn` is `truth`, a function of `mpmath`, near `x`, by what it takes there."""

    name: str
    fn: Callable[[Any], Any]
    x: float
    truth: Callable[[Any], Any]


where = jnp.where
sqrt, log = jnp.sqrt, jnp.log


def _scan(step, init, xs):
    return jax.lax.scan(step, init, xs)[0]


def _quaternion(v):
    """MJX, `math.axis_angle_to_quat` after `math.normalize_with_norm`."""
    norm = jnp.linalg.norm(v)
    axis = where(norm > 0, v / norm, jnp.zeros_like(v))
    return jnp.cos(norm / 2) + jnp.sum(axis) * jnp.sin(norm / 2)


def _contact(x):
    """MJX, the impedance of a contact: a power that is taken inside the margin only."""
    position = jnp.clip(x, 0.0, 1.0)
    power = where(position > 0, position**0.7, 0.0)
    return where(x > 0, power / position, 1.0)


@jax.custom_jvp
def _root(x):
    return jnp.sqrt(x)


_root.defjvp(lambda primals, tangents: (_root(*primals), tangents[0] / (2 * _root(*primals))))


@eqg.custom_jvp
def _our_root(x):
    return jnp.sqrt(x)


@_our_root.def_jvp
def _our_root_jvp(primals, tangents):
    (x,) = primals
    return _our_root(x), tangents[0] / (2 * _our_root(x))


def _reset(x):
    step = lambda c, reset: (where(reset, x * x, sqrt(c)), None)
    return _scan(step, x, jnp.array([False, False, True]))


def _late(x):
    """The last step takes nothing of the others."""
    step = lambda c, last: (where(last, 2 * x, c + log(x)), None)
    return _scan(step, x, jnp.array([False, True]))


def _attention(x):
    q = x * jnp.arange(1.0, 5.0).reshape(2, 2)
    scores = where(jnp.array([[True, True], [False, False]]), q @ q.T, -jnp.inf)
    rows = jax.nn.softmax(scores) @ q
    return jnp.sum(where(jnp.array([[True], [False]]), rows, 0.0))


def _attention_truth(x):
    rows = [[x, 2 * x], [3 * x, 4 * x]]
    scores = [sum(a * b for a, b in zip(rows[0], row, strict=True)) for row in rows]
    weights = [mpmath.exp(s) / sum(mpmath.exp(t) for t in scores) for s in scores]
    return sum(w * sum(row) for w, row in zip(weights, rows, strict=True))


def _masked_labels(x):
    logits = jnp.stack([jnp.stack([x, 1 + 0 * x]), jnp.stack([-jnp.inf + 0 * x, x - jnp.inf])])
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.array([0, 0]))
    return jnp.sum(where(jnp.array([True, False]), losses, 0.0))


def _cond(x):
    return jax.lax.cond(x > 0, lambda x: sqrt(x) * x, lambda x: x**2, x)


def _switch(x):
    branches = [lambda x: 3 * x, lambda x: 1 / x, sqrt]
    return jax.lax.switch((x > 0).astype(jnp.int32), branches, x)


_shifted = lambda x: sqrt(x + jnp.array([0.0, 4.0, 9.0]))


def _dropped_update(x):
    data = jnp.stack([log(x), x * x])
    return jnp.sum(jnp.zeros(2).at[jnp.array([7, 1])].subtract(data, mode="drop"))


def _steep_segment_max(x):
    """The cotangent is infinite as well, of what is not taken."""
    largest = jax.ops.segment_max(jnp.stack([x, x - 1]), jnp.array([0, 0]), 1)[0]
    return where(x > 0, sqrt(largest), x)


def _approx_max_k(x):
    return jnp.sum(jax.lax.approx_max_k(_shifted(x), 1)[0])


def _scan_of_top_k(x):
    step = lambda h, _: (jax.lax.top_k(sqrt(jnp.stack([x, x + 4])), 1)[0][0], None)
    return jax.lax.scan(step, x, None, length=2)[0]


zero = lambda x: mpmath.mpf(0)
same = lambda x: x

# A scalar gets a cotangent from each element, and that of the second one is dead.
_data = jnp.array([1.0, 0.0])
_of_data = lambda terms: jnp.sum(where(_data > 0, terms, 0.0))

CASES = [
    Case("infinite literal", lambda x: where(x > 0, 0.0, x * jnp.inf), 1.0, zero),
    Case("factor of data", lambda x: _of_data(x * (x / _data)), 0.5, lambda x: x**2),
    Case("logarithm of data", lambda x: _of_data(x * (2 + log(_data))), 0.5, lambda x: 2 * x),
    Case("divisor of data", lambda x: _of_data(x / _data), 0.5, same),
    Case("exponent of data", lambda x: _of_data(x ** (1 / _data)), 0.5, same),
    Case("power, second order", lambda x: where(x > 0, x**1.5, x**2), 0.0, lambda x: x**2),
    Case("sinc", lambda x: where(x != 0, jnp.sin(x) / x, 1 - x**2 / 6), 0.0, mpmath.sinc),
    Case("nested where", lambda x: where(x > 0, where(x > 1, log(x), sqrt(x)), x), 0.0, same),
    Case("poison upstream", lambda x: where(x > 0, jnp.sin(3 * sqrt(x)), x), 0.0, same),
    Case("used twice", lambda x: where(x > 0, x / sqrt(x), 0.0) * 1e3 + x, 0.0, same),
    Case("sqrt of a relu", lambda x: sqrt(jax.nn.relu(x)) + x, -2.0, same),
    Case("norm", lambda x: where(x > 0, jnp.linalg.norm(x * jnp.ones(3)), x), 0.0, same),
    Case("std", lambda x: where(x > 1, jnp.std(x * jnp.ones(3)), x), 1.0, same),
    Case("scatter-sub, dropped", _dropped_update, 0.0, lambda x: -(x**2)),
    Case("segment_max of -inf", _steep_segment_max, 0.0, lambda x: x),
    Case("approx_max_k", _approx_max_k, 0.0, lambda x: mpmath.sqrt(x + 9)),
    Case("scan of top_k", _scan_of_top_k, 0.0, lambda x: mpmath.sqrt(x + 4)),
    Case("attention, masked row", _attention, 0.5, _attention_truth),
    Case("scan, reset", _reset, 0.0, lambda x: x**2),
    Case("scan, late", _late, 0.0, lambda x: 2 * x),
    Case(
        "scan, from zero",
        lambda x: _scan(lambda c, _: (sqrt(c) * x + x, None), jnp.zeros_like(x), jnp.arange(2)),
        1.0,
        lambda x: mpmath.sqrt(x) * x + x,
    ),
    Case(
        "associative_scan",
        lambda x: where(
            x > 0, jax.lax.associative_scan(jnp.multiply, jnp.stack([log(x), x, x]))[-1], x
        ),
        0.0,
        same,
    ),
    Case("switch", _switch, 0.0, lambda x: 3 * x),
    Case("scan in checkpoint", jax.checkpoint(_reset), 0.0, lambda x: x**2),
    Case(
        "vmap of cond",
        lambda x: jnp.sum(jax.vmap(_cond)(jnp.stack([x, x + 1]))),
        0.0,
        lambda x: x**2 + mpmath.sqrt(x + 1) * (x + 1),
    ),
    Case("custom_jvp of ours", lambda x: where(x > 0, _our_root(x), x), 0.0, same),
    Case(
        "logsumexp",
        lambda x: where(x > 1, jax.scipy.special.logsumexp(x * jnp.full(2, -jnp.inf)), x),
        1.0,
        same,
    ),
    Case("logaddexp", lambda x: where(x > 0, jnp.logaddexp(log(x), -jnp.inf), x), 0.0, same),
    Case(
        "optax cross-entropy", _masked_labels, 0.0, lambda x: mpmath.log(1 + mpmath.exp(1 - x))
    ),
    Case(
        "optax safe_norm",
        lambda x: optax.safe_norm(jnp.stack([x, x]), 1e-3) + x,
        0.0,
        lambda x: 1e-3 + x,
    ),
    Case(
        "MJX, rotation",
        lambda x: _quaternion(where(x > 0, x, 0.0) * jnp.ones(3)) + x,
        -1.0,
        lambda x: 1 + x,
    ),
    Case("MJX, contact", _contact, -0.5, lambda x: mpmath.mpf(1)),
]


@pytest.fixture(autouse=True)
def _mixed_promotion():
    """The cases are what users write."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.thorough
def test_derivatives_of_what_is_taken():
    """Both modes, and second order: all cases in one program."""

    def derivatives(case):
        safe, x = eqg.zero_safe(case.fn), jnp.asarray(case.x)
        gradient = jax.grad(safe)
        forward = jax.jvp(safe, (x,), (x * 0 + 1,))[1]
        return gradient(x), forward, jax.jacfwd(gradient)(x), jax.grad(gradient)(x)

    for case, found in zip(CASES, jax.jit(lambda: [*map(derivatives, CASES)])(), strict=True):
        with mpmath.workdps(40):
            first, second = (float(mpmath.diff(case.truth, case.x, n)) for n in (1, 2))
        want = [first, first, second, second]
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4, err_msg=case.name)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_scalar_with_factors_that_are_dead(around):
    """The part that is not finite does not depend on the scalar, whose cotangent is a sum over
    it."""
    loss = lambda w, x, a: jnp.sum(jnp.where(a > 0, jnp.sin(w) * (x / a), 0.0))
    safe = eqg.zero_safe(around(loss))
    w, x, a = jnp.array(0.5), jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0])
    assert jnp.isnan(jax.grad(loss)(w, x, a))
    assert_close(jax.grad(safe)(w, x, a), jnp.cos(w))
    assert_close(jax.jvp(lambda w: safe(w, x, a), (w,), (w * 2,))[1], jnp.cos(w))
    assert_close(jax.grad(jax.grad(safe))(w, x, a), -jnp.sin(w))
    assert safe(w, x, a) == loss(w, x, a)


@pytest.mark.parametrize("take", [jnp.max, jnp.min])
def test_an_extremum_that_is_nan_and_dead(take):
    """It equals none of its elements, and JAX divides by the number of equal elements."""

    def loss(w, a):
        rows = jnp.stack([w * (a / a), w**2 * jnp.ones_like(a)], 1)
        return jnp.sum(jnp.where(a > 0, take(rows, axis=1), 0.0))

    w, a = jnp.array(0.5), jnp.array([1.0, 0.0])
    assert jnp.isnan(jax.grad(loss)(w, a))
    assert_close(jax.grad(eqg.zero_safe(loss))(w, a), jax.grad(loss)(w, a[:1]))


def test_a_factor_of_what_is_filled_with_nan():
    index, weight = jnp.array([0, -100, 2]), jnp.array([1.0, 2.0, 3.0])

    def loss(x, weight):
        terms = jnp.take(x, index) * weight
        return jnp.sum(jnp.where(index >= 0, terms, 0.0))

    x = jnp.array([0.5, 1.0, 2.0])
    got = jax.grad(eqg.zero_safe(loss), (0, 1))(x, weight)
    assert_close(got, (jnp.array([1.0, 0, 3]), jnp.array([0.5, 0, 2])))


@jax.custom_vjp
def root(x):
    return jnp.sqrt(x)


root.defvjp(lambda x: (root(x), x), lambda x, ct: (7 * ct / jnp.sqrt(x),))

our_root = eqg.custom_vjp(lambda x: jnp.sqrt(x))
our_root.def_fwd(lambda x: (our_root(x), x))
our_root.def_bwd(lambda x, ct: (7 * ct / jnp.sqrt(x),))

plain_root = jax.custom_jvp(lambda x: jnp.sqrt(x))
plain_root.defjvp(lambda p, t: (plain_root(*p), 7 * t[0] / jnp.sqrt(p[0])))


@pytest.mark.parametrize("fn", [root, our_root, plain_root], ids=["vjp", "ours", "jvp"])
def test_rules_are_kept_and_masked(fn):
    if fn is root and getattr(jax.config, "jax_custom_vjp3", False):
        pytest.skip("an opaque primitive, whose rule JAX does not show")
    loss = eqg.zero_safe(lambda x: jnp.sum(jnp.where(x > 0, fn(x), 0.0)))
    np.testing.assert_array_equal(jax.grad(loss)(jnp.array([0.0, 4.0])), jnp.array([0.0, 3.5]))


_our_half = eqg.elementwise(lambda x: 0.5 * x, lambda out, x: 0.5)
_half_in_reverse = eqg.custom_vjp(lambda x: 0.5 * x)
_half_in_reverse.def_fwd(lambda x: (0.5 * x, None))
_half_in_reverse.def_bwd(lambda _, ct: (0.5 * ct,))


@pytest.mark.parametrize(
    "half",
    [
        lambda x: 0.5 * x,
        _our_half,
        _half_in_reverse,
        jax.jit(_our_half),
        jax.checkpoint(_our_half),
        lambda x: jax.vmap(_our_half)(x),
    ],
    ids=["plain", "elementwise", "custom_vjp", "jit", "checkpoint", "vmap"],
)
def test_a_backward_rule_that_calls_an_elementwise_function(half):
    f = jax.custom_vjp(jnp.sqrt)
    f.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, ct: (half(ct / jnp.sqrt(x)),))
    if getattr(jax.config, "jax_custom_vjp3", False):
        pytest.skip("an opaque primitive, whose rule JAX does not show")
    loss = eqg.zero_safe(lambda x: jnp.sum(jnp.where(x > 0, f(x), 0.0)))
    np.testing.assert_array_equal(jax.grad(loss)(jnp.array([0.0, 4.0])), [0.0, 0.25])


def test_a_while_loop_has_its_forward_mode():
    def loop(x):
        body = lambda c: (c[0] + 1, jnp.sqrt(c[1]))
        return jnp.where(x > 0, jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1], 2 * x)

    safe = eqg.zero_safe(loop)
    assert jax.jvp(safe, (0.0,), (1.0,))[1] == 2.0
    assert_close(jax.jvp(safe, (2.0,), (1.0,))[1], jax.jvp(loop, (2.0,), (1.0,))[1])


def test_effects_happen_once(capfd):
    def loss(x):
        y = jnp.sqrt(x)
        jax.debug.print("here {}", y)
        return jnp.where(x > 0, y, x)

    assert jax.jit(jax.grad(eqg.zero_safe(loss)))(jnp.array(0.0)) == 1.0
    jax.effects_barrier()
    assert capfd.readouterr().out.count("here") == 1


_X = jnp.array([1.0, -2.0, 0.5, 3.0])
_Z = jax.lax.complex(_X, jnp.array([0.3, 0.7, -1.0, 0.2]))
_OF_COMPLEX = {
    "abs": jnp.abs,
    "real": jnp.real,
    "angle": jnp.angle,
    "sign": lambda z: jnp.imag(jnp.sign(z)),
    "fft": lambda z: jnp.abs(jnp.fft.fft(z)),
    "norm": jnp.linalg.norm,
    "sqrt": lambda z: jnp.real(jnp.sqrt(z)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["selected", "zero"])
@pytest.mark.parametrize("name", _OF_COMPLEX)
def test_between_real_and_complex(name, policy):
    loss = lambda z: jnp.sum(_OF_COMPLEX[name](z))
    safe = eqg.zero_safe(loss, policy=policy)
    assert_close(jax.grad(safe)(_Z), jax.grad(loss)(_Z), eps=100)
    of_real = lambda loss: lambda x: loss(jax.lax.complex(x, x**2))
    assert_close(jax.grad(of_real(safe))(_X), jax.grad(of_real(loss))(_X), eps=100)
    assert_close(jax.hessian(of_real(safe))(_X), jax.hessian(of_real(loss))(_X), eps=1000)
    t = jnp.conj(_Z)
    assert_close(jax.jvp(safe, (_Z,), (t,))[1], jax.jvp(loss, (_Z,), (t,))[1], eps=100)


def test_policy_zero_at_a_complex_zero():
    loss = lambda z: jnp.sum(jnp.sqrt(jnp.abs(z)))
    z, slope = jnp.array([0j, 3 + 4j]), 0.5 / np.sqrt(5)
    safe = eqg.zero_safe(loss, policy="zero")
    assert_close(jax.grad(safe)(z), jnp.array([0, slope * (0.6 - 0.8j)]))
    assert_close(jax.jvp(safe, (z,), (jnp.array([0j, 1 + 1j]),))[1], jnp.asarray(1.4 * slope))
    (record,) = eqg.explain_nan(loss, z).found
    assert (record.kind, record.primitive) == ("true singularity", "sqrt")


def test_an_unknown_policy_is_an_error():
    with pytest.raises(eqg.RuleError, match="policy"):
        eqg.zero_safe(jnp.sqrt, policy="none")


@pytest.mark.thorough
def test_the_time_is_linear_in_the_length_of_the_program():
    def long(steps, x):
        for _ in range(steps):
            x = jnp.where(x > 0, jnp.sqrt(x) * 1.01, x) + jnp.sin(x)
        return jnp.sum(x)

    sizes = [
        len(jax.make_jaxpr(eqg.zero_safe(lambda x, n=n: long(n, x)))(jnp.ones(3)).eqns)
        for n in (10, 20, 40)
    ]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


def _cost(fn, *args):
    compiled = jax.jit(fn).lower(*args).compile()
    analysis = compiled.cost_analysis()
    return analysis["flops"], analysis["bytes accessed"]


def _models():
    key = jax.random.key(0)
    x = jnp.ones((32, 32))

    def mlp(activation):
        return eqx.nn.MLP(32, 8, 64, 2, activation=activation, key=key)

    def square(model):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def cross_entropy(model):
        return -jnp.mean(jax.nn.log_softmax(jax.vmap(model)(x))[:, 0])

    class Normed(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.LayerNorm

        def __call__(self, x):
            for _ in range(3):
                x = jax.nn.relu(self.norm(self.linear(x)))
            return x

    def gru(cell):
        h, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(32), x)
        return jnp.mean(h**2)

    normed = Normed(eqx.nn.Linear(32, 32, key=key), eqx.nn.LayerNorm(32))
    by_hand = lambda x: jnp.maximum(x, 0.0)
    return {
        "relu": (square, mlp(jax.nn.relu)),
        "softplus": (square, mlp(jax.nn.softplus)),
        "gelu": (cross_entropy, mlp(jax.nn.gelu)),
        "relu, classifier": (cross_entropy, mlp(jax.nn.relu)),
        "maximum, classifier": (cross_entropy, mlp(by_hand)),
        "LayerNorm": (square, normed),
        "gru": (gru, eqx.nn.GRUCell(32, 32, key=key)),
    }


@pytest.mark.cost
@pytest.mark.parametrize("name", _models())
def test_it_costs_nothing_where_nothing_can_be_dead(name):
    loss, model = _models()[name]
    arrays, static = eqx.partition(model, eqx.is_array)
    flat = lambda arrays: loss(eqx.combine(arrays, static))
    plain, safe = _cost(jax.grad(flat), arrays), _cost(jax.grad(eqg.zero_safe(flat)), arrays)
    assert all(b <= 1.05 * a for a, b in zip(plain, safe, strict=True)), (plain, safe)


@pytest.mark.slow
def test_optimistix():
    optimistix = pytest.importorskip("optimistix")
    solver = optimistix.Newton(rtol=1e-6, atol=1e-6)

    def root(x):
        square = lambda y, x: y * y - x
        solution = optimistix.root_find(square, solver, 1 + 0 * x, args=x, throw=False)
        return jnp.where(x > 0, solution.value, x)

    grad = jax.grad(eqg.zero_safe(root))
    assert_close(grad(4.0), jnp.array(0.25), tolerance=1e-4)
    assert grad(-1.0) == 1.0


@pytest.mark.slow
def test_diffrax():
    diffrax = pytest.importorskip("diffrax")
    skip_without_checkpointed_loops()
    # The solver's own backward pass is a rule: it is the vector field that is made safe.
    field = eqg.zero_safe(lambda t, y, args: jnp.where(y > 0, -jnp.sqrt(y), 0.0))

    def end(y):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Euler(), 0.0, 1.0, 0.25, y, max_steps=8
        )
        return solution.ys[0]

    assert jax.grad(end)(jnp.array(0.0)) == 1.0


def test_flowjax():
    flows = pytest.importorskip("flowjax.distributions")
    log_prob = lambda x: flows.LogNormal(0.0, 1.0).log_prob(x)
    loss = lambda x: jnp.sum(jnp.where(x > 0, jax.vmap(log_prob)(x), 0.0))
    x = jnp.array([0.0, 1.0])
    np.testing.assert_allclose(jax.grad(eqg.zero_safe(loss))(x), [0.0, -1.0], rtol=1e-5)


def test_a_number_as_the_factor_of_a_scatter():
    def f(x):
        step = lambda c, e: (jnp.where(e > 0, jnp.sqrt(e) + 0.5 * c, c), c)
        ys = jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]
        return ys.at[0].multiply(1.3).sum()

    assert_close(
        jax.grad(eqg.zero_safe(f))(jnp.array([0.0, 1.0, 4.0])), jnp.array([0.0, 0.5, 0.0])
    )


@pytest.mark.parametrize("policy", ["selected", "zero"])
def test_values_are_those_of_the_compiled_function(policy):
    """An eager call differs by rounding, where `fn` calls a compiled function."""

    @jax.jit
    def inner(x):
        return jnp.where(x > 0, jnp.sqrt(x) * 1.1 + x * x * 0.3, x)

    x = jax.random.normal(jax.random.key(0), (64, 32))
    safe = eqg.zero_safe(lambda x: 0.7 * inner(x), policy=policy)
    plain = jax.jit(lambda x: 0.7 * inner(x))
    np.testing.assert_array_equal(jax.jit(safe)(x), plain(x))
    assert_close(safe(x), plain(x))


_AT_THE_END = {
    "arccos": (lambda x: jnp.arccos(jnp.clip(x, -1, 1)), 1.0),
    "arcsin": (lambda x: jnp.arcsin(jnp.clip(x, -1, 1)), -1.0),
    "arctanh": (lambda x: jnp.arctanh(jnp.clip(x, -1, 1)), 1.0),
    "erfinv": (lambda x: jax.scipy.special.erfinv(jnp.clip(x, -1, 1)), 1.0),
    "arccosh": (lambda x: jnp.arccosh(jnp.maximum(2 - x, 1)), 1.0),
    "log1p": (lambda x: jnp.log1p(jnp.maximum(-x, -1)), 1.0),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", _AT_THE_END)
def test_at_the_end_of_a_closed_domain(name, dtype):
    """In double precision, one minus the smallest step that matters is one."""
    fn, end = _AT_THE_END[name]
    with jax.enable_x64(dtype == "float64"):
        x = jnp.array(end, dtype)
        loss = lambda x: jnp.where(x != end, fn(x), 0 * x)
        assert not np.isfinite(jax.grad(loss)(x))
        assert jax.grad(eqg.zero_safe(loss))(x) == 0
        inside = jnp.array(0.5 * end, dtype)
        assert jax.grad(eqg.zero_safe(loss))(inside) == jax.grad(fn)(inside)


def test_values_behind_a_barrier_keep_their_own_ranges():
    """The first value is never small, the second one may be zero."""

    def loss(x):
        _, x = jax.lax.optimization_barrier((x**2 + 1.0, x))
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))

    gradient = jax.grad(eqg.zero_safe(loss))(jnp.array([0.0, 4.0]))
    np.testing.assert_array_equal(gradient, [0.0, 0.25])


def test_a_convolution_before_a_root_costs_nothing_more():
    """A convolution does not use all elements, and multiplies no cotangent by zero."""
    kernel = jnp.ones(3)
    loss = lambda x: jnp.sum(jnp.sqrt(jnp.convolve(x, kernel, "valid")[::2]))
    n_products = lambda fn: str(jax.make_jaxpr(jax.grad(fn))(jnp.ones(9))).count("conv_general")
    assert n_products(eqg.zero_safe(loss)) == n_products(loss)
