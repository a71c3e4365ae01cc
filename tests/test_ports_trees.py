"""The rules of other systems, written here: layers, several arguments and outputs.

`docs/coming-from/` shows both versions side by side. Where the other system is Equinox, its
version is run as well; all others are held to closed forms.
"""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special as sp
from jaxtyping import Array

from .ports import assert_close, REVERSE


# Layers. Each loss is linear in the output, with the weights `ct`.

WEIGHT = jnp.array([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])
BIAS = jnp.array([0.5, -0.25])
X = jnp.array([1.0, -1.5, 2.0])
XS = jnp.stack([X, 2 * X, -X, X + 1])
CT = jnp.array([2.0, -3.0])


class Linear(eqx.Module):
    weight: Array
    bias: Array


@eqg.custom_vjp
def sign_linear(layer, x):
    """From Flax NNX: the parameters get the sign of their gradient only."""
    return layer.weight @ x + layer.bias


@sign_linear.def_fwd
def _sign_linear_fwd(layer, x):
    return sign_linear(layer, x), (layer, x)


@sign_linear.def_bwd
def _sign_linear_bwd(residuals, ct):
    layer, x = residuals
    signs = eqg.tangents.of(layer, weight=jnp.sign(jnp.outer(ct, x)), bias=jnp.sign(ct))
    return signs, layer.weight.T @ ct


@pytest.mark.parametrize("transform", [lambda fn: fn, eqx.filter_jit], ids=["eager", "jit"])
def test_flax_nnx_linear(transform):
    loss = lambda layer, x: CT @ sign_linear(layer, x)
    layer = Linear(WEIGHT, BIAS)
    g_layer, g_x = transform(jax.grad(loss, argnums=(0, 1)))(layer, X)
    assert_close(loss(layer, X), CT @ (WEIGHT @ X + BIAS))
    assert_close(g_layer.weight, np.sign(np.outer(CT, X)))
    assert_close(g_layer.bias, np.sign(CT))
    assert_close(g_x, WEIGHT.T @ CT)


def _vmapped(layer, xs):
    return jnp.sum(jax.vmap(sign_linear, in_axes=(None, 0))(layer, xs) @ CT)


def _scanned(layer, xs):
    step = lambda total, x: (total + CT @ sign_linear(layer, x), None)
    return jax.lax.scan(step, jnp.zeros(()), xs)[0]


@pytest.mark.parametrize("loss", [_vmapped, _scanned])
def test_flax_nnx_linear_over_a_batch(loss):
    g_layer, g_xs = jax.jit(jax.grad(loss, argnums=(0, 1)))(Linear(WEIGHT, BIAS), XS)
    assert_close(g_layer.weight, sum(np.sign(np.outer(CT, x)) for x in XS))
    assert_close(g_layer.bias, len(XS) * np.sign(CT))
    assert_close(g_xs, np.broadcast_to(WEIGHT.T @ CT, XS.shape))


def test_flax_nnx_linear_forward_mode_is_that_of_the_layer():
    layer, t_layer = Linear(WEIGHT, BIAS), Linear(WEIGHT + 1, BIAS + 1)
    _, t_out = jax.jvp(sign_linear, (layer, X), (t_layer, X))
    assert_close(t_out, (WEIGHT + 1) @ X + BIAS + 1 + WEIGHT @ X)


# Equinox, issue 745: a Module beside the arguments, in `scan` under `jit`.


class Wave(eqx.Module):
    amplitude: Array

    def __call__(self, x):
        return self.amplitude * jnp.sin(x)


@eqx.filter_custom_jvp
def eqx_product(x, y, *, fn):
    return fn(x) * y


@eqx_product.def_jvp
def _eqx_product_jvp(primals, tangents, *, fn):
    (x, y), (t_x, t_y) = primals, tangents
    out, slope = jax.value_and_grad(fn)(x)
    t_out = jnp.zeros_like(out)
    if t_x is not None:
        t_out += slope * y * t_x
    if t_y is not None:
        t_out += out * t_y
    return out * y, t_out


@eqg.custom_jvp
def product(x, y, *, fn):
    return fn(x) * y


@product.def_jvp
def _product_jvp(primals, tangents, *, fn):
    (x, y), (t_x, t_y) = primals, tangents
    out, slope = jax.value_and_grad(fn)(x)
    return out * y, slope * y * t_x + out * t_y


@eqg.custom_jvp
def product_of(fn, x, y):
    return fn(x) * y


@product_of.def_jvp
def _product_of_jvp(primals, tangents):
    (fn, x, y), (t_fn, t_x, t_y) = primals, tangents
    out, slope = jax.value_and_grad(fn)(x)
    t_out = t_fn.amplitude * jnp.sin(x) * y + slope * y * t_x + out * t_y
    return out * y, t_out


def _last_product(call):
    def loss(wave, x):
        step = lambda y, _: (call(wave, x, y), None)
        return jax.lax.scan(step, jnp.ones_like(x), None, length=3)[0]

    return loss


