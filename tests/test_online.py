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
READOUT = eqx.nn.Linear(HIDDEN, 2, key=jr.key(3))


class Neurons(eqx.Module):
    """Spiking neurons with weights, and a readout of its own in each step."""

    cell: eqx.Module
    linear: eqx.nn.Linear = LINEAR
    readout: eqx.nn.Linear = READOUT

    def __call__(self, state, x):
        state = self.cell(self.linear(3 * x), state)
        return state, self.readout(state.spikes)

    def init(self):
        return self.cell.initial_state()


class OneStep(eqx.Module):
    """A step of a layer over time."""

    layer: eqx.Module

    def __call__(self, state, x):
        ys, state = self.layer(x[None], state)
        return state, ys[0]

    def init(self):
        _, state = jax.eval_shape(self.layer, XS[:1])
        return jnp.full(state.shape, 0.1, state.dtype)


class Decay(eqx.Module):
    """A user's recurrence, with an encoder of two layers and a learned decay."""

    encoder: eqx.nn.MLP
    decay: jax.Array

    def __call__(self, h, x):
        rate = jax.nn.sigmoid(self.decay)
        h = rate * jnp.tanh(h) + (1 - rate) * self.encoder(x)
        return h, {"last": h, "sum": jnp.sum(h**2)}

    def init(self):
        return jnp.full(HIDDEN, 0.1)


MODELS = {
    "LIF": Neurons(eqg.nn.LIFCell(HIDDEN, 0.9, learn=("beta", "threshold"))),
    "LIF, adaptive": Neurons(eqg.nn.LIFCell(HIDDEN, 0.9, rho=0.95, learn=("beta", "rho"))),
    "LRU": OneStep(eqg.nn.LRU(IN, HIDDEN, 5, key=jr.key(4))),
    "MinGRU": OneStep(eqg.nn.MinGRU(IN, HIDDEN, key=jr.key(4))),
    "user's": Decay(eqx.nn.MLP(IN, HIDDEN, 5, 1, jnp.tanh, key=jr.key(5)), jnp.zeros(HIDDEN)),
}


def scan_loss(outputs):
    """A loss in which each element of each output counts."""
    total = 0.0
    for i, y in enumerate(jax.tree.leaves(outputs)):
        y = y.astype(jnp.result_type(float)) if y.dtype == jnp.bfloat16 else y
        weights = jr.normal(jr.key(i), y.shape, jnp.real(y).dtype)
        total += jnp.sum(jnp.sin(weights * jnp.real(y)) + jnp.imag(y) ** 2)
    return total


def loss(model_and_init, xs=XS, **options):
    model, init = model_and_init
    return scan_loss(eqg.filter_scan(lambda h, x: model(h, x), init, xs, **options))


def in_float64(tree):
    def cast(x):
        if not eqx.is_inexact_array(x):
            return x
        return x.astype(jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64)

    return jax.tree.map(cast, tree)


def assert_same(got, expected, tolerance):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        error = jnp.max(jnp.abs(a.astype(b.dtype) - b), initial=0)
        scale = 1 + jnp.max(jnp.abs(b), initial=0)
        assert error <= tolerance * scale, (jax.tree_util.keystr(path), error)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_is_exact(name):
    """To 1e-10 in double precision, in the parameters and in the first carry."""
    reverse = name == "LIF"
    with jax.enable_x64(True):
        model, xs = in_float64((MODELS[name], XS))
        args = in_float64((model, model.init()))
        gradient = lambda **options: eqx.filter_jit(
            eqx.filter_grad(lambda args: loss(args, xs, reverse=reverse, **options))
        )(args)
        assert_same(gradient(online=True), gradient(), 1e-10)


@pytest.mark.parametrize("output", [0, 1], ids=["last", "all"])
@pytest.mark.parametrize("online", [True, "e-prop"])
def test_without_inputs(online, output):
    def loss(scan, h):
        step = lambda h, _: (jnp.sin(h), (h if output else None))
        return jnp.sum(scan(step, h, None, length=6)[output])

    ours = ft.partial(loss, ft.partial(eqg.filter_scan, online=online))
    h, expected = jnp.array([0.5, 2.0]), jax.grad(ft.partial(loss, jax.lax.scan))
    assert_same(jax.grad(ours)(h), expected(h), 1e-6)
    assert_same(jax.jacfwd(ours)(h), expected(h), 1e-6)


@pytest.mark.cost
@pytest.mark.parametrize("name", ["LIF", "LRU"])
def test_memory_does_not_grow(name):
    """But for the inputs and the loss of each step, which are the caller's."""

    def of(steps):
        def total(model, xs):
            def step(h, x):
                h, y = model(h, x)
                return h, jnp.sum(y**2)

            return jnp.sum(eqg.filter_scan(step, model.init(), xs, online=True)[1])

        arrays, static = eqx.partition(MODELS[name], eqx.is_inexact_array)
        gradient = jax.grad(lambda arrays, xs: total(eqx.combine(arrays, static), xs))
        return temp_bytes(gradient, arrays, jnp.zeros((steps, IN)))

    # A number per step: the loss, and its cotangent.
    assert of(100_000) - of(1000) <= 99_000 * 2 * 4


