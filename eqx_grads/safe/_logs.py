"""Logarithms, of products, hyperbolic cosines and differences of exponentials."""

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
from jaxtyping import Array, ArrayLike

from .._rules.elementwise import elementwise
from ._dtypes import apply
from ._inverse import positive, quotient
from ._logarithm import finite_logarithm, logarithm


def log(x: ArrayLike) -> Array:
    return apply("log", logarithm, x=x)


def xlogy(x: ArrayLike, y: ArrayLike) -> Array:
    return apply("xlogy", _xlogy, x=x, y=y)


@jax.jit
def _log_of_second(out, x, y):
    del out, x
    return finite_logarithm(y)


@jax.jit
def _ratio(out, x, y):
    del out
    return quotient(x, positive(y))


_xlogy = elementwise(jsp.xlogy, (_log_of_second, _ratio))


def xlog1py(x: ArrayLike, y: ArrayLike) -> Array:
    return apply("xlog1py", _xlog1py, x=x, y=y)


@jax.jit
def _log1p_slope(out, x):
    del out
    return quotient(jnp.ones_like(x), positive(1 + x))


_log1p = elementwise(jnp.log1p, _log1p_slope)


@jax.jit
def _log1p_of_second(out, x, y):
    del out, x
    return jnp.where((y > -1) & (y < jnp.inf), _log1p(y), 0)


@jax.jit
def _ratio_to_one_more(out, x, y):
    del out
    return quotient(x, positive(1 + y))


_xlog1py = elementwise(jsp.xlog1py, (_log1p_of_second, _ratio_to_one_more))


def log_cosh(x: ArrayLike) -> Array:
    return apply("log_cosh", _log_cosh, x=x)


def _log_cosh_value(x):
    z = jnp.abs(x)
    # log(1 + (cosh(z) - 1)), in which nothing cancels; beyond 20, exp(-2z) is below rounding.
    u = jnp.expm1(jnp.minimum(z, 20))
    return jnp.where(z < 20, jnp.log1p(u * u / (2 * (1 + u))), z - _LOG_2)


_LOG_2 = 0.6931471805599453


def _tanh_of(out, x):
    del out
    return _tanh(x)


def _sech2_of(out, x):
    del out
    return _sech2(x)


def _sech2_slope(out, x):
    return -2 * _tanh(x) * out


def _sech2_value(x):
    q = jnp.exp(-2 * jnp.abs(x))
    return 4 * q / ((1 + q) * (1 + q))


_log_cosh = elementwise(jax.jit(_log_cosh_value), _tanh_of)
# With `1 - tanh(x)**2` for its derivative, as in JAX, nothing is left of it in the tails.
_tanh = elementwise(jnp.tanh, _sech2_of)
_sech2 = elementwise(jax.jit(_sech2_value), jax.jit(_sech2_slope))


def log_expm1(x: ArrayLike) -> Array:
    return apply("log_expm1", _log_expm1, x=x)


def softplus_inverse(x: ArrayLike) -> Array:
    return apply("softplus_inverse", _log_expm1, x=x)


@jax.jit
def _log_one_minus_exp(x):
    """`log(1 - exp(-x))`."""
    return jnp.log(-jnp.expm1(-x))


def _log_expm1_value(x):
    return x + _log_one_minus_exp(x)


def _weight_value(x):
    """`1 / (1 - exp(-x))`, and zero where `x` is not positive."""
    is_positive = x > 0
    return jnp.where(is_positive, -1 / jnp.expm1(-jnp.where(is_positive, x, 1)), 0)


def _weight_slope(out, x):
    return -(out * jnp.exp(-positive(x))) * out


def _weight_of(out, x):
    del out
    return _weight(x)


_log_expm1 = elementwise(jax.jit(_log_expm1_value), _weight_of)
_weight = elementwise(jax.jit(_weight_value), jax.jit(_weight_slope))


def log_sub_exp(x: ArrayLike, y: ArrayLike) -> Array:
    return apply("log_sub_exp", _log_sub_exp, x=x, y=y)


def _log_sub_exp_value(x, y):
    return x + _log_one_minus_exp(_gap(x, y))


def _gap(x, y):
    """`x - y`, which is infinite where `exp(y)` is zero, also if `exp(x)` is."""
    return jnp.where(jnp.isneginf(y), jnp.inf, x - y)


@jax.jit
def _weight_of_first(out, x, y):
    del out
    return jnp.where(jnp.isneginf(x), 0, _weight(_gap(x, y)))


@jax.jit
def _weight_of_second(out, x, y):
    del out
    gap = _gap(x, y)
    return -jnp.exp(-positive(gap)) * _weight(gap)


_log_sub_exp = elementwise(jax.jit(_log_sub_exp_value), (_weight_of_first, _weight_of_second))
