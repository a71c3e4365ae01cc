"""To a few values, straight through: signs, steps, a window, the largest of several."""

import functools as ft

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, PyTree

from .._errors import rule_error
from .._rules.custom_jvp import custom_jvp
from .._rules.float_args import as_floats, check_positive, constant, map_floats, spread, widen
from .._rules.replace_gradient import replace_gradient
from ._wrap import Backward, wrap


def sign(x: PyTree, *, backward: Backward = "hard_tanh") -> PyTree:
    r"""`jnp.sign`, straight through: zero stays zero.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([-0.3, 0.0, 2.0])
        assert jnp.array_equal(eqg.ste.sign(x), jnp.array([-1.0, 0.0, 1.0]))
        grad = jax.grad(lambda x: eqg.ste.sign(x).sum())(x)
        assert jnp.array_equal(grad, jnp.array([1.0, 1.0, 0.0]))  # the last is far away
        ```

    **Arguments:**

    - `x`: an array of floats, or a PyTree of them. Other leaves are left as they are.
    - `backward`: as for [`eqx_grads.ste.wrap`][].

    **Returns:**

    The signs: -1, 0 or 1, NaN where `x` is.

    **Derivative:**

    By default that of `jax.nn.hard_tanh`, one where $|x| \le 1$ and zero elsewhere; see
    [`eqx_grads.ste.wrap`][].

    **Raises:**

    As [`eqx_grads.ste.round`][].
    """
    return map_floats("ste.sign", wrap(jnp.sign, backward=backward), x)


def binary_sign(x: PyTree, *, backward: Backward = "hard_tanh") -> PyTree:
    """The sign as one bit, straight through: that of zero is plus one.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([-0.3, 0.0, 2.0])
        assert jnp.array_equal(eqg.ste.binary_sign(x), jnp.array([-1.0, 1.0, 1.0]))
        grad = jax.grad(lambda x: eqg.ste.binary_sign(x).sum())(x)
        assert jnp.array_equal(grad, jnp.array([1.0, 1.0, 0.0]))

        # Weights as in XNOR-Net: with the size that they had.
        weight = jnp.array([[0.1, -0.2], [0.3, 0.4]])
        binary = eqg.ste.binary_sign(weight) * jnp.mean(jnp.abs(weight))
        assert jnp.allclose(binary, jnp.array([[0.25, -0.25], [0.25, 0.25]]))
        ```

    **Arguments:**

    - `x`, `backward`: as for [`eqx_grads.ste.sign`][].

    **Returns:**

    -1 or 1, NaN where `x` is.

    **Derivative:**

    As for [`eqx_grads.ste.sign`][].

    **Raises:**

    As [`eqx_grads.ste.round`][].
    """
    return map_floats("ste.binary_sign", wrap(_binary_sign, backward=backward), x)


def _binary_sign(x):
    return 2 * _heaviside(x, at_zero=1) - 1


def heaviside(
    x: PyTree, *, at_zero: ArrayLike = 1.0, backward: Backward = "identity"
) -> PyTree:
    """The step from zero to one, straight through.

    For a spiking neuron there is [`eqx_grads.surrogates.spike`][].

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        assert eqg.ste.heaviside(-0.5) == 0.0
        assert jax.grad(eqg.ste.heaviside)(-0.5) == 1.0
        assert jax.grad(lambda x: eqg.ste.heaviside(x, backward=jax.nn.sigmoid))(0.0) == 0.25
        ```

    **Arguments:**

    - `x`: as for [`eqx_grads.ste.sign`][].
    - `at_zero`: the value at zero. With the default, `binary_sign` is twice this less one.
    - `backward`: as for [`eqx_grads.ste.wrap`][].

    **Returns:**

    0 or 1 (or `at_zero`), NaN where `x` is.

    **Derivative:**

    By default that of the identity, one everywhere; see [`eqx_grads.ste.wrap`][].

    **Raises:**

    As [`eqx_grads.ste.round`][].
    """
    at_zero = constant("ste.heaviside", "value at zero", at_zero)
    step = ft.partial(wrap(_heaviside, backward=backward), at_zero=at_zero)
    return map_floats("ste.heaviside", step, x)


def _heaviside(x, *, at_zero):
    return jnp.heaviside(x, jnp.asarray(at_zero).astype(x.dtype))


