"""A physics model whose value is finite and whose gradient is NaN: find out why, and train it.

Drag, contact, turbulence and phase change of falling droplets are each written with a
`jnp.where` that guards a formula where it is not defined. Reverse mode multiplies the zero that
a guard sends back by the infinite derivative behind it, and that is NaN. `eqg.explain_nan`
names eight lines. `eqg.zero_safe` differentiates the same code without what is not taken.
"""

import argparse
import json
import pathlib

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from tqdm import trange


DROPLETS, STEPS, DT, UPDATES = 12, 60, 0.05, 300
WIND = jnp.array([0.4, 0.0], jnp.float32)


class Droplets(eqx.Module):
    position: Float[Array, "*steps droplets 2"]  # across and up
    velocity: Float[Array, "*steps droplets 2"]
    liquid: Float[Array, "*steps droplets"]
    vapor: Float[Array, "*steps droplets"]


class Forecast(eqx.Module):
    start: Droplets
    physics: Float[Array, "5"]  # logarithms of positive parameters

    def __call__(self):
        return jax.lax.scan(lambda now, _: self.step(now), self.start, length=STEPS)[1]

    def step(self, droplets):
        drag, attraction, stiffness, mixing, evaporation = jnp.exp(self.physics)
        relative = droplets.velocity - WIND
        squared = jnp.sum(relative**2, axis=1, keepdims=True)
        speed = jnp.where(squared > 0, jnp.sqrt(squared), 0.0)
        direction = jnp.where(squared > 0, relative / speed, 0.0)
        turbulence = jnp.where(squared > 0, 0.6 * speed**0.687, 0.0)
        force = -drag * speed**2 * (1 + turbulence) * direction - jnp.array([0.0, 1.0])
        offset = droplets.position[:, None] - droplets.position
        distance = jnp.linalg.norm(offset, axis=-1, keepdims=True)
        pull = jnp.where(jnp.eye(DROPLETS)[:, :, None], 0.0, offset / (0.3 + distance) ** 3)
        force = force - attraction * jnp.sum(pull, axis=1) / DROPLETS
        depth = -droplets.position[:, 1]
        elastic = jnp.where(depth > 0, depth**1.5, 0.0)
        stiffening = jnp.where(depth > 0, jnp.log(depth), 0.0)
        angle = jnp.where(depth > 0, jnp.arctan2(*droplets.velocity.T[::-1]), 0.0)
        normal = stiffness * elastic * (1 - 0.1 * stiffening)
        force = force + jnp.stack([-0.2 * normal * jnp.cos(angle), normal], axis=1)
        spread = jnp.var(droplets.vapor)
        turbulence = jnp.where(spread > 0, jnp.sqrt(spread), 0.0)
        shear = jnp.sum(droplets.velocity**2, axis=1)
        stability = jnp.where(shear > 0, 0.01 / shear, 100.0)
        rate = mixing * (0.1 + turbulence) * (1 + jnp.exp(-stability))
        gained = DT * rate * (jnp.mean(droplets.vapor) - droplets.vapor)
        scaled = 100 * droplets.position[:, 1]
        height = jnp.where(scaled < 20, jnp.log1p(jnp.exp(scaled)), scaled) / 100
        deficit = 1 + 0.3 * height - droplets.vapor
        lost = DT * evaporation * droplets.liquid ** (2 / 3) * deficit
        velocity = droplets.velocity + DT * force
        water = droplets.liquid - lost, droplets.vapor + gained + lost
        droplets = Droplets(droplets.position + DT * velocity, velocity, *water)
        return droplets, droplets


def loss(forecast, observed):
    errors = jax.tree.map(lambda x, y: jnp.mean((x - y) ** 2), forecast(), observed)
    return sum(jax.tree.leaves(errors))


def first_guess():
    """One droplet lies on the floor, one moves with the wind: ordinary states."""
    key1, key2 = jr.split(jr.key(0))
    position = jr.uniform(key1, (DROPLETS, 2), jnp.float32, 0.1, 2.0).at[0, 1].set(0.0)
    velocity = (0.3 * jr.normal(key2, (DROPLETS, 2))).at[:2].set(jnp.stack([0 * WIND, WIND]))
    start = Droplets(position, velocity, jnp.full(DROPLETS, 0.5), jnp.full(DROPLETS, 0.9))
    return Forecast(start, jnp.log(jnp.array([0.5, 1.0, 30.0, 0.5, 0.5])))


def train(loss, forecast, observed, updates):
    optimizer = optax.adam(0.01)

    @jax.jit
    def update(forecast, state):
        value, gradient = jax.value_and_grad(loss)(forecast, observed)
        changes, state = optimizer.update(gradient, state)
        return eqx.apply_updates(forecast, changes), state, value

    state, losses = optimizer.init(forecast), []
    for _ in trange(updates, leave=False, disable=None):
        forecast, state, value = update(forecast, state)
        losses.append(float(value))
    return losses


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(report, losses):
    figure = Figure(figsize=(11, 5), layout="constrained")
    lines, training = figure.subplots(1, 2)
    for row, found in enumerate(report.found):
        lines.barh(row, found.count, height=0.3, color="#c8553d")
        lines.text(0, 0.25 + row, f"{found.line}  {found.code}", family="monospace", size=7)
    lines.set(title="Steps in which the gradient becomes NaN in a line", yticks=[])
    training.plot(losses["plain"], "x", color="#c8553d", label="plain: NaN after this")
    training.plot(losses["zero_safe"], color="#00798c", label="zero_safe")
    training.set(yscale="log", xlabel="update", title="Training loss")
    training.legend(frameon=False)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Find the causes of a NaN gradient.")
    parser.add_argument("--quick", action="store_true", help="a few updates")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    guess = first_guess()
    flat, unflatten = ravel_pytree(guess.start)
    start = unflatten(flat + 0.03 * jr.normal(jr.key(1), flat.shape))
    observed = Forecast(start, jnp.log(jnp.array([1.0, 0.5, 60.0, 1.0, 0.2])))()
    report = eqg.explain_nan(loss, guess, observed)
    print(report)
    safe_loss = eqg.zero_safe(loss)
    print(eqgt.check_gradients(safe_loss, guess, observed, raises=False))
    losses = {}
    for name, fn in {"plain": loss, "zero_safe": safe_loss}.items():
        losses[name] = train(fn, guess, observed, 3 if args.quick else UPDATES)
        print(f"{name}: the loss goes from {losses[name][0]:.4f} to {losses[name][-1]:.6f}")
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"lines": sorted({found.line for found in report.found}), **losses}
    (args.out / "result.json").write_text(json.dumps(result))
    picture = args.out / "nan-hunt.png"
    draw(report, losses).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
