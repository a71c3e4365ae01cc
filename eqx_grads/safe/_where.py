"""`where` around a function, with a mask on its argument as well as on its result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree

from .._errors import check_function, name_of, place_of, rule_error, show_path, type_of
from .._tangent_spaces import (
    broadcasts_to,
    dtype_of_array,
    holds_numbers,
    is_differentiable,
    promote,
    shape_of,
)


def where(
    cond: ArrayLike,
    fn: Callable[[Any], Any],
    x: PyTree,
    otherwise: ArrayLike,
    *,
    substitute: ArrayLike = 0.5,
) -> Array:
    r"""Return `fn(x)` where a condition holds, with derivatives that do not see the other
    elements.

    With `jnp.where(cond, fn(x), otherwise)`, the elements that are not chosen have a zero
    cotangent. The derivative of `fn` multiplies it; if the derivative is infinite, the gradient
    is NaN. Here `fn` never sees these elements. Compare [`eqx_grads.zero_safe`][], for a whole
    function whose code you can't change.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([0.0, 1.0, -jnp.inf])
        f = lambda x: eqg.safe.where(x > 0, jnp.log, x, 0.0)
        print(jax.vmap(jax.grad(f))(x))

        # With several arguments.
        divide = lambda x, y: eqg.safe.where(y != 0, lambda xy: xy[0] / xy[1], (x, y), 0.0)
        print(jax.grad(divide, argnums=1)(1.0, 0.0))
        ```

        ```text
        [0. 1. 0.]
        0.0
        ```

    **Arguments:**

    - `cond`: booleans, of a shape that broadcasts to `x` and to `fn(x)`.
    - `fn`: acts on each element by itself. It may close over parameters.
    - `x`: an array, or a PyTree of arrays, with which `fn` is called.
    - `otherwise`: the result where `cond` does not hold: a number, or an array that
        broadcasts to `fn(x)`.
    - `substitute`: the argument of `fn` there. The default is in the domain of `log`, `sqrt`,
        `arccos`, `arctanh` and similar functions. For `jnp.arccosh`, say, give it `2.0`.

    **Returns:**

    An array of the shape of `fn(x)`.

    **Derivative:**

    The derivative of `fn` where `cond` holds, and the derivative of `otherwise` elsewhere:
    $\dot y = \partial f(x)\,\dot x$ or $\dot y = \dot o$. For `x`, this holds for any
    `substitute`; for parameters that `fn` closes over, the derivative of `fn` has to be
    finite at `substitute`. Both modes and all orders that `fn` has.

    **Raises:**

    [`eqx_grads.RuleError`][] if `cond` does not hold booleans, if it would broadcast a leaf
    of `x` or the result to another shape, or if `fn` does not return one array.
    """
    if dtype_of_array(cond) != jnp.bool_:
        raise rule_error(
            "The condition of `safe.where` does not hold booleans.",
            f"`cond` is {type_of(cond)}",
            do="Give it a comparison: `x > 0`.",
        )
    check_function(fn, "fn", "safe.where")
    cond = jnp.asarray(cond)

    def inside(path, leaf):
        if not is_differentiable(leaf):
            return leaf
        return _select(cond, leaf, "x" + show_path(path), "substitute", substitute)

    out = fn(jax.tree_util.tree_map_with_path(inside, x))
    if not holds_numbers(out):
        raise rule_error(
            "The function of `safe.where` did not return one array.",
            f"it returned {type_of(out)}",
            place_of(fn),
            do="Call `safe.where` once for each result.",
        )
    return _select(cond, out, f"the result of `{name_of(fn)}`", "otherwise", otherwise)


def _select(cond, x, name, argument, other):
    """`x` where the condition holds, and the other elsewhere. A substitute has the dtype of
    `x`."""
    is_substitute = argument == "substitute"
    for what, value in (("cond", cond), (argument, other)):
        is_wide = value is other and is_substitute and jnp.iscomplexobj(other)
        fits = holds_numbers(value) and broadcasts_to(shape_of(value), shape_of(x))
        if not fits or (is_wide and not jnp.iscomplexobj(x)):
            raise rule_error(
                f"The `{what}` of `safe.where` does not broadcast to {name}.",
                f"`{what}` is {type_of(value)}, {name} is {type_of(x)}",
                do=f"Give a number, or an array that broadcasts: `{what}[..., None]` has a "
                "number for each row. For a function of rows, such as a norm, use `jax.vmap` "
                "around `safe.where`.",
            )
    dtype = promote([x] if is_substitute else [x, other])
    x, other = (jnp.broadcast_to(jnp.asarray(y).astype(dtype), shape_of(x)) for y in (x, other))
    return jnp.where(jnp.broadcast_to(cond, x.shape), x, other)
