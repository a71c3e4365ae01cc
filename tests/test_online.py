"""`filter_scan(online=...)`: against backpropagation through time; e-prop's published form."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from .helpers import temp_bytes


IN, HIDDEN, STEPS = 3, 4, 12
XS = jr.normal(jr.key(1), (STEPS, IN))
LINEAR = eqx.nn.Linear(IN, HIDDEN, key=jr.key(2))


def assert_same(got, expected, tolerance):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        error = jnp.max(jnp.abs(a.astype(b.dtype) - b), initial=0)
        scale = 1 + jnp.max(jnp.abs(b), initial=0)
        assert error <= tolerance * scale, (jax.tree_util.keystr(path), error)


def test_without_inputs():
    step = lambda h, _: (jnp.sin(h), h)
    loss = lambda scan: lambda h: sum(map(jnp.sum, scan(step, h, None, length=6)))
    h = jnp.array([0.5, 2.0])
    for online in (True, "e-prop"):
        ours = loss(ft.partial(eqg.filter_scan, online=online))
        for derivative in (jax.grad, jax.jacfwd):
            assert_same(derivative(ours)(h), jax.grad(loss(jax.lax.scan))(h), 1e-6)


@pytest.mark.cost
def test_memory_does_not_grow():
    """But for the inputs and the loss of each step, which are the caller's."""

    def of(steps):
        def total(w, xs):
            step = lambda h, x: (jnp.tanh(w * h + x), jnp.sum(h**2))
            return jnp.sum(eqg.filter_scan(step, jnp.zeros(IN), xs, online=True)[1])

        return temp_bytes(jax.grad(total), jnp.ones(IN), jnp.zeros((steps, IN)))

    # A number per step: the loss, and its cotangent.
    assert of(100_000) - of(1000) <= 99_000 * 2 * 4


# ---------------------------------------------------------------- e-prop


