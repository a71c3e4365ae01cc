"""Is a residual as small as it should be at a solution?

The implicit function theorem holds where the residual is zero, and the formula gives some other
number elsewhere. What is small depends on the units of the residual, which nobody knows but the
user. So the residual is compared with its own derivative: it is small if it changes by as much
when the solution and the arguments change by a small fraction (the backward error of numerical
analysis). One derivative in a random direction estimates that change.
"""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree


# An element that is smaller than this counts as this large, as a root may be zero.
_SMALLEST = 1e-3


def one_if_small(
    fn: Callable[..., PyTree[Array]],
    args: Sequence[PyTree[Array]],
    tolerance: float,
    name: str,
    solve: str,
) -> Array:
    """One, to multiply a derivative by; raises when it is computed if `fn(*args)` is not small.

    A factor, as the compiler removes a check of a value that nothing depends on: the derivative
    of a linear equation does not depend on its solution.

    - `args`: all that the residual depends on; every leaf is inexact.
    - `name`, `solve`: the residual and the solver, for the message.
    """
    args = jax.tree.map(lambda x: jnp.asarray(jax.lax.stop_gradient(x)), tuple(args))
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(args))))
    direction = jax.tree.map(lambda x: _direction(x, next(keys)), args)
    residual, change = jax.jvp(fn, args, direction)
    leaves = jax.tree_util.tree_leaves_with_path(residual)
    pairs = zip(leaves, jax.tree.leaves(change), strict=True)
    is_large = jnp.stack([~(_size(r) <= tolerance * _size(c)) for (_, r), c in pairs])
    messages = [
        _message(name, solve, jax.tree_util.keystr(path), tolerance) for path, _ in leaves
    ]
    one = jnp.ones((), jnp.float32)
    return eqx.branched_error_if(one, jnp.any(is_large), jnp.argmax(is_large), messages)


def _direction(x, key):
    real = jnp.finfo(x.dtype).dtype  # of complex `x`
    size = jnp.maximum(jnp.abs(x), jnp.asarray(_SMALLEST, real))
    return (size * jax.random.normal(key, x.shape, real)).astype(x.dtype)


def _size(x: Array) -> Array:
    x = jnp.abs(x)
    return jnp.max(x.astype(jnp.promote_types(x.dtype, jnp.float32)), initial=0)


def _message(name, solve, path, tolerance):
    return (
        f"The residual `{name}` of `{solve}` is not small at the solution.\n"
        f"  at residual{path}: it is larger than its change would be if the solution and the "
        f"arguments changed by the fraction tolerance={tolerance:g}\n"
        f"Without a solution there is no implicit derivative. Let `{solve}` do more steps or "
        "work in higher precision, see that the residual is the equation that it solves, or "
        "pass another `tolerance` to `implicit` (`None`: no check)."
    )
