"""`eqg.zero_safe`: against the derivative of the branch that is taken, in high precision."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from .helpers import assert_close, skip_without_checkpointed_loops
from .zero_safe_cases import CASES


NAN, INF = jnp.nan, jnp.inf


def first_and_second(case):
    with mpmath.workdps(40):
        x = mpmath.mpf(case.x)
        return [float(mpmath.diff(case.truth, x, n)) for n in (1, 2)]


def check(got, case, order):
    assert_close(np.asarray(got, np.float64), first_and_second(case)[order - 1], tolerance=1e-4)


@pytest.fixture(autouse=True)
def _mixed_promotion():
    """The cases are what users write."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
some_quick = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if i % 4 == 0 else [pytest.mark.slow])
        for i, case in enumerate(CASES)
    ],
)


@pytest.mark.thorough
@some_quick
def test_first_derivative_of_what_is_taken(case):
    safe, x = eqg.zero_safe(case.fn), jnp.asarray(case.x)
    grad, tangent = jax.jit(
        lambda x: (jax.grad(safe)(x), jax.jvp(safe, (x,), (x * 0 + 1,))[1])
    )(x)
    check(grad, case, 1)
    check(tangent, case, 1)
    assert safe(x) == case.fn(x) or jnp.isnan(case.fn(x))


@pytest.mark.slow
@every_case
def test_second_derivative_of_what_is_taken(case):
    safe, x = eqg.zero_safe(case.fn), jnp.asarray(case.x)
    modes = {
        "forward over reverse": jax.jacfwd(jax.grad(safe)),
        "reverse over reverse": jax.grad(jax.grad(safe)),
        "reverse over forward": jax.grad(jax.jacfwd(safe)),
        "forward over forward": jax.jacfwd(jax.jacfwd(safe)),
    }
    for second in jax.jit(lambda x: [mode(x) for mode in modes.values()])(x):
        check(second, case, 2)


@pytest.mark.slow
@every_case
def test_derivative_under_transformations(case):
    fn, safe, x = case.fn, eqg.zero_safe(case.fn), jnp.asarray(case.x)

    def in_scan(x):
        return jax.lax.scan(lambda c, _: (c + safe(x), None), x * 0, None, length=2)[0] / 2

    def batched(x):
        return jnp.mean(eqg.zero_safe(jax.vmap(fn))(jnp.stack([x, x])))

    modes = [
        jax.grad(jax.checkpoint(safe)),
        jax.grad(eqg.zero_safe(jax.jit(fn))),
        jax.grad(eqg.zero_safe(jax.checkpoint(fn))),
        jax.grad(in_scan),
        jax.grad(batched),
        lambda x: jax.vmap(jax.grad(safe))(jnp.stack([x, x]))[1],
        lambda x: jax.grad(lambda x: jnp.mean(jax.vmap(safe)(jnp.stack([x, x]))))(x),
    ]
    for grad in jax.jit(lambda x: [mode(x) for mode in modes])(x):
        check(grad, case, 1)


