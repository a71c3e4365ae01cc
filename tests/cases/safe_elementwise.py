"""Elementwise mathematics with finite derivatives, each with a formula that is right there."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp

from .registry import case


safe = eqg.safe

# Of each function: a formula whose autodiff is right at the usual magnitudes, and arguments.
_INSIDE, _OTHERS = jnp.array([0.3, -0.6, 0.8]), jnp.array([1.5, 0.4, -0.7])
_POSITIVE, _LESS = jnp.array([0.3, 1.6, 2.8]), jnp.array([0.1, -0.6, 2.5])
FORMULAS = {
    "sqrt": (lambda x: x**0.5, (_POSITIVE,)),
    "divide": (lambda x, y: x / y, (_INSIDE, _OTHERS)),
    "power": (lambda x, y: jnp.exp(y * jnp.log(x)), (_POSITIVE, _OTHERS)),
    "hypot": (lambda x, y: jnp.sqrt(x * x + y * y), (_INSIDE, _OTHERS)),
    "arctan2": (
        lambda y, x: 2 * jnp.arctan(y / (jnp.sqrt(x * x + y * y) + x)),
        (_INSIDE, _OTHERS),
    ),
    "arccos": (jnp.arccos, (_INSIDE,)),
    "arcsin": (jnp.arcsin, (_INSIDE,)),
    "log": (jnp.log, (_POSITIVE,)),
    "xlogy": (lambda x, y: x * jnp.log(y), (_INSIDE, _POSITIVE)),
    "xlog1py": (lambda x, y: x * jnp.log1p(y), (_INSIDE, _POSITIVE)),
    "log_cosh": (lambda x: jnp.log(jnp.cosh(x)), (_INSIDE,)),
    "log_expm1": (lambda x: jnp.log(jnp.exp(x) - 1), (_POSITIVE,)),
    "log_sub_exp": (lambda x, y: jnp.log(jnp.exp(x) - jnp.exp(y)), (_POSITIVE, _LESS)),
    "log_ndtr": (lambda x: jnp.log(jax.scipy.special.ndtr(x)), (_OTHERS,)),
    "expm1_ratio": (lambda x: jnp.expm1(x) / x, (_OTHERS,)),
    "log1p_ratio": (lambda x: jnp.log1p(x) / x, (_OTHERS,)),
    "sinhc": (lambda x: jnp.sinh(x) / x, (_OTHERS,)),
}

for _name, (_formula, _args) in FORMULAS.items():

    @case(f"safe.{_name}", reference=_formula)
    def _(name=_name, args=_args):
        return getattr(safe, name), args


@case("safe.log_ndtr: in the tail", reference=jax.scipy.special.log_ndtr)
def _():
    return safe.log_ndtr, (jnp.array([-3.5, -4.0, -5.0]),)


def _logarithms(x, scale):
    return jnp.where(x > 0, jnp.log(scale * jnp.where(x > 0, x, 1.0)), 0.0)


@case("safe.where", reference=_logarithms)
def _():
    fn = lambda x, scale: safe.where(x > 0, lambda x: jnp.log(scale * x), x, 0.0)
    return fn, (_INSIDE, jnp.array(1.5))
