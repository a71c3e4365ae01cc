"""`jump`: the state after a switch, with the saltation term of its derivative."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, ArrayLike, Float, PyTree

from .._errors import check_function
from .._errors.trees import mirrored, unmirror
from .trajectory import as_time, state_at, VectorField


def jump(
    reset: Callable[[Float[Array, ""], Any], PyTree] | None,
    y: PyTree,
    f: Callable[[Float[Array, ""], Any], PyTree],
    t: ArrayLike,
) -> tuple[Float[Array, ""], PyTree]:
    r"""The state after a switch: an impact, a spike, a change of the vector field.

    At an event the state is reset, or goes on by another vector field. The next part
    of the simulation starts at a number, the time that was found. But if the parameters change,
    the event is earlier or later than this number, and so is the start of the new trajectory.
    `jump` returns the state with the derivative that accounts for this: that of the new
    trajectory at a fixed time.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def fall(t, y):
            height, velocity = y
            return velocity, -9.8

        def height_after_a_second(h):
            t = jax.lax.stop_gradient(jnp.sqrt(2 * h / 9.8))
            y = h - 4.9 * t**2, -9.8 * t
            t, y = eqg.event_time(lambda t, y: y[0], y, fall, t)
            t, y = eqg.jump(lambda t, y: (y[0], -0.8 * y[1]), y, fall, t)
            return y[0] + y[1] * (1.0 - t) - 4.9 * (1.0 - t) ** 2

        # It rises for less time, but faster. Without the two calls, the gradient is 1.
        print(f"{jax.grad(height_after_a_second)(3.0):.3f}")
        ```

        ```text
        -0.300
        ```

    **Arguments:**

    - `reset`: called as `reset(t, y)`. Returns the state after the event, which may have
        another structure. `None` if only the vector field changes.
    - `y`, `t`: the state and the time at the event, as returned by
        [`eqx_grads.event_time`][]: both with the derivatives that they have as the event moves.
    - `f`: the vector field after the event, called as `f(t, y)`. Returns $dy/dt$: a tree like
        the new state, with `None` for any part that does not change.

    `reset` and `f` may be Modules, and may close over anything; their parameters are
    differentiated.

    **Returns:**

    `t, y`: the time without a derivative, and the state `reset(t, y)`. Start the next part of
    the simulation from there.

    If your solver differentiates with respect to its starting time (or the length of its
    first step), `jump` is not needed: start at the `t` of `event_time`, from `reset(t, y)`.

    **Derivative:**

    With $r$ for the reset, and $f^-, f^+$ for the vector fields before and after,

    $$\dot y^+ = \partial_y r\,\dot y + \partial_t r\,\dot t + \dot r - f^+\,\dot t.$$

    In terms of the state before the event at a fixed time, $\dot y_0 = \dot y - f^-\,\dot t$,
    this is the saltation matrix,

    $$\dot y^+ = \partial_y r\,\dot y_0 + \dot r
    + (\partial_y r\,f^- + \partial_t r - f^+)\,\dot t.$$

    The reverse rule is the transpose. Both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `t` is not a real scalar. When it is differentiated, also if
    `f` does not return a tree like the new state.

    ??? cite

        Aizerman, M. A. and Gantmacher, F. R. (1958). On the stability of periodic motions.
        *Journal of Applied Mathematics and Mechanics* 22 (6).

        Kong, N. J., Payne, J. J., Zhu, J. and Johnson, A. M. (2023). Saltation matrices: The
        essential tool for linearizing hybrid dynamical systems. arXiv:2306.06862.
    """
    if reset is not None:
        check_function(reset, "reset", "jump")
    time = as_time(t, "jump")
    after = y if reset is None else reset(time, y)
    fixed = jax.lax.stop_gradient(time)
    state = state_at(VectorField(f, "jump"), mirrored(after), time, fixed)
    return fixed, unmirror(state)
