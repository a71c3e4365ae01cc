"""`eqg.zero_safe` of programs of users, against the branch that is taken, in high precision.
More functions, and what is kept, are in `tests/guard/test_zero_terms.py`."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import optax
import pytest

from .helpers import assert_close, skip_without_checkpointed_loops


where, sqrt, log = jnp.where, jnp.sqrt, jnp.log


@pytest.fixture(autouse=True)
def _mixed_promotion():
    """The cases are what users write."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


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


def _masked_labels(x):
    logits = jnp.stack([jnp.stack([x, 1 + 0 * x]), jnp.stack([-jnp.inf + 0 * x, x - jnp.inf])])
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.array([0, 0]))
    return jnp.sum(where(jnp.array([True, False]), losses, 0.0))


def _steep_segment_max(x):
    """The cotangent of what is not taken is infinite as well."""
    largest = jax.ops.segment_max(jnp.stack([x, x - 1]), jnp.array([0, 0]), 1)[0]
    return where(x > 0, sqrt(largest), x)


def _scan_of_top_k(x):
    step = lambda h, _: (jax.lax.top_k(sqrt(jnp.stack([x, x + 4])), 1)[0][0], None)
    return jax.lax.scan(step, x, None, length=2)[0]


same, logsumexp = (lambda x: x), jax.scipy.special.logsumexp
# A scalar gets a cotangent from each element, and the second one is dead.
_data = jnp.array([1.0, 0.0])
_of_data = lambda terms: jnp.sum(where(_data > 0, terms, 0.0))
# The function, a point, and what it takes there.
# fmt: off
CASES = {
    "literal": (lambda x: where(x > 0, 0.0, x * jnp.inf), 1.0, lambda x: mpmath.mpf(0)),
    "factor of data": (lambda x: _of_data(x * (x / _data)), 0.5, lambda x: x**2),
    "exponent of data": (lambda x: _of_data(x ** (1 / _data)), 0.5, same),
    "nested where": (lambda x: where(x > 0, where(x > 1, log(x), sqrt(x)), x), 0.0, same),
    "std": (lambda x: where(x > 1, jnp.std(x * jnp.ones(3)), x), 1.0, same),
    "segment_max of -inf": (_steep_segment_max, 0.0, same),
    "scan of top_k": (_scan_of_top_k, 0.0, lambda x: mpmath.sqrt(x + 4)),
    "logsumexp": (lambda x: where(x > 1, logsumexp(x * jnp.full(2, -jnp.inf)), x),
                  1.0, same),
    "logaddexp": (lambda x: where(x > 0, jnp.logaddexp(log(x), -jnp.inf), x), 0.0, same),
    "optax, labels": (_masked_labels, 0.0, lambda x: mpmath.log(1 + mpmath.exp(1 - x))),
    "optax, norm": (lambda x: optax.safe_norm(jnp.stack([x, x]), 1e-3) + x, 0.0,
                    lambda x: 1e-3 + x),
    "MJX, rotation": (lambda x: _quaternion(where(x > 0, x, 0.0) * jnp.ones(3)) + x, -1.0,
                      lambda x: 1 + x),
    "MJX, contact": (_contact, -0.5, lambda x: mpmath.mpf(1)),
}
# fmt: on


@pytest.mark.thorough
def test_derivatives_of_what_is_taken():
    """Both modes, and second order: all cases in one program."""

    def derivatives(fn, x, _):
        safe, x = eqg.zero_safe(fn), jnp.asarray(x)
        gradient = jax.grad(safe)
        forward = jax.jvp(safe, (x,), (x * 0 + 1,))[1]
        return gradient(x), forward, jax.jacfwd(gradient)(x), jax.grad(gradient)(x)

    found = jax.jit(lambda: [derivatives(*case) for case in CASES.values()])()
    for (name, (_, x, truth)), got in zip(CASES.items(), found, strict=True):
        with mpmath.workdps(40):
            first, second = (float(mpmath.diff(truth, x, n)) for n in (1, 2))
        want = [first, first, second, second]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=name)


def test_factors_that_are_dead():
    """The cotangent of a scalar is a sum over the part that is not finite."""
    loss = lambda w, x, a: jnp.sum(jnp.where(a > 0, jnp.sin(w) * (x / a), 0.0))
    w, x, a = jnp.array(0.5), jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0])
    assert jnp.isnan(jax.grad(loss)(w, x, a))
    for around in (lambda f: f, jax.jit, jax.checkpoint):
        safe = eqg.zero_safe(around(loss))
        assert_close(jax.grad(safe)(w, x, a), jnp.cos(w))
        assert_close(jax.grad(jax.grad(safe))(w, x, a), -jnp.sin(w))


