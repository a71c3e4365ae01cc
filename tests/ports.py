"""Functions of one number, as other systems would have a rule for them: `PORTS`.

Where the other system is JAX, its own version stands before ours. Of the others, nothing needs
to be installed: the values and slopes are known in closed form.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import scipy.special as sp


# XLA flushes to zero what is smaller.
TINY = float(np.finfo(np.float32).tiny)


def assert_close(got, expected):
    """`expected` may be numbers, or a list of them for an array."""

    def like(x, number):
        number = np.asarray(number, x.dtype)
        return np.where(np.abs(number) < TINY, 0, number).astype(x.dtype)

    eqgt.assert_trees_close(got, jax.tree.map(like, got, expected), tolerance=2e-6)


@jax.custom_gradient
def jax_sin(x):
    return jnp.sin(x), lambda ct: ct * jnp.cos(x)


@eqg.custom_gradient
def sin(x):
    return jnp.sin(x), lambda ct: ct * jnp.cos(x)


@jax.custom_gradient
def jax_log_exp(x):
    e, pull_back = jax.vjp(jax.checkpoint(jnp.exp), x)
    return jnp.log(e), lambda ct: pull_back(ct / e)


@eqg.custom_gradient
def log_exp(x):
    e, pull_back = jax.vjp(jax.checkpoint(jnp.exp), x)
    return jnp.log(e), lambda ct: pull_back(ct / e)


@jax.custom_gradient
def jax_clip_gradient(x):
    return x, lambda ct: jnp.clip(ct, -1.0, 1.0)


@eqg.custom_gradient
def clip_gradient(x):
    return x, lambda ct: jnp.clip(ct, -1.0, 1.0)


def _softplus(x):
    return jnp.logaddexp(x, 0.0)


def _softplus_fwd(x):
    return _softplus(x), x


def _softplus_bwd(x, ct):
    return (ct * jax.nn.sigmoid(x),)


jax_softplus = jax.custom_vjp(_softplus)
jax_softplus.defvjp(_softplus_fwd, _softplus_bwd)

softplus = eqg.custom_vjp(_softplus)
softplus.def_fwd(_softplus_fwd)
softplus.def_bwd(_softplus_bwd)


def _jax_steepen(fn, x):
    return fn(x)


def _jax_steepen_jvp(fn, primals, tangents):
    out, t_out = jax.jvp(fn, primals, tangents)
    return out, 2 * t_out


jax_steepen = jax.custom_jvp(_jax_steepen, nondiff_argnums=(0,))
jax_steepen.defjvp(_jax_steepen_jvp)


@eqg.custom_jvp
def steepen(x, *, fn):
    return fn(x)


@steepen.def_jvp
def _steepen_jvp(primals, tangents, *, fn):
    out, t_out = jax.jvp(fn, primals, tangents)
    return out, 2 * t_out


@eqg.custom_vjp
def torch_relu(x):
    return jnp.where(x > 0, x, 0)


@torch_relu.def_fwd
def _torch_relu_fwd(x):
    return torch_relu(x), x > 0


@torch_relu.def_bwd
def _torch_relu_bwd(positive, ct):
    return (jnp.where(positive, ct, 0),)


@eqg.custom_gradient
def tf_relu(x):
    return jnp.where(x > 0, x, 0), lambda ct: jnp.where(x > 0, ct, 0)


binarize = eqg.elementwise(jnp.sign, lambda out, x: (jnp.abs(x) <= 1).astype(x.dtype))
straight_through = eqg.with_gradient_of(jnp.sign, lambda x: x)


class Port(NamedTuple):
    ours: Callable[[Any], Any]
    value: Callable[[Any], Any]  # in NumPy, of float64
    slope: Callable[[Any], Any]
    xs: list[float]
    theirs: Callable[[Any], Any] | None = None
    forward_slope: Callable[[Any], Any] | None = None  # where forward mode has another


def _step(x):
    return np.float64(x > 0)


def _one(x):
    return np.float64(1)


KINKED = [-3.0, -0.5, 0.0, 0.25, 1.0, 4.0]
SMOOTH = [-3.0, -0.5, 0.0, 0.25, 2.0]
PORTS = {
    "jax.custom_gradient sin": Port(sin, np.sin, np.cos, SMOOTH, jax_sin),
    "jax.custom_gradient log_exp": Port(log_exp, lambda x: x, _one, [0.5, 2.0], jax_log_exp),
    "jax.custom_gradient clip": Port(
        lambda x: 5 * clip_gradient(jnp.sin(x)),
        lambda x: 5 * np.sin(x),
        np.cos,  # the incoming 5 is clipped to 1
        SMOOTH,
        lambda x: 5 * jax_clip_gradient(jnp.sin(x)),
        forward_slope=lambda x: 5 * np.cos(x),
    ),
    "jax.custom_vjp softplus": Port(
        softplus,
        lambda x: np.logaddexp(x, 0),
        sp.expit,
        [*SMOOTH, 100.0, -100.0, 1e4, -1e4],
        jax_softplus,
    ),
    "jax.custom_jvp nondiff_argnums": Port(
        lambda x: steepen(x, fn=jnp.sin),
        np.sin,
        lambda x: 2 * np.cos(x),
        SMOOTH,
        lambda x: jax_steepen(jnp.sin, x),
    ),
    "PyTorch ReLU": Port(torch_relu, lambda x: max(x, 0), _step, KINKED),
    "PyTorch binarize": Port(binarize, np.sign, lambda x: np.float64(abs(x) <= 1), KINKED),
    "PyTorch straight-through": Port(straight_through, np.sign, _one, KINKED),
    "TensorFlow ReLU": Port(tf_relu, lambda x: max(x, 0), _step, KINKED),
}


def _scanned(fn):
    """The sum over two equal numbers, one after the other."""

    def total(x):
        step = lambda total, x: (total + fn(x), None)
        return jax.lax.scan(step, jnp.zeros_like(x), jnp.stack([x, x]))[0]

    return total


def _batch(x):
    return jnp.stack([x, -x])


REVERSE = {
    "grad": jax.grad,
    "jit(grad)": lambda fn: jax.jit(jax.grad(fn)),
    "grad(jit)": lambda fn: jax.grad(jax.jit(fn)),
    "vmap(grad)": lambda fn: lambda x: jax.vmap(jax.grad(fn))(_batch(x))[0],
    "grad(vmap)": lambda fn: jax.grad(lambda x: jax.vmap(fn)(_batch(x))[0]),
    "grad(checkpoint)": lambda fn: jax.grad(jax.checkpoint(fn)),
    "jit(grad(scan))": lambda fn: jax.jit(lambda x: jax.grad(_scanned(fn))(x) / 2),
}
FORWARD = {
    "jvp": lambda fn: lambda x: jax.jvp(fn, (x,), (jnp.ones_like(x),))[1],
    "jacfwd(jit)": lambda fn: jax.jacfwd(jax.jit(fn)),
    "jit(jacfwd(scan))": lambda fn: jax.jit(lambda x: jax.jacfwd(_scanned(fn))(x) / 2),
}