def ternary(
    x: PyTree,
    *,
    threshold: ArrayLike | str = 0.05,
    backward: Backward = "hard_tanh",
) -> PyTree:
    r"""To -1, 0 or 1, straight through: zero within a threshold.

    [Li et al. (2016)](https://arxiv.org/abs/1605.04711).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([-0.3, 0.02, 2.0])
        assert jnp.array_equal(eqg.ste.ternary(x), jnp.array([-1.0, 0.0, 1.0]))
        grad = jax.grad(lambda x: eqg.ste.ternary(x).sum())(x)
        assert jnp.array_equal(grad, jnp.array([1.0, 1.0, 0.0]))
        ```

    **Arguments:**

    - `x`, `backward`: as for [`eqx_grads.ste.sign`][].
    - `threshold`: a number (0.05 as in Larq), or an array that broadcasts to `x`. Or
        `"mean"`, which is 0.7 of the mean of $|x|$ over a whole leaf, as in ternary weight
        networks.

    **Returns:**

    The signs of those values that are farther from zero than the threshold, zero for the
    others. NaN where `x` is.

    **Derivative:**

    As for [`eqx_grads.ste.sign`][]; the threshold is a constant.

    **Raises:**

    As [`eqx_grads.ste.round`][], and if the threshold is differentiated.
    """
    if not isinstance(threshold, str):
        threshold = constant("ste.ternary", "threshold", threshold)
    elif threshold != "mean":
        raise rule_error(
            "`ste.ternary` was given no such thing as a threshold.",
            f"it is {threshold!r:.80}",
            do='Give it a number, an array or "mean".',
        )
    to_three = ft.partial(wrap(_ternary, backward=backward), threshold=threshold)
    return map_floats("ste.ternary", to_three, x)


def _ternary(x, *, threshold):
    size = jnp.abs(x)
    if isinstance(threshold, str):
        mean = jnp.mean(widen(size)).astype(x.dtype)
        limit = jnp.asarray(0.7, x.dtype) * mean
    else:
        limit = spread("ste.ternary", "threshold", threshold, x)
    return jnp.where(size <= limit, 0, jnp.sign(x))


def clip(x: PyTree, min: ArrayLike | None = None, max: ArrayLike | None = None) -> PyTree:
    r"""`jnp.clip`, straight through: what is clipped has a gradient still.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        assert eqg.ste.clip(3.0, 0.0, 1.0) == 1.0
        assert jax.grad(eqg.ste.clip)(3.0, 0.0, 1.0) == 1.0
        assert jax.grad(eqg.ste.clip, argnums=2)(3.0, 0.0, 1.0) == 1.0
        ```

    **Arguments:**

    - `x`: an array of floats, or a PyTree of them. Other leaves are left as they are.
    - `min`, `max`: the ends, numbers or arrays that broadcast to every leaf of `x`. `None`
        is no end.

    **Returns:**

    `x` within the ends; `max` where they cross.

    **Derivative:**

    With respect to `x` that of the identity: $\bar x = \bar y$. With respect to an end, one
    where it is the value and zero elsewhere; where `x` is at the end, zero. Both modes and
    all orders, the higher ones being zero.

    **Raises:**

    As [`eqx_grads.ste.round`][], and if an end does not broadcast to `x`.
    """
    return map_floats("ste.clip", ft.partial(_clip_leaf, min, max), x)


def _clip_leaf(min, max, x):
    min = -jnp.inf if min is None else min
    max = jnp.inf if max is None else max
    return _clip(x, spread("ste.clip", "min", min, x), spread("ste.clip", "max", max, x))


@custom_jvp
def _clip(x, min, max):
    return jnp.clip(x, min, max)


@_clip.def_jvp
def _clip_jvp(primals, tangents):
    x, min, max = primals
    t_x, t_min, t_max = tangents
    above = jnp.maximum(x, min) > max
    t_ends = jnp.where(above, t_max, jnp.where(x < min, t_min, 0))
    return _clip(x, min, max), t_x + t_ends


def one_hot_argmax(x: ArrayLike, *, axis: int = -1, temperature: ArrayLike = 1.0) -> Array:
    r"""A one for the largest along an axis and zeros for the others, with the derivative of
    a softmax.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([1.0, 3.0, 2.0])
        assert jnp.array_equal(eqg.ste.one_hot_argmax(x), jnp.array([0.0, 1.0, 0.0]))
        grad = jax.grad(lambda x: eqg.ste.one_hot_argmax(x)[1])(x)
        assert jnp.allclose(grad, jax.grad(lambda x: jax.nn.softmax(x)[1])(x))
        ```

    **Arguments:**

    - `x`: floats, of any shape with that axis.
    - `axis`: that along which to compare.
    - `temperature`: of the softmax; positive. It may be learned.

    **Returns:**

    An array like `x`; the first of equals wins.

    **Derivative:**

    That of `softmax(x / temperature)`, with respect to both. Both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is not an array of floats, or if the temperature is a
    number that is not positive.
    """
    check_positive("ste.one_hot_argmax", "temperature", temperature)
    x = as_floats("ste.one_hot_argmax", x)
    wide = widen(x)
    spread_out = wide / spread("ste.one_hot_argmax", "temperature", temperature, wide)
    soft = jax.nn.softmax(spread_out, axis).astype(x.dtype)
    hard = jax.nn.one_hot(jnp.argmax(x, axis), x.shape[axis], dtype=x.dtype, axis=axis)
    return replace_gradient(hard, soft)
