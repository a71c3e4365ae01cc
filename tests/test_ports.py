"""The rules of other systems, written here, against closed forms.

`docs/coming-from/` shows both versions side by side. Nothing else needs to be installed.
"""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special as sp
from jaxtyping import Array

from .helpers import assert_close


# ---------------------------------------------------------------- functions of one number


@eqg.custom_gradient
def clip_gradient(x):  # JAX
    return x, lambda ct: jnp.clip(ct, -1.0, 1.0)


@eqg.custom_vjp
def softplus(x):  # JAX
    return jnp.logaddexp(x, 0.0)


softplus.def_fwd(lambda x: (softplus(x), x))
softplus.def_bwd(lambda x, ct: (ct * jax.nn.sigmoid(x),))


@eqg.custom_jvp
def steepen(x, *, fn):  # JAX, with `nondiff_argnums`
    return fn(x)


@steepen.def_jvp
def _steepen_jvp(primals, tangents, *, fn):
    out, t_out = jax.jvp(fn, primals, tangents)
    return out, 2 * t_out


@eqg.custom_vjp
def torch_relu(x):
    return jnp.where(x > 0, x, 0)


torch_relu.def_fwd(lambda x: (torch_relu(x), x > 0))
torch_relu.def_bwd(lambda positive, ct: (jnp.where(positive, ct, 0),))
binarize = eqg.elementwise(jnp.sign, lambda out, x: (jnp.abs(x) <= 1).astype(x.dtype))
straight_through = eqg.with_gradient_of(jnp.sign, lambda x: x)
relu = lambda x: np.maximum(x, 0)
# The function, its value and its slope in NumPy, and the slope of forward mode if it differs.
PORTS = {
    "clip": (
        lambda x: 5 * clip_gradient(jnp.sin(x)),
        lambda x: 5 * np.sin(x),
        np.cos,  # the incoming 5 is clipped to 1
        lambda x: 5 * np.cos(x),
    ),
    "softplus": (softplus, lambda x: np.logaddexp(x, 0), sp.expit),
    "nondiff_argnums": (lambda x: steepen(x, fn=jnp.sin), np.sin, lambda x: 2 * np.cos(x)),
    "PyTorch ReLU": (torch_relu, relu, lambda x: x > 0),
    "PyTorch binarize": (binarize, np.sign, lambda x: abs(x) <= 1),
    "PyTorch straight-through": (straight_through, np.sign, np.ones_like),
}


def _scanned(fn):
    step = lambda total, x: (total + fn(x), None)
    return lambda xs: jax.lax.scan(step, jnp.zeros_like(xs[0]), xs)[0]


@pytest.mark.parametrize("name", PORTS)
def test_functions_of_one_number(name):
    fn, value, slope, *other = PORTS[name]
    xs = np.array([-1e4, -3.0, -0.5, 0.0, 0.25, 1.0, 4.0, 1e4][name != "softplus" : -1])
    like = lambda of: jnp.asarray(of(xs), jnp.result_type(float))
    x = like(lambda x: x)
    total = lambda x: jnp.sum(jax.checkpoint(jax.vmap(fn))(x))
    assert_close(jax.vmap(fn)(x), like(value))
    for gradient in (jax.grad(total), jax.vmap(jax.grad(fn)), jax.jit(jax.grad(_scanned(fn)))):
        assert_close(gradient(x), like(slope))
    pushed = jax.jvp(jax.jit(jax.vmap(fn)), (x,), (jnp.ones_like(x),))[1]
    assert_close(pushed, like(other[0] if other else slope))


# ---------------------------------------------------------------- two numbers


def _host_hypot(x, y):
    shape = jax.ShapeDtypeStruct(jnp.broadcast_shapes(x.shape, y.shape), x.dtype)
    return jax.pure_callback(np.hypot, shape, x, y, vmap_method="expand_dims")


def test_autograd_defvjp():
    """HIPS autograd: a NumPy function that autodiff can't see into."""
    hypot = eqg.elementwise(_host_hypot, (lambda out, x, y: x / out, lambda out, x, y: y / out))
    x, y = jnp.array(3.0), jnp.array(4.0)
    assert_close(jax.jit(jax.grad(hypot, (0, 1)))(x, y), (jnp.array(0.6), jnp.array(0.8)))
    batch = jax.vmap(jax.grad(hypot))(jnp.stack([x, y]), jnp.stack([y, x]))
    assert_close(batch, jnp.array([0.6, 0.8]))
    assert_close(jax.grad(jax.grad(hypot))(x, y), jnp.array(16 / 125))


def test_scalar_rule():
    """ChainRules: `@scalar_rule atan(y, x) @setup(u = x^2 + y^2) (x / u, -y / u)`."""
    called = set()
    d_y = lambda out, y, x, u: called.add("y") or x / u
    d_x = lambda out, y, x, u: called.add("x") or -y / u
    atan = eqg.elementwise(jnp.arctan2, (d_y, d_x), setup=lambda out, y, x: x**2 + y**2)
    y, x = jnp.array([1.0, 2.0, -1.0]), jnp.array(-2.0)
    u = x**2 + y**2
    assert_close(jax.grad(lambda y: jnp.sum(atan(y, x)))(y), x / u)
    assert called == {"y"}  # the partial that nobody asked for is not computed
    assert_close(jax.grad(lambda x: jnp.sum(atan(y, x)))(x), jnp.sum(-y / u))


