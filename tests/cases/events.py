"""Event times and jumps. The event is found by a formula of which nothing is differentiated."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp

from .registry import case


def _fall(gravity):
    return lambda t, y: (y[1], -gravity)


def _landing(height, velocity, gravity):
    """The time, and the state there: all but the time can be differentiated."""
    root = jnp.sqrt(velocity**2 + 2 * gravity * height)
    t = jax.lax.stop_gradient((velocity + root) / gravity)
    return t, (height + velocity * t - gravity * t**2 / 2, velocity - gravity * t)


def _time_and_velocity(height, velocity, gravity):
    t, y = _landing(height, velocity, gravity)
    t, (_, velocity) = eqg.event_time(lambda t, y: y[0], y, _fall(gravity), t)
    return t, velocity


def _time_and_velocity_closed_form(height, velocity, gravity):
    root = jnp.sqrt(velocity**2 + 2 * gravity * height)
    return (velocity + root) / gravity, -root


@case("event_time", reference=_time_and_velocity_closed_form)
def _():
    return _time_and_velocity, (jnp.array(1.5), jnp.array(0.7), jnp.array(2.0))


def _after_a_bounce(height, velocity, gravity):
    fall = _fall(gravity)
    t, y = _landing(height, velocity, gravity)
    t, y = eqg.event_time(lambda t, y: y[0], y, fall, t)
    t, y = eqg.jump(lambda t, y: (y[0], -0.8 * y[1]), y, fall, t)
    rest = 3.0 - t
    return y[0] + y[1] * rest - gravity * rest**2 / 2


def _after_a_bounce_closed_form(height, velocity, gravity):
    t, falling = _time_and_velocity_closed_form(height, velocity, gravity)
    rest = 3.0 - t
    return -0.8 * falling * rest - gravity * rest**2 / 2


@case("jump", reference=_after_a_bounce_closed_form)
def _():
    return _after_a_bounce, (jnp.array(1.5), jnp.array(0.7), jnp.array(2.0))