root = jax.custom_vjp(lambda x: jnp.sqrt(x))
root.defvjp(lambda x: (root(x), x), lambda x, ct: (7 * ct / jnp.sqrt(x),))
our_root = eqg.custom_vjp(lambda x: jnp.sqrt(x))
our_root.def_fwd(lambda x: (our_root(x), x))
our_root.def_bwd(lambda x, ct: (7 * ct / jnp.sqrt(x),))
plain_root = jax.custom_jvp(lambda x: jnp.sqrt(x))
plain_root.defjvp(lambda p, t: (plain_root(*p), 7 * t[0] / jnp.sqrt(p[0])))
_our_half = eqg.elementwise(lambda x: 0.5 * x, lambda out, x: 0.5)
_half_in_reverse = eqg.custom_vjp(lambda x: 0.5 * x)
_half_in_reverse.def_fwd(lambda x: (0.5 * x, None))
_half_in_reverse.def_bwd(lambda _, ct: (0.5 * ct,))
HALVES = [_our_half, _half_in_reverse, jax.checkpoint(_our_half)]
HALVES += [lambda x: jax.vmap(_our_half)(x)]


def test_rules_are_kept_and_masked():
    """Also a backward rule that calls an elementwise function with a rule."""
    if getattr(jax.config, "jax_custom_vjp3", False):
        pytest.skip("an opaque primitive, whose rule JAX does not show")
    rules = [(root, 3.5), (our_root, 3.5), (plain_root, 3.5)]
    for half in HALVES:
        f = jax.custom_vjp(jnp.sqrt)
        f.defvjp(lambda x: (jnp.sqrt(x), x), lambda x, ct, half=half: (half(ct / jnp.sqrt(x)),))
        rules.append((f, 0.25))
    for fn, slope in rules:
        loss = eqg.zero_safe(lambda x, fn=fn: jnp.sum(jnp.where(x > 0, fn(x), 0.0)))
        np.testing.assert_array_equal(jax.grad(loss)(jnp.array([0.0, 4.0])), [0.0, slope])


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


X = jnp.array([1.0, -2.0, 0.5, 3.0])
Z = jax.lax.complex(X, jnp.array([0.3, 0.7, -1.0, 0.2]))
OF_COMPLEX = {
    "angle": jnp.angle,
    "sign": lambda z: jnp.imag(jnp.sign(z)),
    "fft": lambda z: jnp.abs(jnp.fft.fft(z)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["selected", "zero"])
@pytest.mark.parametrize("name", OF_COMPLEX)
def test_between_real_and_complex(name, policy):
    loss = lambda z: jnp.sum(OF_COMPLEX[name](z))
    of_real = lambda loss: lambda x: loss(jax.lax.complex(x, x**2))

    def all_of(loss):
        forward = jax.jvp(loss, (Z,), (jnp.conj(Z),))[1]
        return jax.grad(loss)(Z), forward, jax.hessian(of_real(loss))(X)

    assert_close(all_of(eqg.zero_safe(loss, policy=policy)), all_of(loss), eps=1000)


def test_policy_zero_at_a_complex_zero():
    loss = lambda z: jnp.sum(jnp.sqrt(jnp.abs(z)))
    z, slope = jnp.array([0j, 3 + 4j]), 0.5 / np.sqrt(5)
    safe = eqg.zero_safe(loss, policy="zero")
    assert_close(jax.grad(safe)(z), jnp.array([0, slope * (0.6 - 0.8j)]))
    assert_close(jax.jvp(safe, (z,), (jnp.array([0j, 1 + 1j]),))[1], jnp.asarray(1.4 * slope))
    (record,) = eqg.explain_nan(loss, z).found
    assert (record.kind, record.primitive) == ("true singularity", "sqrt")
    with pytest.raises(eqg.RuleError, match="policy"):
        eqg.zero_safe(jnp.sqrt, policy="none")


def test_values_are_those_of_the_compiled_function():
    inner = jax.jit(lambda x: jnp.where(x > 0, jnp.sqrt(x) * 1.1 + x * x * 0.3, x))
    x, plain = jax.random.normal(jax.random.key(0), (64, 32)), lambda x: 0.7 * inner(x)
    for policy in ("selected", "zero"):
        got = jax.jit(eqg.zero_safe(plain, policy=policy))(x)
        np.testing.assert_array_equal(got, jax.jit(plain)(x))


ENDS = {
    "arccos": (lambda x: jnp.arccos(jnp.clip(x, -1, 1)), 1.0),
    "arcsin": (lambda x: jnp.arcsin(jnp.clip(x, -1, 1)), -1.0),
    "arccosh": (lambda x: jnp.arccosh(jnp.maximum(2 - x, 1)), 1.0),
    "log1p": (lambda x: jnp.log1p(jnp.maximum(-x, -1)), 1.0),
}


@pytest.mark.parametrize("name", ENDS)
def test_at_the_end_of_a_closed_domain(name):
    """In double precision, one minus the smallest step that matters is one."""
    fn, end = ENDS[name]
    with jax.enable_x64(True):
        x = jnp.array(end)
        loss = lambda x: jnp.where(x != end, fn(x), 0 * x)
        assert not np.isfinite(jax.grad(loss)(x))
        assert jax.grad(eqg.zero_safe(loss))(x) == 0
        inside = jnp.array(0.5 * end)
        assert jax.grad(eqg.zero_safe(loss))(inside) == jax.grad(fn)(inside)


def test_values_after_a_barrier_keep_their_own_ranges():
    """The first value is never small, the second one may be zero. And the factor of a scatter
    may be a number."""

    def loss(x):
        _, x = jax.lax.optimization_barrier((x**2 + 1.0, x))
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))

    x = jnp.array([0.0, 4.0])
    np.testing.assert_array_equal(jax.grad(eqg.zero_safe(loss))(x), [0.0, 0.25])
    scaled = lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0).at[1].multiply(3.0).sum()
    np.testing.assert_array_equal(jax.grad(eqg.zero_safe(scaled))(x), [0.0, 0.75])