@pytest.mark.parametrize(
    ("fn", "x", "expected"),
    [
        (jnp.sqrt, 0.0, INF),
        (lambda x: jnp.arctan2(x, x), 0.0, NAN),
        (lambda x: jnp.sqrt(x) ** 2, 0.0, NAN),
        (lambda x: x / (1 + jnp.sqrt(x)), 0.0, NAN),
        (lambda x: jnp.linalg.norm(x * jnp.ones(2)), 0.0, NAN),
        (lambda x: jnp.where(x > 0, 1.0, 1.0) * 0 * jnp.sqrt(x), 0.0, NAN),
        (lambda x: jnp.where(x >= 0, jnp.sqrt(x), 0.0), 0.0, INF),
        (lambda x: jnp.maximum(jnp.sqrt(x), 0.0), 0.0, INF),  # a tie: both are taken
        (lambda x: jnp.maximum(jnp.log(x - 1), 0.0) * jnp.sqrt(x), 0.0, NAN),
    ],
)
def test_what_is_undefined_stays_so(fn, x, expected):
    for of in (jax.grad, jax.jacfwd):
        got, plain = of(eqg.zero_safe(fn))(x), of(fn)(x)
        np.testing.assert_array_equal(got, plain)
        if not (jnp.isnan(got) and jnp.isnan(expected)):
            assert jnp.isnan(plain) or got == expected


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_scalar_with_factors_that_are_dead(around):
    """What is not finite does not depend on the scalar, whose cotangent is a sum over it."""
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
    """It is equal to none of its elements, by the number of which JAX divides."""

    def loss(w, a):
        rows = jnp.stack([w * (a / a), w**2 * jnp.ones_like(a)], 1)
        return jnp.sum(jnp.where(a > 0, take(rows, axis=1), 0.0))

    w, a = jnp.array(0.5), jnp.array([1.0, 0.0])
    assert jnp.isnan(jax.grad(loss)(w, a))
    assert_close(jax.grad(eqg.zero_safe(loss))(w, a), jax.grad(loss)(w, a[:1]))


def _healthy():
    key = jax.random.key(0)
    x = jax.random.normal(key, (5, 4))
    mlp = eqx.nn.MLP(4, 3, 8, 2, activation=jax.nn.relu, key=key)
    cell = eqx.nn.GRUCell(4, 4, key=key)
    gru = lambda cell, x: jax.lax.scan(lambda h, x: (cell(x, h), h), x[0], x)[1]
    masked = lambda y: jnp.sum(jnp.where(y > 0, jnp.log(jnp.abs(y) + 0.1), jnp.exp(y)))
    steps = lambda w, x: jax.lax.scan(
        lambda h, x: (jnp.where(h > x, jnp.sqrt(h * h + 1), w * h), h), x[0], x
    )[1]
    return {
        "mlp": (lambda mlp: masked(jax.vmap(mlp)(x)), mlp),
        "softmax": (lambda mlp: jnp.sum(jax.nn.log_softmax(jax.vmap(mlp)(x))[:, 0]), mlp),
        "gru": (lambda cell: masked(gru(cell, x)), cell),
        "scan": (lambda w: masked(steps(w, x)), jnp.array(0.7)),
        "max": (lambda w: jnp.max(jnp.sqrt(w**2 + x**2)), jnp.array(0.7)),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", _healthy())
def test_no_bit_is_changed_where_nothing_is_dead(name):
    loss, model = _healthy()[name]
    value, grad = eqx.filter_value_and_grad(loss)(model)
    safe_value, safe_grad = eqx.filter_value_and_grad(eqg.zero_safe(loss))(model)
    assert value == safe_value
    for a, b in zip(*map(jax.tree.leaves, (grad, safe_grad)), strict=True):
        np.testing.assert_array_equal(a, b)


# True but for the first element, which only the values tell: `x` is at least one.
FALSE_AT_FIRST = {
    "index out of bounds": lambda x: jnp.take(x, jnp.array([7, 0, 1])) > 0.5,
    "filled with zero": lambda x: x.at[jnp.array([7, 0, 1])].get(mode="fill", fill_value=0) > 0,
    "order": lambda x: jnp.argsort(x) > 0,
    "order of integers": lambda x: jax.lax.top_k(jnp.array([6, 5, 4]), 3)[1] > 0,
    "places": lambda x: jax.lax.top_k(9 - x, 3)[1] > 0,
    "to integers": lambda x: (x - 0.5).astype(jnp.int32) > 0,
    "wrapped integers": lambda x: jnp.array([200, 1, 1]).astype(jnp.int8) > 0,
    "to half precision": lambda x: (TINY * x).astype(jnp.float16) > 0,
    "rounded": lambda x: (1 + SMALL * x).astype(jnp.bfloat16) > 1,
    "underflow": lambda x: (FAINT * x) * (FAINT * x) > 0,
    "exchanged bounds": lambda x: (
        jax.lax.clamp(5 * jnp.ones(3), x, jnp.array([0.0, 1, 2])) > 0.5
    ),
}
SMALL, TINY, FAINT = (jnp.array([x, 1.0, 1.0]) for x in (1e-4, 1e-15, 1e-30))


@pytest.mark.parametrize("case", FALSE_AT_FIRST)
def test_a_choice_that_is_not_decided_by_ranges(case):
    """What is not taken has no derivative, even if the bounds of exact arithmetic decide."""
    at_least_one = lambda x: jnp.clip(x, 1.0, 3.0)

    def choose(x, y, z):
        return jnp.where(FALSE_AT_FIRST[case](at_least_one(x)), jnp.sqrt(y), z)

    x, y, z = jnp.array([1.0, 2.5, 2.9]), jnp.array([0.0, 1.0, 4.0]), jnp.ones(3)
    assert FALSE_AT_FIRST[case](at_least_one(x)).tolist() == [False, True, True]
    safe = eqg.zero_safe(choose)
    got = jax.jit(jax.grad(lambda *a: jnp.sum(safe(*a)), (0, 1, 2)))(x, y, z)
    assert_close(got, (jnp.zeros(3), jnp.array([0, 0.5, 0.25]), jnp.array([1.0, 0, 0])))


def test_a_factor_of_what_is_filled_with_nan():
    index, weight = jnp.array([0, -100, 2]), jnp.array([1.0, 2.0, 3.0])

    def loss(x, weight):
        terms = jnp.take(x, index) * weight
        return jnp.sum(jnp.where(index >= 0, terms, 0.0))

    x = jnp.array([0.5, 1.0, 2.0])
    got = jax.grad(eqg.zero_safe(loss), (0, 1))(x, weight)
    assert_close(got, (jnp.array([1.0, 0, 3]), jnp.array([0.5, 0, 2])))


def test_modules_keywords_and_static_leaves():
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        name: str

        def __call__(self, x, *, scale):
            y = self.linear(x)
            return {"y": scale * jnp.where(y > 0, jnp.sqrt(y), 0.0), "name": self.name, "n": 3}

    linear = eqx.nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))
    model = eqg.zero_safe(Model(eqx.tree_at(lambda m: m.weight, linear, jnp.eye(2)), "m"))
    x = jnp.array([0.0, 4.0])
    out = model(x, scale=2.0)
    assert out["name"] == "m"
    assert out["n"] == 3
    grad = eqx.filter_grad(lambda model: jnp.sum(model(x, scale=2.0)["y"]))(model)
    np.testing.assert_array_equal(jax.tree.leaves(grad)[0], jnp.array([[0.0, 0.0], [0.0, 2.0]]))


