"""Functions of the library of one array, each with the same function in plain JAX."""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np

from .formulas import mul


class Op(NamedTuple):
    """A function of an array, and its reference.

    - `is_linear`: whether its backward rule is. Otherwise, the reference is a
        `jax.custom_vjp`, which has no forward mode. For a batch that shares an array, JAX
        clips the gradient of each example, and this library clips their sum.
    - `most`: the most derivatives that are exact.
    """

    ours: Callable[[Any], Any]
    plain: Callable[[Any], Any]
    of_complex: bool = False
    is_linear: bool = True
    most: int = 3


def _constant(x: Any, value: float) -> Any:
    return jax.lax.full_like(x, value)


def _identity_with(tangent: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    @jax.custom_jvp
    def fn(x):
        return x

    fn.defjvp(lambda primals, ts: (primals[0], tangent(primals[0], ts[0])))
    return fn


def _identity_back(cotangent: Callable[[Any], Any]) -> Callable[[Any], Any]:
    fn = jax.custom_vjp(lambda x: x)
    fn.defvjp(lambda x: (x, None), lambda _, ct: (cotangent(ct),))
    return fn


def _clip_norm(ct):
    norm = jnp.sqrt(jnp.sum(mul(ct, ct)))
    return mul(ct, jnp.broadcast_to(jnp.minimum(0.25 / norm, 1).astype(ct.dtype), ct.shape))


def _straight_through(value: Callable[[Any], Any], surrogate: Callable[[Any], Any]):
    def fn(x):
        y = surrogate(x)
        return y + jax.lax.stop_gradient(value(x) - y)

    return fn


_thirds = lambda x: jnp.round(3 * x)


@jax.custom_jvp
def _spike(x):
    return (x >= 0).astype(x.dtype)


@_spike.defjvp
def _spike_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return _spike(x), t / (1 + 2 * jnp.abs(x)) ** 2


_masked_root = lambda x: jnp.where(x > 0.5, jnp.sqrt(x - 0.5), x)


def _masked_root_twice(x):
    is_in = x > 0.5
    return jnp.where(is_in, jnp.sqrt(jnp.where(is_in, x - 0.5, _constant(x, 1.0))), x)


def _sums(x):
    """Linear, and not symmetric."""
    return jnp.cumsum(x.reshape(-1)).reshape(x.shape)


@eqg.linear_function
def _own_sums(x):
    return _sums(x)


@_own_sums.def_rmatvec
def _own_sums_rmatvec(ct):
    return jnp.flip(jnp.cumsum(jnp.flip(ct.reshape(-1)))).reshape(ct.shape)


_contraction = lambda y, x: 0.25 * jnp.tanh(y) + x


def _iterate(x):
    step = lambda y, _: (_contraction(y, x), None)

    return jax.lax.scan(step, x, None, 30)[0]


def _fixed_point(x):
    import optimistix as optx

    eps = float(jnp.finfo(x.dtype).eps)
    solver = optx.FixedPointIteration(rtol=4 * eps, atol=4 * eps)
    return eqg.fixed_point(_contraction, x, x, solver=solver).value


@eqg.implicit(lambda y, x: _contraction(y, x) - y)
def _implicit(x):
    return _iterate(x)


_reset = lambda t, y: jnp.sin(y) * (1 + t)


_field = lambda t, y: jnp.cos(y) + t * y


def _jump(x):
    t = jnp.sum(x)
    return eqg.jump(_reset, x * t, _field, t)[1]


def _plain_jump(x):
    """One step of Runge and Kutta of length zero, which depends on the time of the jump."""
    t = jnp.sum(x)
    end = jax.lax.stop_gradient(t)
    h, y = end - t, _reset(t, x * t)
    half = t + h / 2
    k1 = _field(t, y)
    k2 = _field(half, y + h / 2 * k1)
    k3 = _field(half, y + h / 2 * k2)
    k4 = _field(end, y + h * k3)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


@ft.partial(eqg.host_function, out=lambda x: x)
def _host_sin(x):
    return np.sin(x)


@_host_sin.def_bwd
def _host_sin_bwd(residuals, ct):
    return (ct * np.cos(residuals[0]),)


@_host_sin.def_jvp
def _host_sin_jvp(primals, tangents):
    return np.sin(primals[0]), tangents[0] * np.cos(primals[0])


OPS = {
    "scale": Op(
        lambda x: eqg.scale_gradient(x, 0.5),
        _identity_with(lambda x, t: mul(t, _constant(t, 0.5))), of_complex=True,
    ), "scale by itself": Op(
        lambda x: eqg.scale_gradient(x, x), _identity_with(lambda x, t: mul(t, x))
    ), "reverse": Op(
        lambda x: eqg.reverse_gradient(x, 0.75),
        _identity_with(lambda x, t: mul(t, _constant(t, -0.75))), of_complex=True,
    ), "mask": Op(
        lambda x: eqg.mask_gradient(x, x > 0),
        _identity_with(lambda x, t: jnp.where(x > 0, t, jnp.zeros_like(t))),
    ), "clip": Op(
        lambda x: eqg.clip_gradient(x, -0.5, 0.25),
        _identity_back(lambda ct: jnp.clip(ct, _constant(ct, -0.5), _constant(ct, 0.25))),
        is_linear=False,
    ), "clip_norm": Op(
        lambda x: eqg.clip_gradient_norm(x, 0.25), _identity_back(_clip_norm), is_linear=False
    ), "replace": Op(
        lambda x: eqg.replace_gradient(jnp.sin(x), jnp.tanh(x)),
        _straight_through(jnp.sin, jnp.tanh), of_complex=True,
    ), "with_gradient_of": Op(
        eqg.with_gradient_of(_thirds, jnp.sin), _straight_through(_thirds, jnp.sin)
    ), "straight_through": Op(
        eqg.with_gradient_of(jnp.sin, lambda x: x), _straight_through(jnp.sin, lambda x: x)
    ), "ste": Op(lambda x: eqg.ste.round(3 * x), _straight_through(_thirds, lambda x: 3 * x)),
    "spike": Op(
        lambda x: eqg.surrogates.spike(x, eqg.surrogates.superspike(slope=2.0)), _spike
    ), "zero_safe": Op(eqg.zero_safe(_masked_root), _masked_root_twice),
    "linear_function": Op(_own_sums, _sums, of_complex=True),
    "fixed_point": Op(_fixed_point, _iterate), "implicit": Op(_implicit, _iterate),
    "jump": Op(_jump, _plain_jump), "host": Op(_host_sin, jnp.sin, most=1),
}  # fmt: skip
