"""Throw a ball so that it hits a target after it has bounced: a gradient through impacts.

A ball is simulated with fixed steps in a `jax.lax.scan`. If it crosses the floor in a step, the
time of the impact is bisected, the ball is reflected, and the step is completed. The values are
right, and the gradient is wrong: a bisection has no derivative, so for `jax.grad` the impact
happens at the same time, however the ball is thrown. For most throws even the sign is wrong.

`eqg.event_time` and `eqg.jump`, two lines in the step, give the time of the impact and the
state after it their derivatives. The gradient is then that of the closed form, through all
impacts, and gradient descent finds the throw.
"""

import argparse
import functools as ft
import json
import pathlib
import time

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.figure import Figure


GRAVITY = 9.8
RESTITUTION = 0.8  # of the speed at which the ball leaves the floor
GRIP = 0.9  # of the speed along the floor that an impact leaves
DT = 0.02
STEPS = 80
TARGET = np.array([2.5, 0.2], np.float32)  # where the ball is to be after these steps
FIRST_THROW = np.array([1.0, 0.6], np.float32)
UPDATES = 300
LEARNING_RATE = 0.02

# ---------------------------------------------------------------- the simulation


class Ball(eqx.Module):
    """Across and up."""

    position: Float[Array, "2"]
    velocity: Float[Array, "2"]

    @property
    def height(self):
        return self.position[1]


def fall(t, ball):
    """The derivative of the state with respect to time."""
    return Ball(ball.velocity, jnp.array([0.0, -GRAVITY], jnp.float32))


def height(t, ball):
    return ball.height


def bounce(t, ball):
    return Ball(ball.position, ball.velocity * jnp.array([GRIP, -RESTITUTION], jnp.float32))


def move(ball, dt):
    down = jnp.array([0.0, GRAVITY], jnp.float32)
    position = ball.position + ball.velocity * dt - down * dt**2 / 2
    return Ball(position, ball.velocity - down * dt)