def test_methods():
    class Model(eqx.Module):
        weight: jax.Array

        @eqg.zero_safe
        def root(self, x):
            return jnp.where(x > 0, jnp.sqrt(x) * self.weight, self.weight)

    assert jax.grad(lambda w: Model(w).root(jnp.array(0.0)))(3.0) == 1.0


@pytest.mark.thorough
@pytest.mark.parametrize("jit", [False, True])
def test_closed_over_tracers_are_differentiated(jit):
    def loss(w):
        f = eqg.zero_safe(lambda x: jnp.where(x > 0, jnp.sqrt(x) * w, w * 3))
        step = lambda c, u: (jnp.where(u, jnp.sqrt(c) * w, c * w), None)
        g = eqg.zero_safe(lambda x: jax.lax.scan(step, x, jnp.array([True, False]))[0])
        stacked = lambda x: jnp.sum(jnp.sqrt(jnp.where(x > 0, jnp.stack([x, w]), 0.0)))
        return (
            f(jnp.array(4.0))
            + f(jnp.array(0.0))
            + g(jnp.array(4.0))
            + eqg.zero_safe(stacked)(jnp.array(1.0))
        )

    grad = jax.grad(loss)
    grad = jax.jit(grad) if jit else grad
    assert_close(grad(4.0), jnp.array(2.0 + 3.0 + 2 * 2 * 4.0 + 0.25))
    assert_close(jax.jvp(loss, (4.0,), (1.0,))[1], jnp.array(21.25))


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