# After three steps: (amplitude * sin(x)) ** 3.
PRODUCTS = {
    "Equinox": lambda wave, x, y: eqx_product(x, y, fn=wave),
    "keyword": lambda wave, x, y: product(x, y, fn=wave),
    "positional": product_of,
}


@pytest.mark.parametrize("call", PRODUCTS.values(), ids=PRODUCTS)
def test_module_keyword_in_scan(call):
    wave, x, loss = Wave(jnp.array(1.5)), jnp.array(0.7), _last_product(call)
    slope = 3 * (1.5 * np.sin(0.7)) ** 2 * 1.5 * np.cos(0.7)
    assert_close(loss(wave, x), (1.5 * np.sin(0.7)) ** 3)
    assert_close(eqx.filter_jit(jax.grad(loss, argnums=1))(wave, x), slope)
    assert_close(jax.grad(eqx.filter_jit(loss), argnums=1)(wave, x), slope)
    assert_close(jax.jvp(lambda x: loss(wave, x), (x,), (jnp.ones_like(x),))[1], slope)


def test_module_as_a_positional_argument_is_differentiated():
    wave, x, loss = Wave(jnp.array(1.5)), jnp.array(0.7), _last_product(product_of)
    grads = eqx.filter_jit(eqx.filter_grad(loss))(wave, x)
    assert_close(grads.amplitude, 3 * 1.5**2 * np.sin(0.7) ** 3)


def test_module_keyword_is_not_differentiated():
    loss = _last_product(PRODUCTS["keyword"])
    with pytest.raises(eqg.RuleError, match=r"(?s)keyword-only argument.*`fn\.amplitude`"):
        eqx.filter_grad(loss)(Wave(jnp.array(1.5)), jnp.array(0.7))


# PyTorch: `ctx.needs_input_grad` and an optional bias.


@eqg.custom_vjp
def linear(x, weight, bias=None):
    out = x @ weight.T
    return out if bias is None else out + bias


@linear.def_fwd
def _linear_fwd(x, weight, bias):
    return linear(x, weight, bias), (x, weight)


@linear.def_bwd
def _linear_bwd(residuals, ct, *, perturbed):
    x, weight = residuals
    x_perturbed, weight_perturbed, bias_perturbed = perturbed
    ct_x = ct @ weight if x_perturbed else None
    ct_weight = jnp.outer(ct, x) if weight_perturbed else None
    return ct_x, ct_weight, ct if bias_perturbed else None


def test_optional_bias():
    with_bias = lambda x, weight, bias: linear(x, weight, bias) @ CT
    g_x, g_weight, g_bias = jax.jit(jax.grad(with_bias, (0, 1, 2)))(X, WEIGHT, BIAS)
    assert_close(linear(X, WEIGHT, BIAS), WEIGHT @ X + BIAS)
    assert_close(g_x, WEIGHT.T @ CT)
    assert_close(g_weight, np.outer(CT, X))
    assert_close(g_bias, CT)
    without = lambda x, weight: linear(x, weight=weight) @ CT
    g_x, g_weight = jax.jit(jax.grad(without, (0, 1)))(X, WEIGHT)
    assert_close(linear(X, WEIGHT), WEIGHT @ X)
    assert_close(g_x, WEIGHT.T @ CT)
    assert_close(g_weight, np.outer(CT, X))


@pytest.mark.parametrize(("wanted", "products"), [(0, 2), (1, 1), (2, 1)])
def test_needs_input_grad_saves_work(wanted, products):
    # One product for the value; the weight's cotangent is an outer product, and the bias's
    # needs none.
    loss = lambda *args: jnp.sum(linear(*args) * CT)
    program = jax.make_jaxpr(jax.grad(loss, argnums=wanted))(X, WEIGHT, BIAS)
    assert str(program).count("dot_general") == products


def test_linear_over_a_batch():
    loss = lambda weight, bias: jnp.sum(
        jax.vmap(linear, in_axes=(0, None, None))(XS, weight, bias) @ CT
    )
    g_weight, g_bias = jax.jit(jax.grad(loss, (0, 1)))(WEIGHT, BIAS)
    assert_close(g_weight, np.outer(CT, np.sum(XS, 0)))
    assert_close(g_bias, len(XS) * CT)


# PyTorch: `mark_non_differentiable` and `set_materialize_grads(False)`.


@eqg.custom_vjp
def sort(x):
    order = jnp.argsort(x)
    return x[order], order


@sort.def_fwd
def _sort_fwd(x):
    out, order = sort(x)
    return (out, order), order


@sort.def_bwd
def _sort_bwd(order, cts):
    ct, ct_order = cts
    assert ct_order is None
    return (jnp.zeros_like(ct).at[order].set(ct),)