# ---------------------------------------------------------------- layers

WEIGHT = jnp.array([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]])
BIAS = jnp.array([0.5, -0.25])
X = jnp.array([1.0, -1.5, 2.0])
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


def test_flax_nnx_linear_over_a_batch():
    xs = jnp.stack([X, 2 * X, -X, X + 1])
    loss = lambda layer, xs: jnp.sum(jax.vmap(sign_linear, (None, 0))(layer, xs) @ CT)
    of_layer, of_xs = jax.jit(jax.grad(loss, (0, 1)))(Linear(WEIGHT, BIAS), xs)
    assert_close(of_layer.weight, sum(jnp.sign(jnp.outer(CT, x)) for x in xs))
    assert_close(of_layer.bias, 4 * jnp.sign(CT))
    assert_close(of_xs, jnp.broadcast_to(WEIGHT.T @ CT, xs.shape))


class Wave(eqx.Module):
    amplitude: Array

    def __call__(self, x):
        return self.amplitude * jnp.sin(x)


def test_equinox_745_a_module_as_a_keyword_in_a_scan():
    @eqg.custom_jvp
    def product(x, y, *, fn):
        return fn(x) * y

    @product.def_jvp
    def _product_jvp(primals, tangents, *, fn):
        (x, y), (t_x, t_y) = primals, tangents
        out, slope = jax.value_and_grad(fn)(x)
        return out * y, slope * y * t_x + out * t_y

    def loss(wave, x):  # (amplitude * sin(x)) ** 3
        step = lambda y, _: (product(x, y, fn=wave), None)
        return jax.lax.scan(step, jnp.ones_like(x), None, length=3)[0]

    wave, x = Wave(jnp.array(1.5)), jnp.array(0.7)
    slope = jnp.array(3 * (1.5 * np.sin(0.7)) ** 2 * 1.5 * np.cos(0.7))
    assert_close(eqx.filter_jit(jax.grad(loss, 1))(wave, x), slope)
    with pytest.raises(eqg.RuleError, match=r"(?s)keyword-only argument.*`fn\.amplitude`"):
        eqx.filter_grad(loss)(wave, x)


@eqg.custom_vjp
def linear(x, weight, bias=None):
    """PyTorch: `ctx.needs_input_grad`, and a bias that may be absent."""
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
    expected = WEIGHT.T @ CT, jnp.outer(CT, X), CT
    with_bias = lambda x, weight, bias: linear(x, weight, bias) @ CT
    assert_close(jax.jit(jax.grad(with_bias, (0, 1, 2)))(X, WEIGHT, BIAS), expected)
    without = lambda x, weight: linear(x, weight=weight) @ CT
    assert_close(jax.grad(without, (0, 1))(X, WEIGHT), expected[:2])
    # One product for the value. The weight's cotangent is an outer product.
    total = lambda *args: jnp.sum(linear(*args) * CT)
    for wanted, products in ((0, 2), (1, 1), (2, 1)):
        program = jax.make_jaxpr(jax.grad(total, wanted))(X, WEIGHT, BIAS)
        assert str(program).count("dot_general") == products


@eqg.custom_vjp
def sort(x):
    """PyTorch: `mark_non_differentiable`."""
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


def test_an_integer_output_has_no_derivative():
    def loss(x):
        step = lambda carry, _: (sort(carry[0]), None)
        (out, order), _ = jax.lax.scan(step, (x, jnp.arange(3)), None, length=2)
        return out @ jnp.array([1.0, 10.0, 100.0]) + jnp.sum(order).astype(x.dtype)

    assert_close(jax.jit(jax.grad(loss))(X), jnp.array([10.0, 1.0, 100.0]))


@pytest.mark.parametrize(
    ("loss", "slope", "used"),
    [
        (lambda pair: pair[0], np.cos, (True, False)),
        (lambda pair: pair[1], lambda x: -np.sin(x), (False, True)),
        (lambda pair: pair[0] * pair[1], lambda x: np.cos(2 * x), (True, True)),
    ],
    ids=["sin", "cos", "both"],
)
def test_unused_outputs_have_no_cotangent(loss, slope, used):
    """PyTorch: `set_materialize_grads(False)`."""
    seen = []
    sin_and_cos = eqg.custom_vjp(lambda x: (jnp.sin(x), jnp.cos(x)))
    sin_and_cos.def_fwd(lambda x: (sin_and_cos(x), sin_and_cos(x)))

    @sin_and_cos.def_bwd(symbolic_zeros=True)
    def bwd(out, cts):
        (sin, cos), (ct_sin, ct_cos) = out, cts
        seen.append((ct_sin is not None, ct_cos is not None))
        scale = eqg.tangents.scale
        return (eqg.tangents.add(scale(ct_sin, cos), scale(ct_cos, -sin)),)

    assert_close(jax.jit(jax.grad(lambda x: loss(sin_and_cos(x))))(0.7), jnp.array(slope(0.7)))
    assert set(seen) == {used}
