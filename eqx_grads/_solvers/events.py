"""`event_time` and `jump`: the time and the state at an event of a trajectory, and after it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PyTree

from .._errors import bad_argument, check_function, name_of, place_of, rule_error, type_of
from .._rules.custom_jvp import custom_jvp
from .._tangent_spaces import dtype_of, shape_of
from .._trees import filter_jvp, mirrored, unmirror
from .trajectory import as_time, Closure, finite, state_at, VectorField


def event_time(
    condition: Callable[[Float[Array, ""], Any], Float[Array, ""]],
    y: PyTree,
    f: Callable[[Float[Array, ""], Any], PyTree],
    t: ArrayLike,
    *,
    where: ArrayLike = True,
) -> tuple[Float[Array, ""], PyTree]:
    r"""Return the time of an event and the state at that time, with their derivatives.

    A solver finds an event by comparisons, in a loop, so the time that it finds has a wrong
    derivative, often zero. But at the event a condition on the trajectory is zero, so the time
    is an implicit function. Find the event in any way, with or without a derivative: by
    `diffrax.Event`, a bisection, or an interpolation between two steps. Then pass the state and
    the time that you found.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def fall(t, y):
            height, velocity = y
            return velocity, -9.8

        def time_to_fall(h):
            t = jax.lax.stop_gradient(jnp.sqrt(2 * h / 9.8))  # from any solver
            y = h - 4.9 * t**2, -9.8 * t  # the state at this time
            t, y = eqg.event_time(lambda t, y: y[0], y, fall, t)
            return t

        # The derivative of sqrt(2 * h / 9.8), which is 1 / 14 here.
        print(f"{jax.grad(time_to_fall)(10.0):.3f}")
        ```

        ```text
        0.071
        ```

    **Arguments:**

    - `condition`: called as `condition(t, y)`. Returns a real scalar, which is zero at the
        event and crosses zero there.
    - `y`: the state at the time `t`, any PyTree.
    - `f`: the vector field before the event, called as `f(t, y)`. Returns $dy/dt$: a tree
        like `y`, with `None` for any part that does not change.
    - `t`: the time of the event as it was found, a scalar. For several events at once, use
        `jax.vmap`.
    - `where`: whether there is an event: `event_mask` of a Diffrax solution, or, in a scan,
        whether the sign has changed in this step. If not, `t` and `y` are returned with their
        own derivatives. `condition` and `f` are evaluated in any case, and must be finite
        there, with finite derivatives; the rate of change of the condition may be zero.

    `condition` and `f` may be Modules, and may close over anything; their parameters are
    differentiated. They are called only if something is differentiated.

    **Returns:**

    `t, y`, unchanged in value. They move together: the state is the state at this time. To
    continue with another vector field or state, see [`eqx_grads.jump`][].

    **Derivative:**

    Let $c$ be the condition, $\dot t_0$ and $\dot y_0$ the tangents of `t` and `y`, and $\dot
    c$ the tangent of the condition with respect to its parameters. Differentiating
    $c(t, y(t)) = 0$ gives the forward rule

    $$\dot t = \dot t_0 - \frac{\partial_t c\,\dot t_0 + \partial_y c\,\dot y_0 + \dot c}
    {\partial_t c + \partial_y c\,f(t, y)},\qquad
    \dot y = \dot y_0 + f(t, y)\,(\dot t - \dot t_0).$$

    `y` has to be the state at `t` in its derivative as well as in its value. If `t` has a
    derivative, right or wrong, then compute `y` with this `t`. If `t` has no derivative, then
    `y` has to have the derivative of the state at a fixed time. The reverse rule is the
    transpose. Both modes and all orders: the higher derivatives take into account how `f`
    changes along the trajectory.

    A grazing event touches zero without crossing it: $\partial_t c + \partial_y c\,f = 0$. It
    appears or disappears as the parameters change. Its true derivative is infinite, and the
    computed derivative is not finite. If `t` is infinite or NaN, it is not an event, as with
    `where=False`: an event that never happens does not move.

    The condition at `t` need not be exactly zero; the derivative has about the error of the
    time. If `t` is not an event at all, the derivative has no meaning: use `where`.

    **Raises:**

    [`eqx_grads.RuleError`][] if `t` is not a real scalar. The derivative raises it if
    `condition` does not return a real scalar, or if `f` does not return a tree like `y`.

    ??? cite

        The implicit derivative of an event time in a neural network: Chen, R. T. Q., Amos, B.
        and Nickel, M. (2021). Learning neural event functions for ordinary differential
        equations. arXiv:2011.03902.

        The derivative of the time of a spike: Wunderlich, T. C. and Pehle, C. (2021).
        Event-based backpropagation can compute exact gradients for spiking neural networks.
        *Scientific Reports* 11, 12829.
    """
    check_function(condition, "condition", "event_time")
    time, field = as_time(t, "event_time"), VectorField(f, "event_time")
    y = mirrored(y)
    t_event = _event_time(Closure(condition), field, y, time, _as_flag(where))
    return t_event, unmirror(state_at(field, y, time, t_event))


def _as_flag(where):
    if dtype_of(where) == jnp.bool_ and shape_of(where) == ():
        return jnp.asarray(where)
    do = "Pass whether there is an event. For several events at once, use `jax.vmap`."
    raise bad_argument("event_time", "where", "one boolean", where, do)


@custom_jvp
def _event_time(condition, field, y, t, happens):
    del condition, field, y, happens
    return t


# The condition remains zero at the event, so its change at a fixed time and its rate of change
# times the tangent of the time add up to zero. Both are taken at the event as it moves, which
# matters to higher derivatives.
@_event_time.def_jvp(symbolic_zeros=True)
def _event_time_jvp(primals, tangents):
    condition, field, y, t, happens = primals
    t_condition, t_field, t_y, t_t, _ = tangents
    t_event = _event_time(*primals)
    y_event, t_y_event = filter_jvp(
        lambda field, y, t: state_at(field, y, t, t_event), (field, y, t), (t_field, t_y, t_t)
    )
    at_event = lambda condition, y: _value(condition, t_event, y)
    value, t_value = filter_jvp(at_event, (condition, y_event), (t_condition, t_y_event))
    over_time, rates = lambda t, y: _value(condition, t, y), field(t_event, y_event)
    _, rate = filter_jvp(over_time, (t_event, y_event), (jnp.ones_like(t_event), rates))
    if rate is None:
        what = f"`{name_of(condition.fn)}`, the `condition` of `event_time`, depends neither "
        what += "on the time nor on the state: it has no derivative with respect to them."
        do = "Return the number that crosses zero at the event, computed from `t` and `y`."
        raise rule_error(what, place_of(condition.fn), do=do)
    happens = happens & jnp.isfinite(t)
    # Exactly zero without an event: the rate may be zero there.
    per_rate = jnp.where(happens, -1 / jnp.where(happens, rate, 1), 0)
    otherwise = jnp.zeros_like(t) if t_t is None else t_t
    t_value = jnp.zeros_like(value) if t_value is None else t_value  # of the time alone
    return t_event, jnp.where(happens, (t_value * per_rate).astype(t.dtype), otherwise)


def _value(closure, t, y):
    condition = closure.fn
    value = condition(finite(t), unmirror(y))
    array = jnp.asarray(value) if eqx.is_array_like(value) else None
    if array is not None and array.shape == () and jnp.issubdtype(array.dtype, jnp.floating):
        return array
    raise rule_error(
        f"`{name_of(condition)}`, the `condition` of `event_time`, did not return one real "
        "number.",
        f"it returned {type_of(value if array is None else array)}",
        place_of(condition),
        do="Return the number that crosses zero at the event: the height, and not whether it "
        "is below zero. For several events, use `jax.vmap`.",
    )


def jump(
    reset: Callable[[Float[Array, ""], Any], PyTree] | None,
    y: PyTree,
    f: Callable[[Float[Array, ""], Any], PyTree],
    t: ArrayLike,
) -> tuple[Float[Array, ""], PyTree]:
    r"""Return the state after a switch: an impact, a spike, a change of the vector field.

    At an event the state is reset, or follows another vector field from there. The next part of
    the simulation starts at a number, the time that was found. But if the parameters change,
    the event is earlier or later than this number, and so is the start of the new trajectory.
    `jump` returns the state with the derivative that accounts for this: the derivative of the
    new trajectory at a fixed time.

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

    [`eqx_grads.RuleError`][] if `t` is not a real scalar. The derivative raises it if `f` does
    not return a tree like the new state.

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