@pytest.mark.thorough
@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_integer_output_has_no_derivative(transform):
    def loss(x):
        out, order = sort(x)
        return out @ jnp.array([1.0, 10.0, 100.0]) + jnp.sum(order).astype(x.dtype)

    assert_close(transform(jax.grad(loss))(X), [10, 1, 100])
    assert_close(transform(jax.vmap(jax.grad(loss)))(jnp.stack([X, -X]))[1], [10, 100, 1])
    _, t_out = jax.jvp(lambda x: sort(x)[0], (X,), (jnp.array([1.0, 2.0, 3.0]),))
    assert_close(t_out, [2, 1, 3])


def test_integer_output_in_a_carry():
    def loss(x):
        step = lambda carry, _: (sort(carry[0]), None)
        (out, _), _ = jax.lax.scan(step, (x, jnp.arange(3)), None, length=2)
        return out @ jnp.array([1.0, 10.0, 100.0])

    assert_close(jax.jit(jax.grad(loss))(X), [10, 1, 100])


def _sin_and_cos(seen):
    @eqg.custom_vjp
    def sin_and_cos(x):
        return jnp.sin(x), jnp.cos(x)

    @sin_and_cos.def_fwd
    def fwd(x):
        out = sin_and_cos(x)
        return out, out

    @sin_and_cos.def_bwd(symbolic_zeros=True)
    def bwd(out, cts):
        (sin, cos), (ct_sin, ct_cos) = out, cts
        seen.append((ct_sin is not None, ct_cos is not None))
        scale = eqg.tangents.scale
        return (eqg.tangents.add(scale(ct_sin, cos), scale(ct_cos, -sin)),)

    return sin_and_cos


@pytest.mark.parametrize("mode", sorted(set(REVERSE) - {"grad(checkpoint)"}))
@pytest.mark.parametrize(
    ("loss", "slope", "used"),
    [
        (lambda pair: pair[0], np.cos, (True, False)),
        (lambda pair: pair[1], lambda x: -np.sin(x), (False, True)),
        (lambda pair: pair[0] * pair[1], lambda x: np.cos(2 * x), (True, True)),
    ],
    ids=["sin", "cos", "both"],
)
def test_unused_outputs_have_no_cotangent(mode, loss, slope, used):
    seen = []
    fn = _sin_and_cos(seen)
    x = jnp.array(0.7)
    assert_close(REVERSE[mode](lambda x: loss(fn(x)))(x), slope(0.7))
    assert set(seen) == {used}


# TensorFlow: a layer whose kernel is a variable, averaged over the batch.


@eqg.custom_gradient
def mean_linear(layer, x):
    def gradient(ct):
        return eqg.tangents.of(layer, weight=ct.T @ x / len(x), bias=ct), ct @ layer.weight

    return x @ layer.weight.T + jnp.broadcast_to(layer.bias, (len(x), 2)), gradient


@pytest.mark.parametrize("transform", [lambda fn: fn, eqx.filter_jit], ids=["eager", "jit"])
def test_tensorflow_linear(transform):
    loss = lambda layer, x: jnp.sum(mean_linear(layer, x) @ CT)
    g_layer, g_x = transform(jax.grad(loss, argnums=(0, 1)))(Linear(WEIGHT, BIAS), XS)
    assert_close(loss(Linear(WEIGHT, BIAS), XS), np.sum((XS @ WEIGHT.T + BIAS[None]) @ CT))
    assert_close(g_layer.weight, np.outer(CT, np.mean(XS, 0)))
    assert_close(g_layer.bias, len(XS) * CT)  # summed over the batch for us
    assert_close(g_x, np.broadcast_to(WEIGHT.T @ CT, XS.shape))


# HIPS autograd: a rule that uses the answer, `ans`.


@eqg.custom_vjp
def logsumexp(x):
    return jnp.max(x) + jnp.log(jnp.sum(jnp.exp(x - jnp.max(x))))


@logsumexp.def_fwd
def _logsumexp_fwd(x):
    out = logsumexp(x)
    return out, (out, x)


@logsumexp.def_bwd
def _logsumexp_bwd(residuals, ct):
    out, x = residuals
    return (ct * jnp.exp(x - out),)


@pytest.mark.parametrize("shift", [0.0, 1000.0, -1000.0])
def test_autograd_logsumexp(shift):
    x = jnp.array([0.0, 1.0, 2.0]) + shift
    softmax = sp.softmax([0.0, 1.0, 2.0])
    hessian = np.diag(softmax) - np.outer(softmax, softmax)
    # `out` is rounded by half a unit in its last place, and `exp(x - out)` by as much.
    rtol = 2e-6 + abs(shift) * float(jnp.finfo(x.dtype).eps)
    for derivative in (jax.grad, jax.jacfwd, lambda fn: jax.jit(jax.grad(fn))):
        np.testing.assert_allclose(derivative(logsumexp)(x), softmax, rtol=rtol)
    np.testing.assert_allclose(jax.jacfwd(jax.grad(logsumexp))(x), hessian, atol=2 * rtol)
