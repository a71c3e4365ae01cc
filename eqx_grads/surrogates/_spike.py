"""A step with a derivative to learn from, and what a surrogate is."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from .._errors import name_of, rule_error, type_of
from .._rules.custom_jvp import custom_jvp
from ..tangents import add, is_zero


class AbstractSurrogate(eqx.Module):
    """The bump that stands for the derivative of a step, and the smooth step it belongs to.

    For one of your own, write both methods. Its fields that are arrays can be learned.
    If there is nothing to learn, a function `derivative(v)` will do instead.

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
        assert jax.grad(eqg.surrogates.spike)(0.0, surrogate) == 1.0
        assert jax.grad(eqg.surrogates.spike, argnums=1)(0.5, surrogate).slope > 0
        ```
    """

    @abc.abstractmethod
    def derivative(self, v: ArrayLike) -> Array:
        """The bump: what takes the place of the derivative of a step.

        **Arguments:**

        - `v`: how far a neuron is over its threshold. An array of floats, of any shape.

        **Returns:**

        An array like `v`.
        """

    @abc.abstractmethod
    def primitive(self, v: ArrayLike) -> Array:
        """The smooth step: its derivative with respect to `v` is the bump.

        Those of this library are one half at the threshold. Where the area of the bump is
        one, they go from zero to one.

        **Arguments:**

        - `v`: as for `derivative`.

        **Returns:**

        An array like `v`.
        """


@custom_jvp
def spike(v: ArrayLike, surrogate: AbstractSurrogate | Callable[..., Any]) -> Array:
    r"""One where a neuron is over its threshold, zero elsewhere; with a derivative to learn
    from.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        spike, atan = eqg.surrogates.spike, eqg.surrogates.atan
        v = jnp.array([-0.1, 0.0, 0.1])
        assert jnp.array_equal(spike(v, atan()), jnp.array([0.0, 0.0, 1.0]))
        assert jax.grad(spike)(0.0, atan()) == 1.0

        # Any function will do for a derivative, ...
        assert jax.grad(spike)(0.0, lambda v: 0.3 * jnp.exp(-jnp.abs(v))) == 0.3

        # ... and the slope of a surrogate can be learned.
        learnable = atan(slope=jnp.array(2.0))
        assert jax.grad(spike, argnums=1)(0.1, learnable).slope > 0
        ```

    **Arguments:**

    - `v`: how far a neuron is over its threshold. Floats, of any shape.
    - `surrogate`: an [`eqx_grads.surrogates.AbstractSurrogate`][], or a function
        `derivative(v)` which returns an array of the shape of `v`.

    **Returns:**

    An array like `v`, of zeros and ones. At `v == 0` it is zero, as in snnTorch and Spyx
    (SpikingJelly fires there). NaN where `v` is.

    **Derivative:**

    With $g$ for the surrogate's derivative and $P$ for its primitive, the forward rule is
    $\dot y = g(v)\,\dot v + \partial_\theta P(v)\,\dot\theta$ and the reverse rule its
    transpose: $\bar v = g(v)\,\bar y$. The second term is for the fields $\theta$ of the
    surrogate that are arrays being differentiated (a slope that is learned); it is what
    differentiating the smooth step $P$ gives. A field that is a Python number is a constant.
    Both modes; higher orders differentiate $g$.

    **Raises:**

    [`eqx_grads.RuleError`][] if `v` is not an array of floats, if the derivative does not
    have its shape, or if a function that has arrays in it is to be learned: that takes a
    primitive.
    """
    v = as_floats(v)
    known = isinstance(surrogate, AbstractSurrogate) or callable(surrogate)
    if not known or isinstance(surrogate, type):
        raise rule_error(
            "`spike` was given something that is not a surrogate.",
            f"it is {surrogate!r:.80}",
            do="Give it a surrogate, like `eqx_grads.surrogates.atan()`, or a function "
            "`derivative(v)`.",
        )
    # NaN goes through: a spike train of zeros would hide it.
    return jnp.heaviside(v, jnp.zeros((), v.dtype))


@spike.def_jvp(symbolic_zeros=True)
def _spike_jvp(primals, tangents):
    v, surrogate = primals
    t_v, t_surrogate = tangents
    terms = []
    if not is_zero(t_v):
        terms.append(_derivative_at(surrogate, v) * t_v)
    if not is_zero(t_surrogate):
        terms.append(_of_fields(surrogate, t_surrogate, v))
    return spike(v, surrogate), add(*terms)


def as_floats(v: ArrayLike) -> Array:
    """A potential as an array, or an error if it is not one of floats."""
    v = jnp.asarray(v)
    if not jnp.issubdtype(v.dtype, jnp.floating):
        raise rule_error(
            "A surrogate was given a potential that is not of floats.",
            f"it is {type_of(v)}",
            do="Only floats have a gradient: pass `v.astype(jnp.float32)`.",
        )
    return v


def _derivative_at(surrogate, v):
    if isinstance(surrogate, AbstractSurrogate):
        derivative = surrogate.derivative(v)
    else:
        derivative = surrogate(v)
    return _like(surrogate, "derivative", derivative, v)


def _like(surrogate, what, x, v):
    """`x` as an array like `v`, or an error."""
    number = isinstance(x, jax.Array | np.ndarray | np.generic | float | int)
    if not number or jnp.iscomplexobj(x) or jnp.shape(x) not in ((), v.shape):
        raise rule_error(
            f"The {what} of the surrogate `{name_of(surrogate)}` does not fit the potential.",
            f"the potential is {type_of(v)}, the {what} {type_of(x)}",
            do="Return an array of floats of the shape of the potential. A slope or a width "
            "that is an array broadcasts to that shape.",
        )
    return jnp.broadcast_to(jnp.asarray(x).astype(v.dtype), v.shape)


def _of_fields(surrogate, t_surrogate, v):
    """The tangent of the primitive, as the fields of the surrogate move."""
    if not isinstance(surrogate, AbstractSurrogate):
        paths = [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(t_surrogate)
        ]
        raise rule_error(
            f"`spike` was differentiated with respect to the arrays in `{name_of(surrogate)}`, "
            "which has no primitive.",
            *(f"at surrogate{path}" for path in paths),
            do="A function gives the derivative with respect to `v` only. Subclass "
            "`eqx_grads.surrogates.AbstractSurrogate` to learn its fields, or pass "
            "`jax.lax.stop_gradient` of them.",
        )
    _, t_out = eqx.filter_jvp(_primitive_at, (surrogate, v), (t_surrogate, None))
    return t_out


def _primitive_at(surrogate, v):
    return _like(surrogate, "primitive", surrogate.primitive(v), v)
