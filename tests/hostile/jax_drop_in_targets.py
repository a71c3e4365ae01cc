"""The decorators with JAX's calling conventions, and how rules are given to them."""

from collections.abc import Iterator

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np

from .domains import flag
from .targets import target


def _position(i):
    """A position of an argument of `_add`, from the end if negative."""
    return isinstance(i, int | np.integer) and not isinstance(i, bool) and i >= -2


def _one_or_some(is_one):
    """The domain of an iterable of values, or of one value."""

    def domain(x):
        if isinstance(x, str | jax.Array):
            return is_one(x)
        if isinstance(x, Iterator):  # used up before it is checked here
            return True
        try:
            return all(map(is_one, tuple(x)))
        except TypeError:
            return is_one(x)

    return domain


def _add(x, y):
    return x + y


def _made(decorator):
    def run(fun, nondiff_argnums, nondiff_argnames):
        decorator(fun, nondiff_argnums, nondiff_argnames)

    return run


for _name in ("jax_custom_jvp", "jax_custom_vjp"):
    target(
        _name,
        _made(getattr(eqg, _name)),
        fun=(_add, lambda x: x is _add),
        nondiff_argnums=((1,), _one_or_some(_position)),
        nondiff_argnames=(("y",), _one_or_some(lambda x: isinstance(x, str) and x == "y")),
    )


def _defjvp(jvp, symbolic_zeros):
    eqg.jax_custom_jvp(_add).defjvp(jvp, symbolic_zeros)


def _defvjp(fwd, bwd, symbolic_zeros, optimize_remat, generic_batching):
    options = symbolic_zeros, optimize_remat, generic_batching
    eqg.jax_custom_vjp(_add).defvjp(fwd, bwd, *options)


FLAG = (False, flag)
target("jax_custom_jvp.defjvp", _defjvp, jvp=(jnp.sin, callable), symbolic_zeros=FLAG)
target(
    "jax_custom_vjp.defvjp",
    _defvjp,
    fwd=(jnp.sin, callable),
    bwd=(jnp.sin, callable),
    symbolic_zeros=FLAG,
    optimize_remat=FLAG,
    generic_batching=FLAG,
)
