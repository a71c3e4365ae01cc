"""A physics model whose value is finite and whose gradient is NaN: find out why, and train it.

Droplets fall through moist air onto a floor. Drag, contact, turbulence and phase change are
each written with a `jnp.where` that guards a formula where the formula is not defined: no drag
on a droplet at rest, no contact force above the floor. The values are finite. But reverse mode
multiplies the zero that a guard sends back by the infinite derivative behind the guard, and
that is NaN.

`eqg.explain_nan` names the ten lines. `eqg.zero_safe` differentiates the same code without what
the guards did not take. The gradient is then compared with finite differences in double
precision, and the parameters are fitted to observed tracks.
"""

import argparse
import linecache
import pathlib
import time

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.figure import Figure


DROPLETS = 12
STEPS = 60
DT = 0.05
UPDATES = 300
LEARNING_RATE = 0.01
DIRECTIONS = 20  # in which the gradient is compared with finite differences

# ---------------------------------------------------------------- the model


class Droplets(eqx.Module):
    """Positions and velocities (across and up), and the liquid and vapor of each droplet."""

    position: Float[Array, "*steps droplets 2"]
    velocity: Float[Array, "*steps droplets 2"]
    liquid: Float[Array, "*steps droplets"]
    vapor: Float[Array, "*steps droplets"]


class Physics(eqx.Module):
    """Forces on droplets and exchange of water. The parameters are logarithms."""

    drag: Float[Array, ""]
    attraction: Float[Array, ""]
    stiffness: Float[Array, ""]
    mixing: Float[Array, ""]
    evaporation: Float[Array, ""]

    def __call__(self, droplets, wind):
        """The droplets one step later."""
        force = self.drag_force(droplets, wind) + self.pair_force(droplets)
        force = force + self.contact_force(droplets) - jnp.array([0.0, 1.0])  # gravity
        velocity = droplets.velocity + DT * force
        position = droplets.position + DT * velocity
        gained = DT * self.mixing_rate(droplets)
        lost = DT * self.evaporation_rate(droplets)
        liquid, vapor = droplets.liquid - lost, droplets.vapor + gained + lost
        return Droplets(position, velocity, liquid, vapor)

    def drag_force(self, droplets, wind):
        relative = droplets.velocity - wind
        squared = jnp.sum(relative**2, axis=1, keepdims=True)
        speed = jnp.where(squared > 0, jnp.sqrt(squared), 0.0)
        direction = jnp.where(squared > 0, relative / speed, 0.0)
        turbulence = jnp.where(squared > 0, 0.6 * speed**0.687, 0.0)
        return -jnp.exp(self.drag) * speed**2 * (1 + turbulence) * direction

    def pair_force(self, droplets):
        offset = droplets.position[:, None] - droplets.position
        distance = jnp.linalg.norm(offset, axis=-1, keepdims=True)
        others = ~jnp.eye(DROPLETS, dtype=bool)[:, :, None]
        pull = jnp.where(others, offset / (0.3 + distance) ** 3, 0.0)
        return -jnp.exp(self.attraction) * jnp.sum(pull, axis=1) / DROPLETS

    def contact_force(self, droplets):
        depth = -droplets.position[:, 1]
        elastic = jnp.where(depth > 0, depth**1.5, 0.0)
        stiffening = jnp.where(depth > 0, jnp.log(depth), 0.0)
        across, up = droplets.velocity.T
        angle = jnp.where(depth > 0, jnp.arctan2(up, across), 0.0)
        normal = jnp.exp(self.stiffness) * elastic * (1 - 0.1 * stiffening)
        return jnp.stack([-0.2 * normal * jnp.cos(angle), normal], axis=1)

    def mixing_rate(self, droplets):
        spread = jnp.var(droplets.vapor)
        turbulence = jnp.where(spread > 0, jnp.sqrt(spread), 0.0)
        shear = jnp.sum(droplets.velocity**2, axis=1)
        stability = jnp.where(shear > 0, 0.01 / shear, 100.0)
        rate = jnp.exp(self.mixing) * (0.1 + turbulence) * (1 + jnp.exp(-stability))
        return rate * (jnp.mean(droplets.vapor) - droplets.vapor)

    def evaporation_rate(self, droplets):
        scaled = 100 * droplets.position[:, 1]
        height = jnp.where(scaled < 20, jnp.log1p(jnp.exp(scaled)), scaled) / 100
        deficit = 1 + 0.3 * height - droplets.vapor
        return jnp.exp(self.evaporation) * droplets.liquid ** (2 / 3) * deficit