def test_eprop_against_the_published_formulas():
    """Equations 23 to 25 of Bellec et al. (2020), https://doi.org/10.1038/s41467-020-17236-y,
    for adaptive neurons, one step after another in NumPy. `z` are spikes, `psi` the
    pseudo-derivative, `alpha` and `rho` the decay factors, `beta` the strength."""
    alpha, rho, beta = 0.9, 0.95, 0.3
    cell = eqg.nn.LIFCell(HIDDEN, alpha, rho=rho, strength=beta, recurrent=True, key=jr.key(0))
    signals = jr.normal(jr.key(9), (STEPS, HIDDEN))

    def weighted_spikes(cell):
        step = lambda h, x: (lambda h: (h, h.spikes))(cell(LINEAR(3 * x), h))
        _, spikes = eqg.filter_scan(step, cell.initial_state(), XS, online="e-prop")
        return jnp.sum(spikes * signals), spikes

    (_, spikes), got = eqx.filter_value_and_grad(weighted_spikes, has_aux=True)(cell)
    assert 5 < np.sum(spikes) < 40

    weight_in, bias = np.asarray(LINEAR.weight), np.asarray(LINEAR.bias)
    recurrent = np.asarray(cell.weight_hh)
    v, a, z = np.zeros(HIDDEN), np.zeros(HIDDEN), np.zeros(HIDDEN)
    epsilon_v = np.zeros((HIDDEN, HIDDEN))  # one row: equal for all neurons after a synapse
    epsilon_a = np.zeros((HIDDEN, HIDDEN))
    psi = np.zeros(HIDDEN)
    total = np.zeros((HIDDEN, HIDDEN))
    for x, signal, observed in zip(np.asarray(XS), np.asarray(signals), spikes, strict=True):
        # epsilon_a has the pseudo-derivative, and epsilon_v, of the step before.
        epsilon_a = psi[:, None] * epsilon_v + (rho - psi * beta)[:, None] * epsilon_a
        epsilon_v = alpha * epsilon_v + z[None, :]
        a = rho * a + z
        v = alpha * v + recurrent @ z + weight_in @ (3 * x) + bias - z
        u = v - 1 - beta * a
        z = (u > 0).astype(float)
        assert np.array_equal(z, observed)
        psi = 1 / (1 + (np.pi * u) ** 2)  # the derivative of `surrogates.atan()`
        total += signal[:, None] * psi[:, None] * (epsilon_v - beta * epsilon_a)
    assert np.allclose(got.weight_hh, total, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- rules in a step


def _ours(fn, bwd):
    rule = eqg.custom_vjp(fn)
    rule.def_fwd(lambda x: (rule(x), x))
    rule.def_bwd(lambda x, ct: (bwd(x, ct),))
    return rule


def _of_jax(fn, bwd):
    rule = jax.custom_vjp(fn)
    rule.defvjp(lambda x: (rule(x), x), lambda x, ct: (bwd(x, ct),))
    return rule


_SPIKE = lambda v: (v > 0).astype(v.dtype), lambda v, ct: ct / (1 + jnp.abs(v)) ** 2
_spike, _jax_spike = (f(*_SPIKE) for f in (_ours, _of_jax))
_CLIP = lambda x: x, lambda _, ct: jnp.clip(ct, -0.1, 0.1)
_jax_clip = _of_jax(*_CLIP)


@eqg.custom_vjp
def _product(w, x):
    return w @ x, w[0] + x


@_product.def_fwd
def _product_fwd(w, x):
    return _product(w, x), (w, x)


@_product.def_bwd
def _product_bwd(residuals, cts):
    """Not the derivative: both terms have other factors."""
    (w, x), (ct, ct_sum) = residuals, cts
    first = jnp.array([0.7, 0.0, 0.0])
    return 0.5 * jnp.outer(ct, x) + jnp.outer(first, ct_sum), 0.3 * w.T @ ct + ct_sum


def _spiking(spike):
    def step(w, h, x):
        h = 0.7 * h + w * x - 0.6 * spike(h - 0.1)
        return h, spike(h - 0.2) + h

    return step


def _same(fn):
    """A step whose output is its next carry."""

    def step(w, h, x):
        h = fn(w, h, x)
        return h, h

    return step


def _clip(x):
    return eqg.clip_gradient(x, -0.1, 0.1)


RULES = {
    "custom_vjp": _spiking(_spike),
    "jax.custom_vjp": _spiking(_jax_spike),
    "scale": _same(lambda w, h, x: jnp.sin(eqg.scale_gradient(h, 0.5) * w) + x),
    "two outputs": _same(lambda w, h, x: sum(_product(jnp.outer(w, w), x)) + w * h),
    "clipped output": lambda w, h, x: (0.5 * h + w * x, _clip(w * h**2)),
}


def _loss_of_rules(step, online: bool | str | None = True):
    xs = jnp.outer(jnp.linspace(0.1, 0.9, 5), jnp.array([1.0, -0.6, 0.4]))

    def loss(args):
        w, h = args
        scan = ft.partial(eqg.filter_scan, online=online) if online else jax.lax.scan
        h, ys = scan(lambda h, x: step(w, h, x), h, xs)
        return jnp.sum(jnp.sin(h)) + jnp.sum(jnp.cos(ys) * xs)

    return loss


def _args_of_rules():
    return jnp.array([0.8, -0.3, 0.5]), jnp.array([0.2, 0.1, -0.4])


@pytest.mark.thorough
@pytest.mark.parametrize("name", RULES)
def test_rules_in_a_step(name):
    """As in backpropagation through time, where a rule is not the derivative of its value."""
    weights = lambda tree: sum(jnp.sum(jnp.sin(x)) for x in tree)
    with jax.enable_x64(True):
        args = _args_of_rules()

        def derivatives(online):
            gradient = jax.grad(_loss_of_rules(RULES[name], online))
            if online == "e-prop":
                return [gradient(args)]
            return [gradient(args), jax.grad(lambda a: weights(gradient(a)))(args)]

        got, expected = (jax.jit(lambda o=o: derivatives(o))() for o in (True, None))
        assert_same(got, expected, 1e-12)
        if name.endswith("custom_vjp"):  # elementwise, so nothing is dropped
            assert_same(derivatives("e-prop"), expected[:1], 1e-12)


@pytest.mark.parametrize("online", [True, "e-prop"])
def test_forward_mode_past_a_rule_for_reverse_mode(online):
    """A `jax.custom_vjp` of what has no tangent."""
    with jax.enable_x64(True):
        w, h = _args_of_rules()
        step = _same(lambda w, h, x: jnp.sin(h) * w + _jax_spike(w) * x)
        of_carry = lambda online: lambda h: _loss_of_rules(step, online)((w, h))
        for derivative in (jax.jacfwd, jax.hessian):
            got, plain = (derivative(of_carry(o))(h) for o in (online, None))
            assert_same(got, plain, 1e-12)


def test_traces_of_half_precision_are_summed_in_single_precision():
    zero, xs = jnp.bfloat16(0), jnp.ones(600, "bfloat16")
    last = lambda w: eqg.filter_scan(lambda h, x: (h + w * x, None), zero, xs, online=True)[0]
    assert jax.grad(lambda w: last(w).astype("float32"))(jnp.bfloat16(1)) == 600


# ---------------------------------------------------------------- layouts


def test_symbolic_shapes():
    def gradient(w, xs):
        run = lambda w: eqg.filter_scan(
            lambda h, x: (0.5 * h + w * x, h), 0 * xs[0], xs, online=True
        )
        return jax.grad(lambda w: jnp.sum(run(w)[1]))(w)

    (n,) = jax.export.symbolic_shape("n")
    types = jax.ShapeDtypeStruct((), XS.dtype), jax.ShapeDtypeStruct((4, 3, n), XS.dtype)
    with pytest.raises(eqg.RuleError, match="needs sizes that are known"):
        jax.export.export(jax.jit(gradient))(*types)
