"""Surrogates that are given by a formula, the formula of the primitive: smooth ones with tails,
and piecewise ones."""

import abc
import dataclasses
import functools as ft
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._rules import float_args
from .._rules.elementwise import elementwise
from .._rules.float_args import Parameter
from ._spike import AbstractSurrogate


positive = ft.partial(eqx.field, metadata={"check": float_args.check_positive})


class AbstractFormula(AbstractSurrogate):
    """One formula, evaluated in at least single precision and rounded to the dtype of `v`. It
    has the derivative of the formula."""

    @abc.abstractmethod
    def _primitive(self, v: Any) -> Any:
        """The primitive at `v`, where `v` and all fields are arrays of one dtype."""

    def __check_init__(self):
        for field in dataclasses.fields(self):
            check = field.metadata.get("check", float_args.check_parameter)
            check(_name(self), field.name, getattr(self, field.name))

    def derivative(self, v: ArrayLike) -> Array:
        """As in [`eqx_grads.surrogates.AbstractSurrogate`][]."""
        return _evaluate(self, v, lambda fn, v: jax.jvp(fn, (v,), (jnp.ones_like(v),))[1])

    def primitive(self, v: ArrayLike) -> Array:
        """As in [`eqx_grads.surrogates.AbstractSurrogate`][]."""
        return _evaluate(self, v, lambda fn, v: fn(v))


def _evaluate(surrogate, v, of_primitive):
    v = float_args.as_floats(_name(surrogate), v, "v")
    for field in dataclasses.fields(surrogate):  # checks them
        x = getattr(surrogate, field.name)
        float_args.broadcast_parameter(_name(surrogate), f"`{field.name}`", x, v)
    wide = float_args.widen(v)
    surrogate = jax.tree.map(lambda x: jnp.asarray(x).astype(wide.dtype), surrogate)
    return of_primitive(surrogate._primitive, wide).astype(v.dtype)


def _name(surrogate):
    return f"surrogates.{type(surrogate).__name__}"


# ---------------------------------------------------------------- smooth steps
# Each has its density beside it where autodiff of the step would lose digits in a tail, or
# would not have the value at a kink or at NaN that the documentation gives.


def _abs(u):
    """`|u|`, with the derivative zero at zero: a density has its maximum there."""
    return u * jnp.sign(u)


@elementwise(derivative=lambda _, u: 1 / (1 + _abs(u)) ** 2)
def _softsign(u):
    """From minus one to one: the density has area two."""
    return jnp.sign(u) / (1 + 1 / jnp.abs(u))  # u / (1 + |u|), and not NaN at infinity


_logistic = elementwise(jax.nn.sigmoid, lambda _, u: jax.nn.sigmoid(u) * jax.nn.sigmoid(-u))


def _normal(v, sigma):
    return 0.5 * jax.scipy.special.erfc(-(v / (math.sqrt(2) * sigma)))


@elementwise(derivative=lambda _, u: jnp.maximum(1 - _abs(u), 0))
def _tent(u):
    tail = 0.5 * jnp.maximum(1 - jnp.abs(u), 0) ** 2
    return jnp.where(u < 0, tail, 1 - tail)


def _above(u):
    """One above zero, a half at zero, and NaN at NaN."""
    return 0.5 + 0.5 * jnp.sign(u)


_relu = elementwise(lambda u: jnp.maximum(u, 0), lambda _, u: _above(u))


@elementwise(
    derivative=(
        lambda _, u, end: _above(end - jnp.abs(u)),
        lambda _, u, end: jnp.sign(u) * _above(jnp.abs(u) - end),
    )
)
def _ramp(u, end):
    return jnp.clip(u, -end, end)


# ---------------------------------------------------------------- smooth


class superspike(AbstractFormula):
    r"""The derivative of a fast sigmoid.

    $$g(v) = \frac{1}{(1 + \text{slope} \cdot |v|)^2}$$

    Peak 1, area 2/slope.

    [Zenke and Ganguli (2018)](https://doi.org/10.1162/neco_a_01086).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        superspike = eqg.surrogates.superspike(slope=10.0)
        print(jax.grad(eqg.surrogates.spike)(0.0, superspike))
        print(jax.grad(eqg.surrogates.spike)(0.1, superspike))
        ```

        ```text
        1.0
        0.25
        ```

    **Arguments:**

    - `slope`: positive, a number or an array that broadcasts to `v`. The default is the same as
        in snnTorch and Spyx.

    **Derivative:**

    See [`eqx_grads.surrogates.spike`][]. At the peak, where $g$ has a kink, the
    derivative of $g$ is zero.
    """

    slope: Parameter = positive(default=25.0)

    def _primitive(self, v):
        return 0.5 + _softsign(self.slope * v) / self.slope