# ---------------------------------------------------------------- e-prop


def weighted_spikes(model, signals, **options):
    """The spikes of each step, multiplied with learning signals."""
    _, spikes = eqg.filter_scan(
        lambda h, x: (lambda h: (h, h.spikes))(model.cell(model.linear(3 * x), h)),
        model.cell.initial_state(),
        XS,
        **options,
    )
    return jnp.sum(spikes * signals), spikes


def test_eprop_against_the_published_formulas():
    """Equations 23 to 25 of Bellec et al. (2020), https://doi.org/10.1038/s41467-020-17236-y,
    for adaptive neurons, one step after another in NumPy. `z` are spikes, `psi` the
    pseudo-derivative, `alpha` and `rho` the decay factors, `beta` the strength."""
    alpha, rho, beta = 0.9, 0.95, 0.3
    cell = eqg.nn.LIFCell(HIDDEN, alpha, rho=rho, strength=beta, recurrent=True, key=jr.key(0))
    model = Neurons(cell)
    signals = jr.normal(jr.key(9), (STEPS, HIDDEN))
    gradient = lambda model: weighted_spikes(model, signals, online="e-prop")
    (_, spikes), got = eqx.filter_value_and_grad(gradient, has_aux=True)(model)
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
    assert np.allclose(got.cell.weight_hh, total, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- errors


def _shifts_the_carry(h, x):
    """One of the two moves of the carry is its identity."""
    same, shifted = (jnp.concatenate([jnp.zeros(k), h])[1:4] for k in (1, 2))
    return 0.5 * same + 0.4 * shifted + x


# A step of the carry and an input, by a parameter of this shape; and words of the error.
ERRORS = {
    "permuted": (
        lambda w: lambda h, x: jnp.roll(h, 1) * w + x,
        (IN,),
        "other elements of carry, by their order",
    ),
    "shifted": (
        lambda w: lambda h, x: _shifts_the_carry(h, w * x),
        (IN,),
        "other elements of carry, by their order",
    ),
    "a lookup": (
        lambda w: lambda h, x: 0.9 * h + w[jnp.argmax(x)],
        (5, IN),
        r"an array float\d\d\[5,3\] enters it by `",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_steps_that_have_no_traces(name):
    step, shape, match = ERRORS[name]

    def loss(w):
        run = lambda h, x: (step(w)(h, x), None)
        h = jnp.zeros(IN)
        return jnp.sum(eqg.filter_scan(run, h, XS, online=True)[0])

    with pytest.raises(eqg.RuleError, match=match):
        jax.grad(loss)(jnp.ones(shape, XS.dtype))


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


def _of_equinox(fn, bwd):
    rule = eqx.filter_custom_vjp(fn)
    rule.def_fwd(lambda perturbed, x: (rule(x), x))
    rule.def_bwd(lambda residuals, ct, perturbed, x: bwd(residuals, ct))
    return rule


_SPIKE = lambda v: (v > 0).astype(v.dtype), lambda v, ct: ct / (1 + jnp.abs(v)) ** 2
_spike, _jax_spike, _equinox_spike = (f(*_SPIKE) for f in (_ours, _of_jax, _of_equinox))
_CLIP = lambda x: x, lambda _, ct: jnp.clip(ct, -0.1, 0.1)
_jax_clip, _equinox_clip = (f(*_CLIP) for f in (_of_jax, _of_equinox))


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


def _sine(x):
    return jnp.sin(x)


_sine = _ours(_sine, lambda x, ct: eqg.scale_gradient(jnp.cos(x) * ct, 0.5))


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
    "eqx.filter_custom_vjp": _spiking(_equinox_spike),
    "scale": _same(lambda w, h, x: jnp.sin(eqg.scale_gradient(h, 0.5) * w) + x),
    "reverse": _same(lambda w, h, x: 0.5 * eqg.reverse_gradient(h) * w + x),
    "ste": _same(lambda w, h, x: 0.5 * h + eqg.ste.round(3 * w) * x * jnp.sin(h)),
    "two outputs": _same(lambda w, h, x: sum(_product(jnp.outer(w, w), x)) + w * h),
    "clipped output": lambda w, h, x: (0.5 * h + w * x, _clip(w * h**2)),
    "clipped, and stopped": _same(lambda w, h, x: w * h + jax.lax.stop_gradient(_clip(h)) * x),
}


def _loss_of_rules(step, *, plain=False, carry_gradient=None, online: bool | str = True):
    xs = jnp.outer(jnp.linspace(0.1, 0.9, 5), jnp.array([1.0, -0.6, 0.4]))
    change = (lambda h: h) if carry_gradient is None else carry_gradient

    def loss(args):
        w, h = args
        if plain:
            h, ys = jax.lax.scan(lambda h, x: step(w, change(h), x), h, xs)
        else:
            options = {"online": online, "carry_gradient": carry_gradient}
            h, ys = eqg.filter_scan(lambda h, x: step(w, h, x), h, xs, **options)
        return jnp.sum(jnp.sin(h)) + jnp.sum(jnp.cos(ys) * xs)

    return loss


def _args_of_rules():
    return jnp.array([0.8, -0.3, 0.5]), jnp.array([0.2, 0.1, -0.4])


def _derivatives(loss, first_only=False):
    """In all modes that a backward rule of JAX has, to the second order, under `jit` and
    `vmap`."""
    args = _args_of_rules()
    weights = lambda tree: sum(jnp.sum(jnp.sin(x)) for x in tree)
    batch = jax.tree.map(lambda x: jnp.stack([x, -0.5 * x]), args)

    def all_of_them(args):
        gradient = jax.grad(loss)
        of_carry = lambda h: jnp.sum(jnp.sin(jax.grad(lambda w: loss((w, h)))(args[0])))
        first = [gradient(args), jax.vmap(gradient)(batch)]
        if first_only:
            return first
        return [
            *first,
            jax.grad(lambda a: weights(gradient(a)))(args),
            jax.grad(of_carry)(args[1]),
        ]

    return jax.jit(all_of_them)(args)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_rules_in_a_step(name):
    """As in backpropagation through time, where a rule is not the derivative of its value."""
    with jax.enable_x64(True):
        got = _derivatives(_loss_of_rules(RULES[name]))
        assert_same(got, _derivatives(_loss_of_rules(RULES[name], plain=True)), 1e-12)


@pytest.mark.parametrize("online", [True, "e-prop"])
def test_forward_mode_past_a_rule_for_reverse_mode(online):
    """A `jax.custom_vjp` of what has no tangent."""
    with jax.enable_x64(True):
        w, h = _args_of_rules()
        step = _same(lambda w, h, x: jnp.sin(h) * w + _jax_spike(w) * x)
        of_carry = lambda loss: lambda h: loss((w, h))
        plain = of_carry(_loss_of_rules(step, plain=True))
        got = of_carry(_loss_of_rules(step, online=online))
        assert_same(jax.jacfwd(got)(h), jax.jacfwd(plain)(h), 1e-12)
        assert_same(jax.hessian(got)(h), jax.hessian(plain)(h), 1e-12)


@pytest.mark.parametrize("name", ["custom_vjp", "jax.custom_vjp", "eqx.filter_custom_vjp"])
def test_eprop_with_a_rule(name):
    """These steps are elementwise, so nothing is dropped."""
    with jax.enable_x64(True):
        got = _derivatives(_loss_of_rules(RULES[name], online="e-prop"), first_only=True)
        plain = _loss_of_rules(RULES[name], plain=True)
        assert_same(got, _derivatives(plain, first_only=True), 1e-12)


_NOT_FOLLOWED = {
    "parameter": _same(lambda w, h, x: 0.5 * h + _clip(w) * x),
    "carry": _same(lambda w, h, x: 0.5 * _clip(h) + w * x),
    "jax.custom_vjp": _same(lambda w, h, x: 0.5 * _jax_clip(h) + w * x),
    "eqx.filter_custom_vjp": _same(lambda w, h, x: 0.5 * _equinox_clip(h) + w * x),
    "norm": _same(lambda w, h, x: eqg.clip_gradient_norm(0.5 * h + w * x, 0.01)),
    "in jit": _same(lambda w, h, x: 0.5 * jax.jit(_clip)(h) + w * x),
}


@pytest.mark.parametrize("online", [True, "e-prop"])
@pytest.mark.parametrize("name", _NOT_FOLLOWED)
def test_rules_that_are_not_linear(name, online):
    names = {"jax.custom_vjp": "<lambda>", "eqx.filter_custom_vjp": "filter_custom_vjp"}
    rule = names.get(name, "_clip_gradient_norm" if name == "norm" else "_clip_gradient")
    loss = _loss_of_rules(_NOT_FOLLOWED[name], online=online)
    message = (
        f"can't be followed online.*\n  the backward rule of `{rule}`: it .* a cotangent\n"
    )
    with pytest.raises(eqg.RuleError, match=message + "  in `<lambda>`, file"):
        jax.grad(loss)(_args_of_rules())


def test_a_backward_rule_that_applies_a_rule_to_its_cotangent():
    """The second derivative comes from the inner rule; a transpose would not have it."""
    step = _same(lambda w, h, x: _sine(h * w) + x)
    with pytest.raises(
        eqg.RuleError, match="of `_sine`: it applies `_scale_gradient`, which has"
    ):
        jax.grad(_loss_of_rules(step))(_args_of_rules())


# ---------------------------------------------------------------- layouts


def test_symbolic_shapes():
    def gradient(w, xs):
        run = lambda w: eqg.filter_scan(
            lambda h, x: (0.5 * h + w * x, h), 0 * xs[0], xs, online=True
        )
        return jax.grad(lambda w: jnp.sum(run(w)[1]))(w)

    (n,) = jax.export.symbolic_shape("n")
    types = jax.ShapeDtypeStruct((), XS.dtype), jax.ShapeDtypeStruct((4, n), XS.dtype)
    with pytest.raises(eqg.RuleError, match="needs sizes that are known"):
        jax.export.export(jax.jit(gradient))(*types)
