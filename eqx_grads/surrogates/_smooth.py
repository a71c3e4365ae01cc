"""Smooth surrogates with tails: derivatives of sigmoids, and Gaussians."""

import math

from .._rules.float_args import Parameter
from ._abstract import AbstractFormula, positive
from ._steps import cauchy, logistic, normal, softsign


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
        return 0.5 + softsign(self.slope * v) / self.slope


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
        return cauchy(self.slope * v)


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
        return logistic(self.slope * v)


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
        return normal(v / (math.sqrt(2) * self.sigma))


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
        gaussian = lambda v, sigma: normal(v / (math.sqrt(2) * sigma))
        wide = self.spread * self.sigma
        sides = gaussian(v - self.sigma, wide) + gaussian(v + self.sigma, wide)
        return (
            self.height / 2 + (1 + self.height) * gaussian(v, self.sigma) - self.height * sides
        )
