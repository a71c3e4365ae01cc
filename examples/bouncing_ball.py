"""Throw a ball so that it hits a target after it has bounced: a gradient through impacts.

A ball is simulated with fixed steps in a `jax.lax.scan`. If it crosses the floor in a step, the
time of the impact is bisected, the ball is reflected, and the step is completed. The values are
right, and the gradient is wrong: a bisection has no derivative. `eqg.event_time` and `eqg.jump`
give the time of the impact and the state after it their derivatives.
"""

import argparse
import functools as ft
import json
import pathlib

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import trange


GRAVITY, DT, STEPS, UPDATES = 9.8, 0.02, 80, 300
RESTITUTION, GRIP = 0.8, 0.9  # of the speeds up and along the floor that an impact leaves
TARGET = np.array([2.5, 0.2], np.float32)  # where the ball is to be after these steps
FIRST_THROW = np.array([1.0, 0.6], np.float32)


# A ball is its position and its velocity, both across and up.
fall = lambda t, ball: (ball[1], jnp.array([0.0, -GRAVITY]))
height = lambda t, ball: ball[0][1]
bounce = lambda t, ball: (ball[0], ball[1] * jnp.array([GRIP, -RESTITUTION]))


def move(ball, dt):
    (position, velocity), down = ball, jnp.array([0.0, GRAVITY])
    return position + velocity * dt - down * dt**2 / 2, velocity - down * dt


def time_to_impact(ball):
    """Bisect the time at which the ball is on the floor, within a step."""

    def halve(_, bounds):
        middle = (bounds[0] + bounds[1]) / 2
        is_above = height(0, move(ball, middle)) > 0
        return jnp.where(is_above, middle, bounds[0]), jnp.where(is_above, bounds[1], middle)

    return jax.lax.fori_loop(0, 30, halve, (jnp.zeros(()), jnp.full((), DT)))[1]


def step(ball, t, *, with_events):
    moved = move(ball, DT)
    hits = height(t, moved) < 0
    t_hit = t + time_to_impact(ball)
    at_impact = move(ball, t_hit - t)
    if with_events:
        t_hit, at_impact = eqg.event_time(height, at_impact, fall, t_hit, where=hits)
        t_hit, reflected = eqg.jump(bounce, at_impact, fall, t_hit)
    else:
        reflected = bounce(t_hit, at_impact)
    reflected = move(reflected, t + DT - t_hit)
    ball = jax.tree.map(lambda x, y: jnp.where(hits, x, y), reflected, moved)
    return ball, ball[0]


def simulate(throw, *, with_events=True):  # the position after each step
    start, times = (jnp.array([0.0, 1.0]), throw), DT * jnp.arange(STEPS)
    return jax.lax.scan(ft.partial(step, with_events=with_events), start, times)[1]


def loss(throw, *, with_events=True):
    return jnp.sum((simulate(throw, with_events=with_events)[-1] - TARGET) ** 2)


def loss_in_closed_form(throw):  # parabola after parabola
    across, up = throw
    t = (up + jnp.sqrt(up**2 + 2 * GRAVITY)) / GRAVITY
    now = (across * t, t, GRIP * across, RESTITUTION * (GRAVITY * t - up))
    for _ in range(3):
        x, t, across, up = now
        later = t + 2 * up / GRAVITY
        after = (x + across * (later - t), later, GRIP * across, RESTITUTION * up)
        now = [jnp.where(later < DT * STEPS, a, b) for a, b in zip(after, now, strict=True)]
    x, t, across, up = now
    rest = DT * STEPS - t
    end = jnp.stack([x + across * rest, up * rest - GRAVITY * rest**2 / 2])
    return jnp.sum((end - TARGET) ** 2)


def train(updates, name, *, with_events):
    optimizer = optax.adam(0.02)

    @jax.jit
    def update(throw, state):
        gradient = jax.grad(loss)(throw, with_events=with_events)
        changes, state = optimizer.update(gradient, state)
        return optax.apply_updates(throw, changes), state

    throw, state = jnp.asarray(FIRST_THROW), optimizer.init(jnp.asarray(FIRST_THROW))
    for _ in trange(updates, desc=name, leave=False, disable=None):
        throw, state = update(throw, state)
    return throw, float(loss(throw)) ** 0.5


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(speeds, curves, throws):
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, throw in throws.items():
        left.plot(*simulate(jnp.asarray(throw)).T, label=name)
    left.plot(*TARGET, "*", color="black", markersize=14, label="target")
    left.set(xlabel="distance (m)", ylabel="height (m)", title="The throw")
    for (name, slopes), style in zip(curves.items(), ("C1", "C2", "k:"), strict=True):
        right.plot(speeds, slopes, style, label=name)
    right.set(title="The slope of the loss", xlabel="speed upwards (m/s)")
    left.legend(frameon=False)
    right.legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Hit a target with a ball that bounces.")
    parser.add_argument("--quick", action="store_true", help="few throws, a few updates")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    n, updates = (20, 10) if args.quick else (400, UPDATES)
    start = jnp.stack([jnp.full(n, FIRST_THROW[0]), jnp.linspace(0.0, 4.0, n)], axis=1)
    slopes = lambda fn: jax.jit(jax.vmap(jax.grad(fn)))(start)[:, 1]
    fns = ft.partial(loss, with_events=False), loss, loss_in_closed_form
    plain, ours, exact = map(slopes, fns)
    error = jnp.max(jnp.abs(ours - exact)) / jnp.max(jnp.abs(exact))
    wrong = jnp.mean(jnp.sign(plain) != jnp.sign(exact))
    print(f"With `event_time` and `jump`, the gradient is {error:.1e} from the closed form.")
    print(f"Without them, it has the wrong sign for {wrong:.0%} of the throws.")
    throws: dict = {"first throw": FIRST_THROW}
    result = {"error": float(error), "wrong_sign": float(wrong)}
    for name, with_events in (("jax.grad", False), ("event_time and jump", True)):
        throws[name], result[name] = train(updates, name, with_events=with_events)
        print(f"Trained with {name}: the ball is {result[name]:.1e} m from the target.")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(result))
    picture = args.out / "bouncing-ball.png"
    curves = {"jax.grad": plain, "event_time and jump": ours, "closed form": exact}
    draw(start[:, 1], curves, throws).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