def test_a_rule_that_mixes_is_dropped_as_a_whole():
    @jax.custom_vjp
    def norm(x):
        return jnp.sqrt(jnp.sum(x**2))

    norm.defvjp(lambda x: (norm(x), x), lambda x, ct: (ct * x / norm(x),))
    x = jnp.zeros(2)
    dead = eqg.zero_safe(lambda x: jnp.where(jnp.any(x > 0), norm(x), 0.0))
    np.testing.assert_array_equal(jax.grad(dead)(x), jnp.zeros(2))
    assert jnp.all(jnp.isnan(jax.grad(eqg.zero_safe(norm))(x)))


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


@pytest.mark.parametrize(
    ("fn", "x", "expected"),
    [
        (jnp.linalg.norm, jnp.zeros(2), 0.0),
        (lambda x: jnp.linalg.norm(x) ** 2, jnp.zeros(2), 0.0),
        (lambda x: jnp.sqrt(x @ x), jnp.zeros(2), 0.0),
        (jnp.std, jnp.ones(3), 0.0),
        (jax.scipy.special.logsumexp, jnp.full(2, -INF), 0.0),
        (lambda x: jnp.sqrt(x) ** 2, jnp.array(0.0), 0.0),  # where it is wrong: this is 1
        (lambda x: x / (1 + jnp.sqrt(x)), jnp.array(0.0), 1.0),
        (jnp.sqrt, jnp.array(0.0), INF),
        (lambda x: jnp.arctan2(x, x), jnp.array(0.0), NAN),
        (
            lambda x: jax.lax.scan(lambda c, _: (jnp.sqrt(c) ** 2, None), x, None, length=2)[0],
            jnp.array(0.0),
            0.0,
        ),
    ],
)
def test_policy_zero(fn, x, expected):
    safe = eqg.zero_safe(fn, policy="zero")
    np.testing.assert_array_equal(jax.grad(safe)(x), jnp.full_like(x, expected))
    if jnp.isfinite(expected):
        np.testing.assert_array_equal(jax.jacfwd(safe)(x), jnp.full_like(x, expected))


_X = jnp.array([1.0, -2.0, 0.5, 3.0])
_Z = jax.lax.complex(_X, jnp.array([0.3, 0.7, -1.0, 0.2]))
_OF_COMPLEX = {
    "abs": jnp.abs,
    "real": jnp.real,
    "imag": jnp.imag,
    "conj": lambda z: jnp.imag(jnp.conj(z)),
    "angle": jnp.angle,
    "sign": lambda z: jnp.imag(jnp.sign(z)),
    "fft": lambda z: jnp.abs(jnp.fft.fft(z)),
    "irfft": jnp.fft.irfft,
    "rfft": lambda z: jnp.abs(jnp.fft.rfft(jnp.real(z))),
    "norm": jnp.linalg.norm,
    "square": lambda z: jnp.abs(z) ** 2,
    "sqrt": lambda z: jnp.real(jnp.sqrt(z)),
}


@pytest.mark.thorough
@pytest.mark.every(4)
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


@pytest.mark.parametrize("name", _healthy())
def test_policy_zero_on_healthy_programs(name):
    loss, model = _healthy()[name]
    grad = eqx.filter_grad(loss)(model)
    safe_grad = eqx.filter_grad(eqg.zero_safe(loss, policy="zero"))(model)
    assert_close(safe_grad, grad, eps=100)


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


def test_what_another_example_takes_is_kept():
    def loss(x):
        total = jax.lax.psum(jnp.sqrt(x), "batch")
        return jnp.where(x > 2, total, x)

    def mean(fn, x):
        return jnp.sum(jax.vmap(fn, axis_name="batch")(x))

    x = jnp.array([1.0, 4.0])
    grad = jax.grad(lambda x: mean(loss, x))(x)
    np.testing.assert_array_equal(jax.grad(lambda x: mean(eqg.zero_safe(loss), x))(x), grad)