class Forecast(eqx.Module):
    """What is estimated from observations: the first state, and the parameters."""

    start: Droplets
    physics: Physics

    def __call__(self, wind):
        """The droplets at every step."""

        def step(droplets, _):
            droplets = self.physics(droplets, wind)
            return droplets, droplets

        return jax.lax.scan(step, self.start, length=STEPS)[1]


def loss(forecast, wind, observed):
    errors = jax.tree.map(lambda x, y: jnp.mean((x - y) ** 2), forecast(wind), observed)
    return sum(jax.tree.leaves(errors))


def first_guess(wind, *, key):
    """One droplet lies at rest on the floor, one moves with the wind, and all are surrounded
    by the same amount of vapor: ordinary states, in which the formulas are not defined."""
    key1, key2 = jr.split(key)
    position = jr.uniform(key1, (DROPLETS, 2), jnp.float32, 0.1, 2.0)
    velocity = 0.3 * jr.normal(key2, (DROPLETS, 2), jnp.float32)
    position = position.at[0, 1].set(0.0)
    velocity = velocity.at[0].set(0.0).at[1].set(wind)
    start = Droplets(position, velocity, jnp.full(DROPLETS, 0.5), jnp.full(DROPLETS, 0.9))
    return Forecast(start, physics_of(0.5, 1.0, 30.0, 0.5, 0.5))


def truth(guess, *, key):
    """Another start and other parameters."""
    leaves, treedef = jax.tree.flatten(guess.start)
    keys = jr.split(key, len(leaves))
    moved = [
        x + 0.03 * jr.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)
    ]
    return Forecast(jax.tree.unflatten(treedef, moved), physics_of(1.0, 0.5, 60.0, 1.0, 0.2))


def physics_of(*values):
    return Physics(*(jnp.log(jnp.asarray(value, jnp.float32)) for value in values))


# ---------------------------------------------------------------- the gradient


def slopes(gradient, forecast, wind, observed, *, key):
    """The slope of the loss in random directions: by the gradient, and by central differences
    in double precision."""
    leaves, treedef = jax.tree.flatten(forecast)
    by_gradient, by_differences = [], []
    for one in jr.split(key, DIRECTIONS):
        keys = jr.split(one, len(leaves))
        direction = [jr.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
        products = map(jnp.vdot, jax.tree.leaves(gradient), direction)
        by_gradient.append(float(sum(products)))
        direction = jax.tree.unflatten(treedef, direction)
        by_differences.append(central_difference(forecast, direction, wind, observed))
    return np.array(by_gradient), np.array(by_differences)


@jax.jit
def loss_along(step, forecast, direction, wind, observed):
    moved = jax.tree.map(lambda x, d: x + step * d, forecast, direction)
    return loss(moved, wind, observed)


def central_difference(*args, step=1e-6):
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), args)
        difference = loss_along(step, *args) - loss_along(-step, *args)
        return float(difference / (2 * step))


def train(loss, forecast, wind, observed, updates):
    """The loss before each update."""
    optimizer = optax.adam(LEARNING_RATE)

    def update(state, _):
        forecast, opt_state = state
        value, gradient = jax.value_and_grad(loss)(forecast, wind, observed)
        with jax.numpy_dtype_promotion("standard"):  # Optax fails where it is "strict"
            changes, opt_state = optimizer.update(gradient, opt_state)
        return (eqx.apply_updates(forecast, changes), opt_state), value

    start = (forecast, optimizer.init(forecast))
    return np.asarray(
        jax.jit(lambda start: jax.lax.scan(update, start, length=updates)[1])(start)
    )


