"""Straight-through rounding to integers."""

import jax.numpy as jnp
from jaxtyping import PyTree

from ._straight_through import straight_through


def round(x: PyTree) -> PyTree:
    r"""Round to the nearest integer, straight through.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(eqg.ste.round(0.7))
        print(jax.grad(eqg.ste.round)(0.7))
        ```

        ```text
        1.0
        1.0
        ```

    **Arguments:**

    - `x`: an array of floats, or a PyTree of them. Other leaves are left unchanged.

    **Returns:**

    The nearest integers, bitwise equal to `jnp.round`: halves are rounded to even.

    **Derivative:**

    The identity: $\dot y = \dot x$ and $\bar x = \bar y$. Linear, so both modes and
    all orders. Clip before you round, or use [`eqx_grads.ste.fake_quantize`][]: `jnp.clip` of
    integers halves the derivative of an integer that equals a bound.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is an array that is not floating, or has a complex leaf.
    """
    return straight_through("ste.round", jnp.round, x)


def floor(x: PyTree) -> PyTree:
    """Round down to an integer, straight through.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(eqg.ste.floor(0.7))
        print(jax.grad(eqg.ste.floor)(0.7))
        ```

        ```text
        0.0
        1.0
        ```

    **Arguments:**

    - `x`: as for [`eqx_grads.ste.round`][].

    **Returns:**

    The largest integers that are not above `x`.

    **Derivative:**

    As for [`eqx_grads.ste.round`][].
    """
    return straight_through("ste.floor", jnp.floor, x)


def ceil(x: PyTree) -> PyTree:
    """Round up to an integer, straight through.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(eqg.ste.ceil(0.2))
        print(jax.grad(eqg.ste.ceil)(0.2))
        ```

        ```text
        1.0
        1.0
        ```

    **Arguments:**

    - `x`: as for [`eqx_grads.ste.round`][].

    **Returns:**

    The smallest integers that are not below `x`.

    **Derivative:**

    As for [`eqx_grads.ste.round`][].
    """
    return straight_through("ste.ceil", jnp.ceil, x)


def trunc(x: PyTree) -> PyTree:
    """Round towards zero to an integer, straight through.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(eqg.ste.trunc(-1.7))
        print(jax.grad(eqg.ste.trunc)(-1.7))
        ```

        ```text
        -1.0
        1.0
        ```

    **Arguments:**

    - `x`: as for [`eqx_grads.ste.round`][].

    **Returns:**

    `x` rounded to integers towards zero.

    **Derivative:**

    As for [`eqx_grads.ste.round`][].
    """
    return straight_through("ste.trunc", jnp.trunc, x)