@pytest.mark.slow
def test_strict_promotion():
    def loss(w, x):
        h = jnp.where(x > 0, jnp.sqrt(x), 0.0) @ jnp.where(w > 0, jnp.log(w), 0.0)
        step = lambda h, u: (jnp.where(u > 0, jnp.sqrt(h * h + 1), u * h), jnp.maximum(u, 1.0))
        h, _ = jax.lax.scan(step, h, jnp.arange(3.0) - 1)
        return jax.lax.cond(x[0] > 0, lambda h: jnp.sum(jnp.sqrt(h)), lambda h: jnp.sum(h), h)

    w, x = jnp.array([[0.0, 2.0], [1.0, 3.0]]), jnp.array([0.0, 4.0])
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for policy in ("selected", "zero"):
            safe = eqg.zero_safe(loss, policy=policy)
            assert all(jnp.all(jnp.isfinite(g)) for g in jax.grad(safe, (0, 1))(w, x))


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


@pytest.mark.slow
def test_diffrax_keeps_its_bits():
    """Where nothing is dead, `zero_safe` changes no bit of a compiled gradient."""
    dfx = pytest.importorskip("diffrax")
    skip_without_checkpointed_loops()
    field = eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=jax.random.key(0))

    def loss(field, y):
        term = dfx.ODETerm(lambda t, y, field: field(y))
        solution = dfx.diffeqsolve(
            term, dfx.Tsit5(), 0.0, 1.0, 0.1, y, args=field, max_steps=32
        )
        return jnp.sum(solution.ys**2)

    gradient = lambda loss: eqx.filter_jit(eqx.filter_grad(loss))(field, jnp.array([0.5, -0.3]))
    pairs = zip(
        *map(jax.tree.leaves, (gradient(eqg.zero_safe(loss)), gradient(loss))), strict=True
    )
    for safe, plain in pairs:
        np.testing.assert_array_equal(safe, plain)


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


def test_a_backward_rule_that_calls_an_elementwise_function_of_this_library():
    """What a `jax.custom_vjp` computes is dropped element by element only if its backward rule
    is seen to be elementwise. An undecorated `half` is the witness."""
    fns = [lambda x: 0.5 * x, eqg.elementwise(lambda x: 0.5 * x, lambda out, x: 0.5)]
    for half in fns:
        f = jax.custom_vjp(jnp.sqrt)
        f.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, ct, half=half: (half(ct / jnp.sqrt(x)),))
        loss = lambda x, f=f: jnp.sum(jnp.where(x > 0, f(x), 0.0))
        gradient = jax.grad(eqg.zero_safe(loss))(jnp.array([0.0, 4.0]))
        np.testing.assert_array_equal(gradient, [0.0, 0.25])


def test_values_behind_a_barrier_keep_their_own_ranges():
    """The first value is never small, the second one may be zero."""

    def loss(x):
        _, x = jax.lax.optimization_barrier((x**2 + 1.0, x))
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))

    gradient = jax.grad(eqg.zero_safe(loss))(jnp.array([0.0, 4.0]))
    np.testing.assert_array_equal(gradient, [0.0, 0.25])


def test_a_complex_sign_has_no_infinite_factor():
    """JAX knows that its derivative is zero, even though its value divides by `abs(x)`."""
    x = jnp.array([0.0, 4.0])
    loss = lambda x: jnp.sum(jnp.abs(jnp.sign(x + 0j).real) * x)
    np.testing.assert_array_equal(jax.grad(eqg.zero_safe(loss))(x), jax.grad(loss)(x))


def test_a_convolution_before_a_root_costs_nothing_more():
    """A convolution does not use all elements, and multiplies no cotangent by zero."""
    kernel = jnp.ones(3)
    loss = lambda x: jnp.sum(jnp.sqrt(jnp.convolve(x, kernel, "valid")[::2]))
    n_products = lambda fn: str(jax.make_jaxpr(jax.grad(fn))(jnp.ones(9))).count("conv_general")
    assert n_products(eqg.zero_safe(loss)) == n_products(loss)