def test_options_of_scans_and_checkpoints_are_kept():
    everything = jax.checkpoint_policies.everything_saveable
    body = lambda c, x: (jnp.sin(c) * x, None)
    body = jax.checkpoint(body, policy=everything, prevent_cse=False)
    f = lambda x: jax.lax.scan(body, 1.0, x, reverse=True, unroll=3)[0]
    for policy in ("selected", "zero"):
        text = str(jax.make_jaxpr(eqg.zero_safe(f, policy=policy))(jnp.ones(3)))
        for option in ("reverse=True", "unroll=3", "everything_saveable", "prevent_cse=False"):
            assert option in text


# ---------------------------------------------------------------- cost


def test_the_size_of_the_program():
    """Linear in the length of the function. A convolution does not use all elements, and
    multiplies no cotangent by zero."""

    def long(steps, x):
        for _ in range(steps):
            x = jnp.where(x > 0, jnp.sqrt(x) * 1.01, x) + jnp.sin(x)
        return jnp.sum(x)

    size = lambda n: len(jax.make_jaxpr(eqg.zero_safe(lambda x: long(n, x)))(jnp.ones(3)).eqns)
    assert size(20) - size(10) == 2 * (size(10) - size(5))
    loss = lambda x: jnp.sum(jnp.sqrt(jnp.convolve(x, jnp.ones(3), "valid")[::2]))
    n_products = lambda fn: str(jax.make_jaxpr(jax.grad(fn))(jnp.ones(9))).count("conv_general")
    assert n_products(eqg.zero_safe(loss)) == n_products(loss)


KEY, NORM, BATCH = jax.random.key(0), eqx.nn.LayerNorm(32), np.ones((32, 32), "float32")
_mlp = lambda activation: lambda: eqx.nn.MLP(32, 8, 64, 2, activation=activation, key=KEY)


def _cross_entropy(model):
    return -jnp.mean(jax.nn.log_softmax(jax.vmap(model)(BATCH))[:, 0])


def _gru(cell):
    h, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(32), BATCH)
    return jnp.mean(h**2)


HEALTHY = {
    "softplus": (_cross_entropy, _mlp(jax.nn.softplus)),
    "gelu": (_cross_entropy, _mlp(jax.nn.gelu)),
    "maximum": (_cross_entropy, _mlp(lambda x: jnp.maximum(x, 0.0))),
    "LayerNorm": (_cross_entropy, lambda: eqx.nn.Sequential([NORM, _mlp(jax.nn.relu)()])),
    "gru": (_gru, lambda: eqx.nn.GRUCell(32, 32, key=KEY)),
}


@pytest.mark.cost
@pytest.mark.parametrize("name", HEALTHY)
def test_it_costs_nothing_where_nothing_can_be_dead(name):
    loss, make = HEALTHY[name]
    arrays, static = eqx.partition(make(), eqx.is_array)
    flat = lambda arrays: loss(eqx.combine(arrays, static))

    def costs(fn):
        analysis = jax.jit(jax.grad(fn)).lower(arrays).compile().cost_analysis()
        return analysis["flops"], analysis["bytes accessed"]

    plain, safe = costs(flat), costs(eqg.zero_safe(flat))
    assert all(b <= 1.05 * a for a, b in zip(plain, safe, strict=True)), (plain, safe)


# ---------------------------------------------------------------- other libraries


@pytest.mark.slow
def test_diffrax():
    diffrax = pytest.importorskip("diffrax")
    skip_without_checkpointed_loops()
    # The solver's own backward pass is a rule: it is the vector field that is made safe.
    field = eqg.zero_safe(lambda t, y, args: jnp.where(y > 0, -jnp.sqrt(y), 0.0))

    def end(y):
        term, euler = diffrax.ODETerm(field), diffrax.Euler()
        return diffrax.diffeqsolve(term, euler, 0.0, 1.0, 0.25, y, max_steps=8).ys[0]

    assert jax.grad(end)(jnp.array(0.0)) == 1.0


def test_flowjax():
    flows = pytest.importorskip("flowjax.distributions")
    log_prob = lambda x: flows.LogNormal(0.0, 1.0).log_prob(x)
    loss = lambda x: jnp.sum(jnp.where(x > 0, jax.vmap(log_prob)(x), 0.0))
    x = jnp.array([0.0, 1.0])
    np.testing.assert_allclose(jax.grad(eqg.zero_safe(loss))(x), [0.0, -1.0], rtol=1e-5)