# ---------------------------------------------------------------- the picture

INK, GRAY, TEAL, RUST = "#2b2b2b", "#c4c4c4", "#00798c", "#c8553d"
STYLE: dict = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
}


@matplotlib.rc_context(STYLE)
def draw(report, by_gradient, by_differences, losses):
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplot_mosaic(
        [["lines", "slopes"], ["lines", "loss"]], width_ratios=(1.2, 1)
    )
    for panel in panels.values():
        panel.spines[["right", "top"]].set_visible(False)

    lines = sorted({(found.file, found.line) for found in report.found}, key=lambda x: x[1])
    counts = [
        sum(found.count for found in report.found if (found.file, found.line) == line)
        for line in lines
    ]
    rows = np.arange(len(lines))
    panels["lines"].barh(rows, counts, height=0.3, color=RUST)
    for row, line in zip(rows, lines, strict=True):
        text = f"{line[1]}  {linecache.getline(*line).strip()}"
        panels["lines"].text(0, row - 0.25, text, family="monospace", size=8)
    panels["lines"].set(xlabel="steps in which the gradient becomes NaN here", yticks=())
    panels["lines"].set(title="What eqg.explain_nan found, line by line")
    panels["lines"].invert_yaxis()

    limits = 1.1 * np.max(np.abs(by_differences)) * np.array([-1, 1])
    panels["slopes"].plot(limits, limits, color=GRAY)
    panels["slopes"].plot(by_differences, by_gradient, "o", color=TEAL)
    panels["slopes"].set(xlabel="finite differences", ylabel="gradient of eqg.zero_safe(loss)")
    panels["slopes"].set(title=f"The slope of the loss in {len(by_gradient)} directions")

    for (name, values), color in zip(losses.items(), (RUST, TEAL), strict=True):
        finite = values[np.isfinite(values)]
        if len(finite) < len(values):
            panels["loss"].plot(len(finite) - 1, finite[-1], "x", color=color)
            name = f"{name}: NaN after {len(finite)} update"
        panels["loss"].plot(finite, color=color, label=name)
    panels["loss"].set(yscale="log", xlabel="update", title="Training loss")
    panels["loss"].legend(frameon=False)
    return figure


# ---------------------------------------------------------------- all of it


def main():
    root = pathlib.Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description="Find ten causes of a NaN gradient.")
    parser.add_argument("--quick", action="store_true", help="a few updates")
    parser.add_argument("--out", type=pathlib.Path, default=root / "docs" / "images")
    args = parser.parse_args()
    begin = time.perf_counter()

    wind = jnp.array([0.4, 0.0])
    guess = first_guess(wind, key=jr.key(0))
    observed = truth(guess, key=jr.key(1))(wind)
    value, gradient = jax.value_and_grad(loss)(guess, wind, observed)
    bad = [not jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(gradient)]
    print(
        f"The loss is {value:.4f}. {sum(bad)} of {len(bad)} leaves of its gradient are NaN.\n"
    )

    report = eqg.explain_nan(loss, guess, wind, observed)
    print(report)

    safe_loss = eqg.zero_safe(loss)
    gradient = jax.grad(safe_loss)(guess, wind, observed)
    by_gradient, by_differences = slopes(gradient, guess, wind, observed, key=jr.key(2))
    error = np.max(np.abs(by_gradient - by_differences)) / np.max(np.abs(by_differences))
    print(f"\nWith `eqg.zero_safe` it is finite. Finite differences: {error:.1e} from it.")

    updates = 3 if args.quick else UPDATES
    losses = {
        "plain": train(loss, guess, wind, observed, updates),
        "zero_safe": train(safe_loss, guess, wind, observed, updates),
    }
    for name, values in losses.items():
        print(f"{name}: the loss goes from {values[0]:.4f} to {values[-1]:.6f}")

    args.out.mkdir(parents=True, exist_ok=True)
    picture = args.out / "nan-hunt.png"
    draw(report, by_gradient, by_differences, losses).savefig(picture, dpi=150)
    print(f"The picture is {picture}, after {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
