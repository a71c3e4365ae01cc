"""The check that a residual is small at a solution.

The implicit function theorem holds where the residual is zero, and the formula gives some other
number elsewhere. Whether it is small depends on the units of the residual, which only the user
knows. So the residual is compared with its own derivative: it is small if it changes by as much
when each element of the solution changes by a small fraction of itself. The derivative in one
direction estimates that change.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .._errors import show_path
from .run_time_error import branched_error_if


# An element that is smaller than this counts as this large, as a root may be zero.
_SMALLEST = 1e-3


def one_if_small(
    residual: PyTree[Array],
    matvec: Callable[[PyTree[Array]], PyTree[Array]],
    y: PyTree[Array],
    tolerance: float,
    names: tuple[str, str, str],
) -> Array:
    """One, to multiply a derivative by; raises when it is computed if `residual` is not small.

    A factor, as the compiler removes a check of a value that nothing depends on: the derivative
    of a linear equation does not depend on its solution.

    - `matvec`: the derivative of the residual at `y`.
    - `names`: the residual, where it is defined, and the solver, for the message. The error may
        have the stack of an earlier call, whose program JAX or Equinox kept.
    """
    change = jax.tree.leaves(matvec(_directions(y)))
    paths, values = zip(*jax.tree_util.tree_leaves_with_path(residual), strict=True)
    # Half precision can't do better than some roundings.
    used = [max(tolerance, 16 * float(jnp.finfo(r.dtype).eps)) for r in values]
    is_large = _are_large(jax.lax.stop_gradient((values, change)), jnp.asarray(used))
    name, place, solve = names
    messages = [
        f"The residual `{name}` of `{solve}` is not small at the solution.\n"
        f"  at residual{show_path(path)}: the solution seems to be off by more than "
        f"{100 * fraction:.3g} % (tolerance={tolerance:g})\n"
        f"  {place}\n"
        f"Without a solution there is no implicit derivative. Let `{solve}` do more steps or "
        "work in higher precision, check that the residual is the equation that it solves, or "
        "pass another `tolerance` to `implicit` (`None`: no check)."
        for path, fraction in zip(paths, used, strict=True)
    ]
    one = jnp.ones((), jnp.float32)
    return branched_error_if(one, jnp.any(is_large), jnp.argmax(is_large), messages)


# Compiled, as they are many small operations, which an eager gradient makes one by one.
@jax.jit
def _directions(y):
    return jax.tree.map(_direction, y)


@jax.jit
def _are_large(residual_and_change, tolerances):
    residual, change = residual_and_change
    pairs = zip(residual, change, tolerances, strict=True)
    return jnp.stack([~(_size(r) <= tol * _size(c)) for r, c, tol in pairs])


def _direction(x):
    """`x` times what looks like noise, so that no row of a matrix is orthogonal to it."""
    noise = jnp.cos(jnp.square(jnp.arange(x.size))).reshape(x.shape)
    size = jnp.maximum(jnp.abs(x), _SMALLEST)
    return (size * noise.astype(size.dtype)).astype(x.dtype)


def _size(x: Array) -> Array:
    return jnp.max(jnp.abs(x).astype(float), initial=0)
