"""Polar coordinates, and the inverses of cosine and sine."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._rules.custom_jvp import custom_jvp
from ._arguments import Numbers
from ._elementwise import corner, inverse, real_function, with_slopes


def _at_origin(slope, x, y):
    return corner(slope, (x == 0) & (y == 0), x, y)


@real_function(
    lambda _, x, y: _at_origin(_direction(x, y)[0], x, y),
    lambda _, x, y: _at_origin(_direction(x, y)[1], x, y),
)
def hypot(x: Numbers, y: Numbers) -> Array:
    r"""Return $\sqrt{x^2 + y^2}$, with derivatives that are right at all magnitudes, and zero
    at the origin.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        slopes = jax.grad(eqg.safe.hypot, argnums=(0, 1))
        print(*slopes(0.0, 0.0))
        print(jnp.stack(slopes(3e30, 4e30)).round(3))
        ```

        ```text
        0.0 0.0
        [0.6 0.8]
        ```

    **Arguments:**

    - `x`, `y`: real, of shapes that broadcast together.

    **Returns:**

    The values of `jnp.hypot`, which neither overflow nor underflow on the way.

    **Derivative:**

    With $\phi$ for the angle of $(x, y)$, $\dot h = \cos\phi\,\dot x + \sin\phi\,\dot y$. At
    the origin, the minimum, the derivative is zero. Both modes and all orders; second
    derivatives are NaN at the origin.
    """
    return jnp.hypot(x, y)


@real_function(
    lambda _, y, x: _at_origin(_direction(x, y)[0] * inverse(hypot(x, y)), x, y),
    lambda _, y, x: _at_origin(-_direction(x, y)[1] * inverse(hypot(x, y)), x, y),
)
def arctan2(y: Numbers, x: Numbers) -> Array:
    r"""Return the angle of $(x, y)$, with derivatives that are right at all magnitudes, and
    zero at the origin.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        slopes = jax.grad(eqg.safe.arctan2, argnums=(0, 1))
        print(*slopes(0.0, 0.0))
        print((1e30 * jnp.stack(slopes(1e30, 1e30))).round(3))
        ```

        ```text
        0.0 -0.0
        [ 0.5 -0.5]
        ```

    **Arguments:**

    - `y`, `x`: real, of shapes that broadcast together.

    **Returns:**

    The values of `jnp.arctan2`.

    **Derivative:**

    With $h$ for the length of $(x, y)$ and $\phi$ for its angle,
    $\dot\phi = (\cos\phi\,\dot y - \sin\phi\,\dot x) / h$. At the origin, where it does not
    exist, the derivative is zero. Both modes and all orders; second derivatives are NaN at the
    origin, and right where $1 / h^2$ is in range.
    """
    return jnp.arctan2(y, x)


@custom_jvp
@jax.jit
def _direction(x, y):
    """The cosine and the sine of the angle of (x, y); both are zero at the origin."""
    # Two infinite coordinates are equally large; a single one is as large as the length.
    infinite = jnp.isinf(x) | jnp.isinf(y)
    x = jnp.where(infinite, jnp.where(jnp.isinf(x), jnp.sign(x), 0), x)
    y = jnp.where(infinite, jnp.where(jnp.isinf(y), jnp.sign(y), 0), y)
    largest = jnp.maximum(jnp.abs(x), jnp.abs(y))
    largest = jnp.where(largest == 0, 1, largest)
    x, y = x / largest, y / largest
    length = jnp.sqrt(x * x + y * y)
    # The compiler would make `x / largest / length` the quotient by a product that overflows.
    scale = 1 / jnp.where(length == 0, 1, length)
    return x * scale, y * scale


@_direction.def_jvp
def _direction_jvp(primals, tangents):
    c, s = _direction(*primals)
    t_x, t_y = tangents
    turn = (c * t_y - s * t_x) * inverse(hypot(*primals))
    return (c, s), (-s * turn, c * turn)


def _arcsin_slope_value(x):
    # `1 - x**2` would cancel.
    root = jnp.sqrt(1 - x) * jnp.sqrt(1 + x)
    return inverse(jnp.where(jnp.abs(x) > 1, 0, root))


_arcsin_slope = with_slopes(
    _arcsin_slope_value, lambda out, x: jnp.where(out == 0, 0, x) * out * out * out
)


@real_function(lambda _, x: corner(-_arcsin_slope(x), jnp.abs(x) == 1, x))
def arccos(x: Numbers) -> Array:
    r"""Return `jnp.arccos(x)`, with a zero derivative at 1 and -1.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        # A product of unit vectors may be rounded to more than one, so clip it.
        def angle(u, v):
            return eqg.safe.arccos(jnp.clip(u @ v, -1.0, 1.0))

        u = jnp.array([0.6, 0.8])
        print(jax.grad(angle)(u, u))
        ```

        ```text
        [-0. -0.]
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    The values of `jnp.arccos`: NaN outside of [-1, 1].

    **Derivative:**

    $\dot y = -\dot x / \sqrt{(1 - x)(1 + x)}$. At the ends, where the true derivative is
    infinite, it is zero: the angle between two vectors has its minimum or maximum there. It is
    zero outside as well. Both modes and all orders; the second derivative is NaN at the ends.
    """
    return jnp.arccos(x)


@real_function(lambda _, x: corner(_arcsin_slope(x), jnp.abs(x) == 1, x))
def arcsin(x: Numbers) -> Array:
    r"""Return `jnp.arcsin(x)`, with a zero derivative at 1 and -1.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(jax.grad(eqg.safe.arcsin)(0.6))
        print(jax.grad(eqg.safe.arcsin)(1.0))
        ```

        ```text
        1.25
        0.0
        ```

    **Arguments:**

    - `x`: real.

    **Returns:**

    The values of `jnp.arcsin`: NaN outside of [-1, 1].

    **Derivative:**

    $\dot y = \dot x / \sqrt{(1 - x)(1 + x)}$. The derivative is zero outside of [-1, 1], and
    at 1 and -1, where this formula is infinite. Both modes and all orders; the second
    derivative is NaN at the ends.
    """
    return jnp.arcsin(x)
