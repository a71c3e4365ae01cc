"""To a grid of numbers, straight through; and what the grid learns from that."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._errors import rule_error
from .._rules.custom_jvp import custom_jvp
from .._rules.float_args import as_bits, as_floats, check_positive, spread, widen
from .._rules.replace_gradient import replace_gradient
from ._rounding import round as round_


def fake_quantize(
    x: ArrayLike,
    scale: ArrayLike,
    zero_point: ArrayLike = 0.0,
    *,
    bits: int = 8,
    signed: bool = True,
    narrow: bool = False,
) -> Array:
    r"""To the numbers that an integer of a few bits can stand for, straight through.

    $$q = \operatorname{clip}(\operatorname{round}(x / s) + z,\ q_\min,\ q_\max),
    \qquad y = (q - z)\,s$$

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([0.3, -0.9, 5.0])
        y = eqg.ste.fake_quantize(x, 0.25, bits=3)
        assert jnp.array_equal(y, jnp.array([0.25, -1.0, 0.75]))

        # What is off the scale has no gradient, and moves it instead.
        loss = lambda x, scale: eqg.ste.fake_quantize(x, scale, bits=3).sum()
        ct_x, ct_scale = jax.grad(loss, (0, 1))(x, 0.25)
        assert jnp.array_equal(ct_x, jnp.array([1.0, 1.0, 0.0]))
        assert jnp.allclose(ct_scale, (1 - 1.2) + (-4 + 3.6) + 3)
        ```

    **Arguments:**

    - `x`: floats of any shape.
    - `scale`: the step of the grid. Positive, a number or an array that broadcasts to `x`:
        with ones for the axes that share a scale.
    - `zero_point`: which integer stands for zero, likewise. It is rounded.
    - `bits`: 2 to 24, or 1 if not `signed`.
    - `signed`: whether the integers go from $-2^{b-1}$ to $2^{b-1} - 1$, or from zero to
        $2^b - 1$.
    - `narrow`: whether to leave out the lowest one, so that signed ones are symmetric.

    **Returns:**

    An array like `x` with at most $2^b$ different values for each scale. Half precision is
    computed in single precision.

    **Derivative:**

    With $u = x / s$: where $q$ is not clipped,
    $\dot y = \dot x + (\operatorname{round}(u) - u)\,\dot s$; where it is clipped,
    $\dot y = (q - z)\,\dot s - s\,\dot z$. The reverse rule is the transpose, summed over
    the elements that share a scale. What is rounded to an end is not clipped. Both modes and
    all orders: straight through, $\operatorname{round}(u) - u$ is a constant.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is not an array of floats, if a parameter does not
    broadcast to it, or if there is no such number of bits.
    """
    low, high = _integers("ste.fake_quantize", bits, signed)
    check_positive("ste.fake_quantize", "scale", scale)
    x = as_floats("ste.fake_quantize", x)
    wide = widen(x)
    scale = spread("ste.fake_quantize", "scale", scale, wide)
    zero_point = round_(spread("ste.fake_quantize", "zero point", zero_point, wide))
    low = low + 1 if narrow else low
    return _fake_quantize(wide, scale, zero_point, low=low, high=high).astype(x.dtype)


@custom_jvp
def _fake_quantize(x, scale, zero_point, *, low, high):
    q = jnp.clip(jnp.round(x / scale) + zero_point, low, high)
    return (q - zero_point) * scale


@_fake_quantize.def_jvp
def _fake_quantize_jvp(primals, tangents, *, low, high):
    x, scale, zero_point = primals
    t_x, t_scale, t_zero_point = tangents
    q = jnp.round(x / scale) + zero_point
    inside = (low <= q) & (q <= high)
    off_scale = jnp.clip(q, low, high) - zero_point
    error = _rounding_error(x / scale, inside)
    t_out = jnp.where(inside, t_x + error * t_scale, off_scale * t_scale - scale * t_zero_point)
    return _fake_quantize(x, scale, zero_point, low=low, high=high), t_out


def _rounding_error(u, inside):
    """Straight through, it has no derivative. Zero outside, where it may be infinite."""
    return jnp.where(inside, jax.lax.stop_gradient(jnp.round(u) - u), 0)


def absmax_scale(
    x: ArrayLike,
    *,
    bits: int = 8,
    signed: bool = True,
    axis: int | tuple[int, ...] | None = None,
) -> Array:
    r"""The scale at which the largest of some numbers is the largest integer.

    $$s = \max |x| / q_\max$$

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        weight = jnp.array([[0.5, -1.0, 0.1], [3.0, 2.0, 1.0]])
        scale = eqg.ste.absmax_scale(weight, bits=3, axis=1)  # one for each row
        assert jnp.allclose(scale, jnp.array([[1 / 3], [1.0]]))

        quantize = lambda w: eqg.ste.fake_quantize(w, eqg.ste.absmax_scale(w))
        assert jnp.allclose(quantize(weight), weight, atol=0.02)
        assert jnp.array_equal(jax.grad(lambda w: quantize(w).sum())(weight), jnp.ones((2, 3)))
        ```

    **Arguments:**

    - `x`: floats of any shape.
    - `bits`, `signed`: as for [`eqx_grads.ste.fake_quantize`][].
    - `axis`: the axes that share a scale, all of them by default.

    **Returns:**

    The scales: an array of the shape of `x` with ones for these axes (for all of them, of
    shape `()`), so that it broadcasts to `x`. Where all of `x` is zero, the smallest normal
    number.

    **Derivative:**

    Zero: the scale is a constant, as `jax.lax.stop_gradient` makes it. For one that is
    learned, see [`eqx_grads.ste.lsq`][].

    **Raises:**

    As [`eqx_grads.ste.fake_quantize`][].
    """
    _, high = _integers("ste.absmax_scale", bits, signed)
    x = jax.lax.stop_gradient(as_floats("ste.absmax_scale", x))
    largest = jnp.max(jnp.abs(x), axis, keepdims=axis is not None, initial=0)
    exact = widen(largest) / high
    scale = exact.astype(x.dtype)
    # Rounded up in half precision, lest the largest number be clipped.
    scale = jnp.where(
        widen(scale) < exact, jnp.nextafter(scale, jnp.full_like(scale, jnp.inf)), scale
    )
    return jnp.maximum(scale, jnp.finfo(x.dtype).tiny)


def lsq(
    x: ArrayLike,
    step: ArrayLike,
    *,
    bits: int = 8,
    signed: bool = True,
    gradient_scale: float | None = None,
) -> Array:
    r"""Learned step size quantization: as `fake_quantize`, with a gradient for the step that
    is of the size of those of weights.

    [Esser et al. (2020)](https://arxiv.org/abs/1902.08153). A step begins well at
    `2 * mean(|x|) / sqrt(q_max)`, and has to stay positive.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([0.3, -0.9, 5.0])
        assert jnp.array_equal(eqg.ste.lsq(x, 0.25, bits=3), jnp.array([0.25, -1.0, 0.75]))

        loss = lambda x, step: eqg.ste.lsq(x, step, bits=3).sum()
        ct_x, ct_step = jax.grad(loss, (0, 1))(x, 0.25)
        assert jnp.array_equal(ct_x, jnp.array([1.0, 1.0, 0.0]))
        assert jnp.allclose(ct_step, ((1 - 1.2) + (-4 + 3.6) + 3) / jnp.sqrt(3 * 3.0))
        ```

    **Arguments:**

    - `x`: floats of any shape.
    - `step`: positive, a number or an array that broadcasts to `x`.
    - `bits`, `signed`: as for [`eqx_grads.ste.fake_quantize`][]; two bits or more, or one if
        not `signed`.
    - `gradient_scale`: $g$ below. By default $1 / \sqrt{N q_\max}$, where $N$ is how many
        elements of `x` share a step. The paper leaves the batch out of $N$: give it
        yourself if `x` is a batch of activations.

    **Returns:**

    An array like `x` with at most $2^b$ different values for each step.

    **Derivative:**

    With $u = x / s$: where $q_\min < u < q_\max$,
    $\dot y = \dot x + (\operatorname{round}(u) - u)\,g\,\dot s$; elsewhere
    $\dot y = q\,g\,\dot s$ with $q$ the end of the range. The reverse rule is the
    transpose. As published, the ends count as clipped, and so does what would be rounded to
    them from outside. Forward mode has the factor $g$ too. Both modes and all orders,
    the higher ones being zero.

    **Raises:**

    As [`eqx_grads.ste.fake_quantize`][].
    """
    low, high = _integers("ste.lsq", bits, signed)
    check_positive("ste.lsq", "step", step)
    x, step = as_floats("ste.lsq", x), jnp.asarray(step)
    if gradient_scale is None:
        sharing = max(x.size, 1) / max(step.size, 1)
        gradient_scale = 1 / math.sqrt(sharing * high)
    wide = widen(x)
    step = spread("ste.lsq", "step", step, wide)
    out = _lsq(wide, step, low=low, high=high, gradient_scale=gradient_scale)
    return out.astype(x.dtype)


@custom_jvp
def _lsq(x, step, *, low, high, gradient_scale):
    del gradient_scale
    levels = jnp.round(jnp.clip(x / step, low, high))
    return jnp.where(levels == 0, 0, levels) * step  # and not minus zero


@_lsq.def_jvp
def _lsq_jvp(primals, tangents, *, low, high, gradient_scale):
    x, step = primals
    t_x, t_step = tangents
    u = x / step
    inside = (low < u) & (u < high)
    end = jnp.clip(jax.lax.stop_gradient(u), low, high)
    error = jnp.where(inside, _rounding_error(u, inside), end)
    out = _lsq(x, step, low=low, high=high, gradient_scale=gradient_scale)
    return out, jnp.where(inside, t_x, 0) + error * gradient_scale * t_step


def dorefa(x: ArrayLike, *, bits: int = 2, mode: str = "weights") -> Array:
    r"""The quantizers of DoReFa-Net: to $2^b$ numbers from minus one (or zero) to one.

    With $Q(u) = \operatorname{round}(u\,(2^b - 1)) / (2^b - 1)$, weights become
    $2\,Q\!\left(\frac{\tanh x}{2 \max |\tanh x|} + \frac12\right) - 1$ and activations
    $Q(\operatorname{clip}(x, 0, 1))$. [Zhou et al.
    (2016)](https://arxiv.org/abs/1606.06160).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        weight = jnp.array([0.3, -0.9, 0.01, 2.0])
        values = eqg.ste.dorefa(weight, bits=2)
        assert set((3 * values).round().tolist()) <= {-3.0, -1.0, 1.0, 3.0}
        assert jax.grad(lambda w: eqg.ste.dorefa(w, bits=2).sum())(weight).min() > 0

        activation = lambda x: eqg.ste.dorefa(x, bits=2, mode="activations")
        assert (jax.grad(activation)(0.5), jax.grad(activation)(1.5)) == (1.0, 0.0)
        ```

    **Arguments:**

    - `x`: floats of any shape.
    - `bits`: 1 to 24.
    - `mode`: `"weights"` or `"activations"`.

    **Returns:**

    An array like `x` with at most $2^b$ different values.

    **Derivative:**

    That of the formula, with $Q$ straight through and the maximum a constant:
    $\dot y = (1 - \tanh^2 x)\,\dot x / \max |\tanh x|$ for weights, and for activations
    $\dot x$ where $0 \le x \le 1$ and zero elsewhere. Both modes and all orders.

    **Raises:**

    As [`eqx_grads.ste.fake_quantize`][], and if there is no such mode.
    """
    _, levels = _integers("ste.dorefa", bits, signed=False)
    x = as_floats("ste.dorefa", x)
    wide = widen(x)
    if mode == "activations":
        inside = (wide >= 0) & (wide <= 1)  # the ends too
        unit = jnp.where(inside, wide, jnp.clip(jax.lax.stop_gradient(wide), 0, 1))
        return _to_levels(unit, levels).astype(x.dtype)
    if mode != "weights":
        raise rule_error(
            "`ste.dorefa` was given no such thing as a mode.",
            f"it is {mode!r:.80}",
            do='Give it "weights" or "activations".',
        )
    squashed = jnp.tanh(wide)
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(squashed)), initial=0)
    largest = jnp.maximum(largest, jnp.finfo(wide.dtype).tiny)
    unit = squashed / (2 * largest) + 0.5
    return (2 * _to_levels(unit, levels) - 1).astype(x.dtype)


def _to_levels(unit, levels):
    return replace_gradient(_level(unit, levels), unit)


def _level(unit, levels):
    """From zero to one; the last is one to the bit, though XLA multiplies by an inverse."""
    integer = jnp.round(unit * levels)
    return jnp.where(integer >= levels, 1, integer / levels)


def pact(x: ArrayLike, alpha: ArrayLike, *, bits: int = 8) -> Array:
    r"""Parameterized clipping activation: a ReLU that ends at a learned height, quantized.

    $$y = \operatorname{clip}(x, 0, \alpha), \qquad
    y_q = \operatorname{round}\!\left(y\,\frac{2^b - 1}{\alpha}\right) \frac{\alpha}{2^b - 1}$$

    [Choi et al. (2018)](https://arxiv.org/abs/1805.06085).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([-1.0, 0.4, 3.0])
        y = eqg.ste.pact(x, 1.5, bits=2)
        assert jnp.array_equal(y, jnp.array([0.0, 0.5, 1.5]))
        ct_x, ct_alpha = jax.grad(lambda *a: eqg.ste.pact(*a, bits=2).sum(), (0, 1))(x, 1.5)
        assert jnp.array_equal(ct_x, jnp.array([0.0, 1.0, 0.0]))
        assert ct_alpha == 1.0
        ```

    **Arguments:**

    - `x`: floats of any shape.
    - `alpha`: where to clip. Positive, a number or an array that broadcasts to `x`.
    - `bits`: 1 to 24.

    **Returns:**

    An array like `x` with at most $2^b$ different values for each `alpha`.

    **Derivative:**

    As published: $\dot y = \dot x$ where $0 \le x < \alpha$, $\dot y = \dot\alpha$ where
    $x \ge \alpha$, and zero elsewhere. Both modes and all orders, the higher ones being zero.

    **Raises:**

    As [`eqx_grads.ste.fake_quantize`][].
    """
    _, levels = _integers("ste.pact", bits, signed=False)
    check_positive("ste.pact", "alpha", alpha)
    x = as_floats("ste.pact", x)
    wide = widen(x)
    alpha = spread("ste.pact", "alpha", alpha, wide)
    return _pact(wide, alpha, levels=levels).astype(x.dtype)


@custom_jvp
def _pact(x, alpha, *, levels):
    return _level(jnp.clip(x / alpha, 0, 1), levels) * alpha


@_pact.def_jvp
def _pact_jvp(primals, tangents, *, levels):
    x, alpha = primals
    t_x, t_alpha = tangents
    t_out = jnp.where(x >= alpha, t_alpha, jnp.where(x >= 0, t_x, 0))
    return _pact(x, alpha, levels=levels), t_out


def _integers(name, bits, signed):
    """The smallest and the largest integer."""
    bits = as_bits(name, bits, signed)
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