class atan(AbstractFormula):
    r"""The derivative of an arctangent, which is the density of a Cauchy distribution.

    $$g(v) = \frac{\text{slope} / 2}{1 + (\pi \cdot \text{slope} \cdot v / 2)^2}$$

    Peak slope/2, area 1.

    [Fang et al. (2021)](https://arxiv.org/abs/2007.05785).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        atan = eqg.surrogates.atan()
        print(jax.grad(eqg.surrogates.spike)(0.0, atan))
        print(atan.primitive(0.0))
        ```

        ```text
        1.0
        0.5
        ```

    **Arguments:**

    - `slope`: positive, a number or an array that broadcasts to `v`. The default is the same as
        in snnTorch and SpikingJelly.

    **Derivative:**

    See [`eqx_grads.surrogates.spike`][]. Smooth.
    """

    slope: Parameter = positive(default=2.0)

    def _primitive(self, v):
        # Not `0.5 + arctan(...) / pi`, which cancels in the left tail.
        u = -math.pi / 2 * (self.slope * v)
        return jnp.arctan2(jnp.ones_like(u), u) / math.pi


class sigmoid(AbstractFormula):
    r"""The derivative of the logistic function.

    $$g(v) = \text{slope} \cdot \sigma(\text{slope} \cdot v)\,\sigma(-\text{slope} \cdot v)$$

    Peak slope/4, area 1.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        sigmoid = eqg.surrogates.sigmoid()
        print(jax.grad(eqg.surrogates.spike)(0.0, sigmoid))
        print(sigmoid.derivative(-1e30))
        ```

        ```text
        1.0
        0.0
        ```

    **Arguments:**

    - `slope`: positive, a number or an array that broadcasts to `v`. The default is the same as
        in SpikingJelly and BrainTools; snnTorch has 25.

    **Derivative:**

    See [`eqx_grads.surrogates.spike`][]. Smooth.
    """

    slope: Parameter = positive(default=4.0)

    def _primitive(self, v):
        return _logistic(self.slope * v)


class gaussian(AbstractFormula):
    r"""The density of a normal distribution, in terms of its standard deviation.

    $$g(v) = N(v; 0, \sigma) = \frac{1}{\sqrt{2\pi}\,\sigma}\,e^{-v^2 / 2\sigma^2}$$

    Peak 1/(√(2π) σ), which is 0.8 by default, and area 1.

    [Yin, Corradi and Bohté (2020)](https://arxiv.org/abs/2005.11633).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        gaussian = eqg.surrogates.gaussian(sigma=1.0)
        slope = jax.grad(eqg.surrogates.spike)(0.0, gaussian)
        print(f"{slope:.3f}")
        ```

        ```text
        0.399
        ```

    **Arguments:**

    - `sigma`: positive, a number or an array that broadcasts to `v`; in the units of `v`.

    **Derivative:**

    See [`eqx_grads.surrogates.spike`][]. Smooth.
    """

    sigma: Parameter = positive(default=0.5)

    def _primitive(self, v):
        return _normal(v, self.sigma)


class multi_gaussian(AbstractFormula):
    r"""A Gaussian minus a wide Gaussian on either side: negative away from the threshold.

    $$g(v) = (1 + h)\,N(v; 0, \sigma) - h\,N(v; \sigma, s\sigma) - h\,N(v; -\sigma, s\sigma)$$

    with height $h$ and spread $s$. Peak 0.88 by default, and area $1 - h$.

    [Yin, Corradi and Bohté (2021)](https://doi.org/10.1038/s42256-021-00397-w). Their code, and
    BrainTools, use half this slope.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        multi_gaussian = eqg.surrogates.multi_gaussian()
        print(f"{jax.grad(eqg.surrogates.spike)(0.0, multi_gaussian):.2f}")
        print(f"{jax.grad(eqg.surrogates.spike)(2.0, multi_gaussian):.2f}")
        ```

        ```text
        0.88
        -0.03
        ```

    **Arguments:**

    - `sigma`: positive, a number or an array that broadcasts to `v`; in the units of `v`.
    - `height`: the height of the wide Gaussians, relative to the narrow one.
    - `spread`: the width of the wide Gaussians, relative to the narrow one; positive.

    **Derivative:**

    See [`eqx_grads.surrogates.spike`][]. Smooth.
    """

    sigma: Parameter = positive(default=0.5)
    height: Parameter = 0.15
    spread: Parameter = positive(default=6.0)

    def _primitive(self, v):
        wide, height = self.spread * self.sigma, self.height
        sides = _normal(v - self.sigma, wide) + _normal(v + self.sigma, wide)
        return height / 2 + (1 + height) * _normal(v, self.sigma) - height * sides


