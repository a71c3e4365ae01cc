"""The spike function (Heaviside) with a surrogate gradient, and the interface of surrogates."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._errors import bad_argument, name_of, rule_error, show_path
from .._rules.custom_jvp import custom_jvp
from .._rules.float_args import as_floats, broadcast_parameter, check_parameter
from ..tangents import add, is_zero


class AbstractSurrogate(eqx.Module):
    """A surrogate for the derivative of a step, and its primitive, which is a smooth step.

    To define a surrogate, subclass this and write both methods. Its fields that are arrays
    can be learned. If there is nothing to learn, a function `derivative(v)` is enough.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        class exponential(eqg.surrogates.AbstractSurrogate):
            slope: jax.Array

            def derivative(self, v):
                return 0.5 * self.slope * jnp.exp(-self.slope * jnp.abs(v))

            def primitive(self, v):
                tail = 0.5 * jnp.exp(-self.slope * jnp.abs(v))
                return jnp.where(v < 0, tail, 1 - tail)

        surrogate = exponential(jnp.array(2.0))
        print(jax.grad(eqg.surrogates.spike)(0.0, surrogate))
        by_slope = jax.grad(eqg.surrogates.spike, argnums=1)(0.5, surrogate).slope
        print(f"{by_slope:.3f}")
        ```

        ```text
        1.0
        0.092
        ```
    """

    @abc.abstractmethod
    def derivative(self, v: ArrayLike) -> Array:
        """Return the replacement for the derivative of a step.

        **Arguments:**

        - `v`: the membrane potential minus the threshold. An array of floats, of any shape.

        **Returns:**

        An array like `v`.
        """

    @abc.abstractmethod
    def primitive(self, v: ArrayLike) -> Array:
        """Return a smooth step, whose derivative with respect to `v` is `derivative(v)`.

        The primitives of this library are one half at the threshold. If the derivative has area
        one, they rise from zero to one.

        **Arguments:**

        - `v`: as for `derivative`.

        **Returns:**

        An array like `v`.
        """


@custom_jvp
def spike(v: ArrayLike, surrogate: AbstractSurrogate | Callable[..., Any]) -> Array:
    r"""Return one where a neuron is over its threshold and zero elsewhere, with a surrogate
    gradient.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        spike, atan = eqg.surrogates.spike, eqg.surrogates.atan
        v = jnp.array([-0.1, 0.0, 0.1])
        print(spike(v, atan()))
        print(jax.grad(spike)(0.0, atan()))

        # Any function can be the derivative, ...
        print(jax.grad(spike)(0.0, lambda v: 0.3 * jnp.exp(-jnp.abs(v))))

        # ... and the slope of a surrogate can be learned.
        learnable = atan(slope=jnp.array(2.0))
        print(f"{jax.grad(spike, argnums=1)(0.1, learnable).slope:.3f}")
        ```

        ```text
        [0. 0. 1.]
        1.0
        0.3
        0.046
        ```

    **Arguments:**

    - `v`: the membrane potential minus the threshold. Floats, of any shape.
    - `surrogate`: an [`eqx_grads.surrogates.AbstractSurrogate`][], or a function
        `derivative(v)` which returns an array of the shape of `v`.

    **Returns:**

    An array like `v`, of zeros and ones. At `v == 0` it is zero, as in snnTorch and Spyx
    (SpikingJelly fires there). NaN where `v` is.

    **Derivative:**

    With $g$ for the surrogate's derivative and $P$ for its primitive, the forward rule is
    $\dot y = g(v)\,\dot v + \partial_\theta P(v)\,\dot\theta$ and the reverse rule its
    transpose: $\bar v = g(v)\,\bar y$. The second term is for the fields $\theta$ of the
    surrogate that are arrays being differentiated, for example a learned slope. It is the
    derivative of the primitive. A field that is a Python number is a constant. Both modes;
    higher orders differentiate $g$.

    **Raises:**

    [`eqx_grads.RuleError`][] if `v` is not an array of floats, if the derivative does not
    have its shape, or if arrays in a function `derivative(v)` are differentiated: that
    requires a primitive.
    """
    v = as_floats("surrogates.spike", v, "v")
    is_class = isinstance(surrogate, type)  # callable too: `atan` in place of `atan()`
    if is_class or not (isinstance(surrogate, AbstractSurrogate) or callable(surrogate)):
        do = "Pass a surrogate, such as `eqx_grads.surrogates.atan()`, or its `derivative(v)`."
        raise bad_argument("surrogates.spike", "surrogate", "a surrogate", surrogate, do)
    # Not `v > 0` alone, so that NaN is propagated, nor `jnp.heaviside`, which takes more
    # operations and on JAX 0.10.0 does not propagate it.
    return jnp.where(jnp.isnan(v), v, (v > 0).astype(v.dtype))


@spike.def_jvp(symbolic_zeros=True)
def _spike_jvp(primals, tangents):
    v, surrogate = primals
    t_v, t_surrogate = tangents
    has_primitive, terms = isinstance(surrogate, AbstractSurrogate), []
    name = name_of(surrogate)

    def like_v(what, x):
        check_parameter(name, what, x)
        return broadcast_parameter(name, what, x, v)

    if not is_zero(t_v):
        derivative = surrogate.derivative if has_primitive else surrogate
        terms.append(like_v("derivative", derivative(v)) * t_v)
    if not is_zero(t_surrogate):
        if not has_primitive:
            paths = jax.tree_util.tree_leaves_with_path(t_surrogate)
            raise rule_error(
                f"`spike` was differentiated with respect to the arrays in `{name}`, which has "
                "no primitive.",
                *(f"at surrogate{show_path(path)}" for path, _ in paths),
                do="A function gives the derivative with respect to `v` only. To learn the "
                "arrays, subclass `eqx_grads.surrogates.AbstractSurrogate`; otherwise pass "
                "`jax.lax.stop_gradient` of them.",
            )
        primitive = lambda s: like_v("primitive", s.primitive(v))
        terms.append(eqx.filter_jvp(primitive, (surrogate,), (t_surrogate,))[1])
    return spike(v, surrogate), add(*terms)
