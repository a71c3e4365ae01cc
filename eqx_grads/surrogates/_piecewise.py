"""Piecewise-linear surrogates: triangle, rectangle, leaky."""

from .._rules.float_args import Parameter
from ._abstract import AbstractFormula, positive
from ._steps import ramp, relu, tent


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
        return 0.5 + self.peak * self.width * (tent(v / self.width) - 0.5)


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
        return 0.5 + self.peak * ramp(v, self.width / 2)


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
        return 0.5 + self.slope * relu(v) - self.leak * relu(-v)
