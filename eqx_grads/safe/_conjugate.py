"""`conjugate_gradient`: the gradient of complex parameters as a direction of ascent."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._rules.custom_jvp import custom_jvp
from ..tangents import is_zero


def conjugate_gradient(x: PyTree) -> PyTree:
    r"""Conjugate the gradient of complex leaves, so that descent along it decreases a real
    loss.

    For a real function of a complex variable $z = a + ib$, `jax.grad` returns
    $\partial L/\partial a - i\,\partial L/\partial b$, the conjugate of the direction in which
    the loss increases most (and of what PyTorch returns). An optimizer that subtracts it moves
    the imaginary part uphill. It is not the linear solver of this name.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        target = 1.0 + 2.0j
        loss = lambda z: jnp.abs(eqg.safe.conjugate_gradient(z) - target) ** 2
        z = jnp.array(0.0 + 0.0j)
        for _ in range(20):
            z = z - 0.2 * jax.grad(loss)(z)
        print(z.round(2))
        ```

        ```text
        (1+2j)
        ```

    **Arguments:**

    - `x`: any PyTree: the parameters, where the loss first uses them. (The gradient of what
        `x` was computed from would not be a direction of ascent, unless `x` is a linear
        function of it with real coefficients.)

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    For complex leaves $\dot y = \overline{\dot x}$ and $\bar x = \overline{\bar y}$; for others
    that of the identity. So the forward mode gives the derivative along the conjugate
    direction. Linear over the real numbers, so both modes. Higher orders are the derivatives
    of this gradient.

    Source: [jax#4891](https://github.com/jax-ml/jax/issues/4891).
    """
    return _conjugate_gradient(x)


@custom_jvp
def _conjugate_gradient(x):
    return x


@_conjugate_gradient.def_jvp(symbolic_zeros=True)
def _conjugate_gradient_jvp(primals, tangents):
    return primals[0], jax.tree.map(_conjugate, tangents[0])


def _conjugate(t):
    return jnp.conj(t) if not is_zero(t) and jnp.iscomplexobj(t) else t
