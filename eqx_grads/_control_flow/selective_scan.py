"""The selective scan (S6): a linear recurrence whose coefficients depend on the input."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Integer

from .._errors import rule_error, type_of
from .._tangent_spaces import promote
from .linear_recurrence import linear_recurrence
from .over_time import as_arrays, zero_padding


def selective_scan(
    x: ArrayLike,
    step: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike,
    *,
    state: ArrayLike | None = None,
    lengths: Integer[ArrayLike, "..."] | Sequence[int] | None = None,
    reverse: bool = False,
    method: str = "auto",
) -> tuple[Array, Array]:
    r"""Run the recurrence of a selective state space model (S6, "Mamba").

    Each channel $i$ has several states $n$. The input decides how long a step is, what is
    written and what is read:

    $$h_{t,i,n} = e^{\delta_{t,i}\,a_{i,n}}\,h_{t-1,i,n} + \delta_{t,i}\,x_{t,i}\,b_{t,n},
    \qquad y_{t,i} = \mathrm{Re} \sum_n c_{t,n}\,h_{t,i,n}.$$

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x, b = jnp.ones((4, 1)), jnp.ones((4, 1))
        step = jnp.array([[1.0], [0.0], [0.0], [9.0]])  # a step of zero keeps the state
        run = lambda step: eqg.selective_scan(x, step, jnp.array([[-1.0]]), b, b)[0]
        print(run(step).ravel())
        print(jax.grad(lambda step: run(step)[2, 0])(step).ravel())
        ```

        ```text
        [1.       1.       1.       9.000123]
        [1. 0. 0. 0.]
        ```

    **Arguments:**

    - `x`: the inputs, of shape `(time, ..., channels)`. The axes between are a batch, or none.
    - `step`: the lengths $\delta$ of the steps, of the shape of `x`, not negative.
    - `a`: the rates, of shape `(channels, states)`, real or complex. Their real parts are
        usually negative.
    - `b`, `c`: what is written and read, of shape `(time, ..., states)`, real or complex.
    - `state`: the state before the first step, of shape `(..., channels, states)`. The default
        is zero.
    - `lengths`, `reverse`: as for [`eqx_grads.gated_delta_rule`][].
    - `method`: as for [`eqx_grads.linear_recurrence`][].

    **Returns:**

    The outputs, of the shape and dtype of `x`, and the last state, which is in single precision
    at least.

    **Derivative:**

    The derivative of [`eqx_grads.linear_recurrence`][], which is the same recurrence in the
    other direction, and plain differentiation around it. Both modes, all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if the shapes do not fit together.

    ??? cite

        [Mamba: Linear-Time Sequence Modeling with Selective State
        Spaces](https://arxiv.org/abs/2312.00752)

        ```bibtex
        @inproceedings{gu2024mamba,
            author={Gu, Albert and Dao, Tri},
            title={{Mamba}: Linear-Time Sequence Modeling with Selective State Spaces},
            booktitle={Conference on Language Modeling},
            year={2024},
        }
        ```
    """
    first = 0.0 if state is None else state
    given = as_arrays("selective_scan", {"x": x, "step": step}, real=True)
    given |= as_arrays("selective_scan", {"a": a, "b": b, "c": c, "state": first}, real=False)
    if not _fits(**given):
        shown = list(given)[: 5 if state is None else 6]
        raise rule_error(
            "The arguments of `selective_scan` do not fit together.",
            *(f"`{name}` is {type_of(given[name])}" for name in shown),
            do="`x` and `step` have the shape `(time, ..., channels)`, `a` has `(channels, "
            "states)`, `b` and `c` have `(time, ..., states)`, and `state` has `(..., "
            "channels, states)`.",
        )
    dtype, wide = given["x"].dtype, promote([*given.values(), jnp.float32])
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.finfo(wide).dtype
    x, step, a, b, c, state = (array.astype(wide) for array in given.values())
    x, step, b, c = zero_padding("selective_scan", (x, step, b, c), lengths)
    factors = jnp.exp(step[..., None] * jnp.expand_dims(a, range(x.ndim - 1)))
    terms = (step * x)[..., None] * b[..., None, :]
    state = jnp.broadcast_to(state, terms.shape[1:])
    h = linear_recurrence(factors, terms, state, reverse=reverse, method=method)
    y = jnp.real(jnp.sum(h * c[..., None, :], -1)).astype(dtype)
    # Zero already, but an infinite cotangent has to end here.
    (y,) = zero_padding("selective_scan", [y], lengths)
    return y, h[0 if reverse else -1] if h.shape[0] > 0 else state


def _fits(x, step, a, b, c, state):
    if a.ndim != 2 or x.ndim < 2 or x.shape != step.shape or b.shape != c.shape:
        return False
    fits = (*x.shape[:-1], *a.shape) == (*b.shape[:-1], x.shape[-1], b.shape[-1])
    return fits and state.shape in ((), (*x.shape[1:], a.shape[1]))