# ---------------------------------------------------------------- piecewise


class triangle(AbstractFormula):
    r"""A triangle with its peak at the threshold.

    $$g(v) = \text{peak} \cdot \max(0,\ 1 - |v| / \text{width})$$

    Area peak · width, which is 1 by default.

    [Esser et al. (2016)](https://arxiv.org/abs/1603.08270); with a peak of 0.3,
    [Bellec et al. (2018)](https://arxiv.org/abs/1803.09574).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        triangle = eqg.surrogates.triangle(peak=0.5)
        print(jax.grad(eqg.surrogates.spike)(0.0, triangle))
        print(jax.grad(eqg.surrogates.spike)(0.5, triangle))
        print(jax.grad(eqg.surrogates.spike)(2.0, triangle))
        ```

        ```text
        0.5
        0.25
        0.0
        ```

    **Arguments:**

    - `width`: half of the base of the triangle; positive, a number or an array that
        broadcasts to `v`, in the units of `v`.
    - `peak`: the height, a number or an array that broadcasts to `v`.

    **Derivative:**

    See [`eqx_grads.surrogates.spike`][]. The derivative of $g$ is zero at the
    peak, and the average of both sides at $|v| = \text{width}$.
    """

    width: Parameter = positive(default=1.0)
    peak: Parameter = 1.0

    def _primitive(self, v):
        return 0.5 + self.peak * self.width * (_tent(v / self.width) - 0.5)


class rectangle(AbstractFormula):
    r"""A rectangle around the threshold.

    $$g(v) = \text{peak} \ \text{ where } |v| < \text{width} / 2$$

    and zero elsewhere. Area peak · width, which is 1 by default.

    [Wu et al. (2018)](https://doi.org/10.3389/fnins.2018.00331).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        rectangle = eqg.surrogates.rectangle(width=2.0, peak=0.5)
        print(jax.grad(eqg.surrogates.spike)(0.9, rectangle))
        print(jax.grad(eqg.surrogates.spike)(1.1, rectangle))
        ```

        ```text
        0.5
        0.0
        ```

    **Arguments:**

    - `width`: of the rectangle; positive, a number or an array that broadcasts to `v`, in
        the units of `v`.
    - `peak`: the height, a number or an array that broadcasts to `v`.

    **Derivative:**

    See [`eqx_grads.surrogates.spike`][]. At the edges $g$ is the average, half of the peak.
    The derivative of $g$ is zero everywhere.
    """

    width: Parameter = positive(default=1.0)
    peak: Parameter = 1.0

    def _primitive(self, v):
        return 0.5 + self.peak * _ramp(v, self.width / 2)


class leaky(AbstractFormula):
    r"""The derivative of a leaky ReLU.

    $$g(v) = \text{slope} \ \text{ where } v > 0, \qquad \text{leak} \ \text{ where } v < 0$$

    No peak, and an infinite area: its primitive is unbounded.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        leaky = eqg.surrogates.leaky(leak=0.25)
        print(jax.grad(eqg.surrogates.spike)(3.0, leaky))
        print(jax.grad(eqg.surrogates.spike)(-3.0, leaky))
        ```

        ```text
        1.0
        0.25
        ```

    **Arguments:**

    - `leak`: a number or an array that broadcasts to `v`. The default is the same as in
        snnTorch and BrainTools; SpikingJelly has 0.
    - `slope`: a number or an array that broadcasts to `v`.

    **Derivative:**

    See [`eqx_grads.surrogates.spike`][]. At zero $g$ is the average of the two. The
    derivative of $g$ is zero everywhere.
    """

    leak: Parameter = 0.1
    slope: Parameter = 1.0

    def _primitive(self, v):
        return 0.5 + self.slope * _relu(v) - self.leak * _relu(-v)