def time_to_impact(ball):
    """Bisect the time at which the ball is on the floor, within a step."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        is_above = move(ball, middle).height > 0
        return jnp.where(is_above, middle, low), jnp.where(is_above, high, middle)

    bounds = (jnp.zeros((), jnp.float32), jnp.full((), DT, jnp.float32))
    return jax.lax.fori_loop(0, 30, halve, bounds)[1]


def step(ball, t, *, with_events):
    moved = move(ball, DT)
    hits = moved.height < 0
    t_hit = t + time_to_impact(ball)
    at_impact = move(ball, t_hit - t)
    if with_events:
        t_hit, at_impact = eqg.event_time(height, at_impact, fall, t_hit, where=hits)
        t_hit, reflected = eqg.jump(bounce, at_impact, fall, t_hit)
    else:
        reflected = bounce(t_hit, at_impact)
    reflected = move(reflected, t + DT - t_hit)
    ball = jax.tree.map(lambda x, y: jnp.where(hits, x, y), reflected, moved)
    return ball, (ball.position, hits)


def simulate(throw, *, with_events=True):
    """The ball after each step, and whether it has hit the floor in it."""
    start = Ball(jnp.array([0.0, 1.0], jnp.float32), throw)
    times = DT * jnp.arange(STEPS, dtype=jnp.float32)
    return jax.lax.scan(ft.partial(step, with_events=with_events), start, times)[1]


def loss(throw, *, with_events=True):
    positions, _ = simulate(throw, with_events=with_events)
    return jnp.sum((positions[-1] - TARGET) ** 2)


# ---------------------------------------------------------------- the closed form


def loss_in_closed_form(throw, n_impacts):
    """Parabola after parabola, as many as there are impacts."""
    across, up = throw
    t = (up + jnp.sqrt(up**2 + 2 * GRAVITY)) / GRAVITY
    x, up = across * t, RESTITUTION * (GRAVITY * t - up)
    for i in range(1, n_impacts):
        x, t = x + across * GRIP**i * 2 * up / GRAVITY, t + 2 * up / GRAVITY
        up = RESTITUTION * up
    rest = DT * STEPS - t
    end = [x + across * GRIP**n_impacts * rest, up * rest - GRAVITY * rest**2 / 2]
    return jnp.sum((jnp.stack(end) - TARGET) ** 2)


def gradients_over_speed(across, speeds):
    """The loss and three of its derivatives with respect to the speed upwards."""
    throws = jnp.stack([jnp.full_like(speeds, across), speeds], axis=1)
    grad = lambda fn: jax.jit(jax.vmap(lambda throw: jax.grad(fn)(throw)[1]))(throws)
    n_impacts = np.asarray(jax.vmap(lambda throw: jnp.sum(simulate(throw)[1]))(throws))
    exact = np.zeros(len(speeds))
    for n in np.unique(n_impacts):
        of_n = grad(lambda throw: loss_in_closed_form(throw, int(n)))  # noqa: B023
        exact[n_impacts == n] = np.asarray(of_n)[n_impacts == n]
    plain = grad(lambda throw: loss(throw, with_events=False))
    values = jax.jit(jax.vmap(loss))(throws)
    return [np.asarray(x) for x in (values, plain, grad(loss))] + [exact]


# ---------------------------------------------------------------- training


def train(updates, *, with_events):
    """The throws, and their losses."""
    optimizer = optax.adam(LEARNING_RATE)

    def update(state, _):
        throw, opt_state = state
        value, gradient = jax.value_and_grad(loss)(throw, with_events=with_events)
        with jax.numpy_dtype_promotion("standard"):  # Optax fails where it is "strict"
            changes, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(throw, changes), opt_state), (throw, value)

    start = (jnp.asarray(FIRST_THROW), optimizer.init(jnp.asarray(FIRST_THROW)))
    return jax.jit(lambda start: jax.lax.scan(update, start, length=updates)[1])(start)


# ---------------------------------------------------------------- the picture

INK, GRAY, TEAL, RUST = "#2b2b2b", "#c4c4c4", "#00798c", "#c8553d"
STYLE: dict = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
}


@matplotlib.rc_context(STYLE)
def draw(speeds, curves, throws):
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplot_mosaic(
        [["ball", "loss"], ["ball", "gradient"]], width_ratios=(1.3, 1)
    )
    for panel in panels.values():
        panel.spines[["right", "top"]].set_visible(False)

    for (name, throw), color in zip(throws.items(), (GRAY, RUST, TEAL), strict=True):
        path = np.asarray(simulate(jnp.asarray(throw))[0])
        panels["ball"].plot(*path.T, color=color, label=name)
        panels["ball"].plot(*path[-1], "o", color=color)
    panels["ball"].plot(*TARGET, "*", color=INK, markersize=14, label="target")
    panels["ball"].axhline(0, color=GRAY, linewidth=1)
    panels["ball"].set(xlabel="distance (m)", ylabel="height (m)", title="The throw")
    panels["ball"].legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2)

    values, plain, ours, exact = curves
    panels["loss"].plot(speeds, values, color=INK)
    panels["loss"].set(title="The loss, by the speed upwards (m/s)")
    panels["gradient"].axhline(0, color=GRAY, linewidth=1)
    panels["gradient"].plot(speeds, plain, color=RUST, label="jax.grad")
    panels["gradient"].plot(speeds, ours, color=TEAL, label="with event_time and jump")
    some = slice(None, None, max(1, len(speeds) // 25))
    panels["gradient"].plot(speeds[some], exact[some], ".", color=INK, label="closed form")
    panels["gradient"].set(title="Its gradient")
    panels["gradient"].legend(frameon=False)
    return figure


# ---------------------------------------------------------------- all of it


def main():
    parser = argparse.ArgumentParser(description="Hit a target with a ball that bounces.")
    parser.add_argument("--quick", action="store_true", help="few throws, a few updates")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    begin = time.perf_counter()

    speeds = jnp.linspace(0.0, 4.0, 20 if args.quick else 400, dtype=jnp.float32)
    curves = gradients_over_speed(FIRST_THROW[0], speeds)
    _, plain, ours, exact = curves
    error = np.max(np.abs(ours - exact)) / np.max(np.abs(exact))
    wrong = np.mean(np.sign(plain) != np.sign(exact))
    print(f"With `event_time` and `jump`, the gradient is {error:.1e} from the closed form.")
    print(f"Without them, it has the wrong sign for {wrong:.0%} of the throws.")

    throws, result = {"first throw": FIRST_THROW}, {"error": error, "wrong_sign": wrong}
    for name, with_events in (("jax.grad", False), ("event_time and jump", True)):
        steps, losses = train(10 if args.quick else UPDATES, with_events=with_events)
        throws[name], result[name] = steps[-1], losses[-1] ** 0.5
        print(f"Trained with {name}: the ball is {result[name]:.1e} m from the target.")

    args.out.mkdir(parents=True, exist_ok=True)
    result = {name: float(value) for name, value in result.items()}
    (args.out / "result.json").write_text(json.dumps(result))
    picture = args.out / "bouncing-ball.png"
    draw(np.asarray(speeds), curves, throws).savefig(picture, dpi=150)
    print(f"After {time.perf_counter() - begin:.0f} s. The picture is {picture}.")


if __name__ == "__main__":
    main()
