"""`filter_while_loop`: a `while_loop` whose carry is any PyTree."""

from collections.abc import Callable

import jax
from jaxtyping import ArrayLike, PyTree

from .._errors import check_function, name_of
from .._jaxprs.eager_calls import compile_eager_calls
from .._jaxprs.varying import cast_carry
from .carry import as_array_if_varying, Carry


def filter_while_loop(
    cond_fun: Callable[[PyTree], ArrayLike],
    body_fun: Callable[[PyTree], PyTree],
    init: PyTree,
) -> PyTree:
    """`jax.lax.while_loop` for any PyTrees: `carry = body_fun(carry)` while
    `cond_fun(carry)`.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def square_root(x):
            # The carry holds a function, which stays as it is.
            step = lambda carry: (carry[0], 0.5 * (carry[1] + x / carry[1]))
            far = lambda carry: carry[0](carry[1] ** 2 - x) > 1e-5
            return eqg.filter_while_loop(far, step, (jnp.abs, x))[1]

        root, slope = jax.jvp(square_root, (2.0,), (1.0,))
        print(f"{root:.3f}, with the slope {slope:.3f}")
        ```

        ```text
        1.414, with the slope 0.354
        ```

    **Arguments:**

    - `cond_fun`: whether to go on, a boolean of no dimensions.
    - `body_fun`: takes and returns the carry.
    - `init`: the first carry, any PyTree. What varies and what is static in it is as in
        [`eqx_grads.filter_scan`][].

    **Returns:**

    The last carry.

    **Derivative:**

    That of the loop written out, in forward mode only, by `jax.lax.while_loop`: the number of
    steps is not known, and so neither is the memory that reverse mode needs for the residuals.
    If the number of steps has a bound, use [`eqx_grads.filter_scan`][] and choose in each
    step; for a root or a fixed point, decorate the function that runs the loop with
    [`eqx_grads.implicit`][].

    **Raises:**

    [`eqx_grads.RuleError`][] if the carry that a step returns differs from the one it was
    given in structure, shapes, dtypes or static leaves.
    """
    check_function(cond_fun, "cond_fun", "filter_while_loop")
    check_function(body_fun, "body_fun", "filter_while_loop")
    # In an eager call, numbers that vary are operands, as arrays are.
    init = jax.tree.map(as_array_if_varying, init)
    return _run(cond_fun, body_fun, init)


@compile_eager_calls
def _run(cond_fun, body_fun, init):
    error = (
        f"`{name_of(body_fun)}`, the body of `filter_while_loop`, returned another carry than "
        "it was given."
    )
    becomes_array: frozenset[int] = frozenset()
    while True:
        carry = Carry(init, becomes_array)
        first, body = carry.first(init), _body(body_fun, carry, error)
        more = carry.integers_that_vary(body, first)
        if not more:
            break
        becomes_array |= more
    cond = lambda arrays: cond_fun(carry.tree(arrays))
    first = cast_carry(lambda arrays: jax.make_jaxpr(body)(arrays).out_avals, first)
    return carry.tree(jax.lax.while_loop(cond, body, first))


def _body(fn, carry: Carry, error: str):
    return lambda arrays: carry.arrays(fn(carry.tree(arrays)), arrays, fn, error)
