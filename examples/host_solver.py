"""Calibrate a differential equation of SciPy inside an Equinox model, with error bars.

The monthly number of airline passengers from 1949 to 1960 is modeled as a growing market, with
twelve factors for the months. The market is a logistic differential equation, which SciPy's
`solve_ivp` solves on the host; the rest is in JAX. All parameters are calibrated together, by
Gauss-Newton steps (forward mode). Their error bars come from the Hessian of the likelihood
(forward over reverse mode), and are compared with the error bars of simulated data. The last
two years are held out, and forecast with error bars.
"""

import argparse
import json
import pathlib

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from scipy.integrate import solve_ivp
from sktime.datasets import load_airline
from tqdm import tqdm


jax.config.update("jax_enable_x64", True)  # SciPy computes in double precision

HELD_OUT, STEPS, SIMULATIONS = 24, 12, 200  # months held out, and steps of Gauss-Newton
NAMES = {"log_start": "start", "log_rate": "rate per year", "log_capacity": "capacity"}


# The solver's relative error is 1e-9, and the step of the differences its third root.
@eqg.host_function(out=lambda growth, years: years, finite_difference="central", step=1e-3)
def solve_growth(growth, years):  # the logarithm of the market
    def logistic(year, market):
        return np.exp(growth.log_rate) * market * (1 - market / np.exp(growth.log_capacity))

    start = [np.exp(growth.log_start)]
    solution = solve_ivp(logistic, (0, years[-1]), start, t_eval=years, rtol=1e-9, atol=1e-9)
    return np.log(solution.y[0])


class Growth(eqx.Module):
    log_start: Float[Array, ""]
    log_rate: Float[Array, ""]
    log_capacity: Float[Array, ""]


class Passengers(eqx.Module):
    growth: Growth
    months: Float[Array, "11"]  # the twelfth makes the sum zero

    def __call__(self, n):
        """The logarithm of the number of passengers (in thousands) in `n` months."""
        months = jnp.append(self.months, -jnp.sum(self.months))
        return solve_growth(self.growth, jnp.arange(n) / 12) + months[jnp.arange(n) % 12]


def calibrate(model, y, steps=STEPS):
    """The model with the least squares, by Gauss-Newton steps."""
    flat, unflatten = ravel_pytree(model)
    residuals = lambda flat: unflatten(flat)(len(y)) - y
    for _ in range(steps):
        step = jnp.linalg.lstsq(jax.jacfwd(residuals)(flat), -residuals(flat))[0]
        flat = flat + step * jnp.minimum(1.0, 0.5 / jnp.max(jnp.abs(step)))  # not too long
    return unflatten(flat)


@jax.jit
def covariances(model, y, noise):
    """From the Hessian, and from first derivatives only."""
    flat, unflatten = ravel_pytree(model)
    residuals = lambda flat: (unflatten(flat)(len(y)) - y) / noise
    hessian = jax.hessian(lambda flat: jnp.sum(residuals(flat) ** 2) / 2)(flat)
    jacobian = jax.jacrev(residuals)(flat)
    return jnp.linalg.inv(hessian), jnp.linalg.inv(jacobian.T @ jacobian)


def forecast(model, covariance, noise, n):
    """Mean and standard deviation of the logarithm at `n` months, new noise included."""
    flat, unflatten = ravel_pytree(model)
    jacobian = jax.jacfwd(lambda flat: unflatten(flat)(n))(flat)
    variance = jnp.einsum("ti,ij,tj->t", jacobian, covariance, jacobian)
    return model(n), jnp.sqrt(variance + noise**2)


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(passengers, mean, deviation, growth, deviations, simulated):
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, *right = figure.subplots(1, 4, width_ratios=(3.4, 1, 1, 1))
    years = 1949 + np.arange(len(passengers)) / 12
    left.plot(years, passengers, ".", color="#2b2b2b", markersize=4, label="passengers")
    left.plot(years, np.exp(mean), color="#00798c", label="model")
    band = [np.exp(mean + z * deviation) for z in (-2, 2)]
    left.fill_between(years, *band, color="#00798c", alpha=0.2, label="2 deviations")
    left.axvline(years[-HELD_OUT], color="#c4c4c4", label="held out from here on")
    left.set(title="Thousands of passengers a month", ylim=(0, None))
    left.legend(frameon=False, loc="upper left")
    z = np.linspace(-3, 3, 200)
    for panel, (name, title) in zip(right, NAMES.items(), strict=True):
        panel.hist(getattr(simulated, name), bins=20, color="#c4c4c4", density=True)
        bell = np.exp(-(z**2) / 2) / (deviations[name] * (2 * np.pi) ** 0.5)
        panel.plot(getattr(growth, name) + z * deviations[name], bell, color="#c8553d")
        panel.set(title=f"log of {title}", yticks=[])
    return figure


def main():
    parser = argparse.ArgumentParser(description="Calibrate a SciPy model in an Equinox model.")
    parser.add_argument("--quick", action="store_true", help="few steps, few simulations")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    args = parser.parse_args()
    steps, simulations = (8, 4) if args.quick else (STEPS, SIMULATIONS)
    passengers = np.asarray(load_airline())
    y = jnp.log(passengers[:-HELD_OUT])
    first = Growth(jnp.log(120.0), jnp.log(0.15), jnp.log(1000.0))
    model = calibrate(Passengers(first, jnp.zeros(11)), y, steps)
    noise = jnp.sqrt(jnp.sum((model(len(y)) - y) ** 2) / (len(y) - 14))  # of 14 parameters
    covariance, of_first_order = covariances(model, y, noise)
    data = model(len(y)) + noise * jr.normal(jr.key(0), (simulations, len(y)))
    recalibrate = jax.jit(lambda y: calibrate(model, y, steps=4).growth)
    samples = [recalibrate(y) for y in tqdm(data, leave=False, disable=None)]
    simulated = jax.tree.map(lambda *xs: jnp.stack(xs), *samples)
    deviations, result = {}, {}
    print("Parameter, value, deviations: of the Hessian, of Gauss-Newton, simulated")
    for i, (name, title) in enumerate(NAMES.items()):
        spread = jnp.std(getattr(simulated, name))
        bars = [
            float(x) for x in (covariance[i, i] ** 0.5, of_first_order[i, i] ** 0.5, spread)
        ]
        value, deviations[name] = float(jnp.exp(getattr(model.growth, name))), bars[0]
        result[title] = {"value": value, "deviations": bars}
        print(f"{title:16} {value:10.3f}", *(f" {100 * bar:8.1f} %" for bar in bars))
    mean, deviation = forecast(model, covariance, noise, len(passengers))
    z = (jnp.log(passengers) - mean)[-HELD_OUT:] / deviation[-HELD_OUT:]
    result["inside"] = int(jnp.sum(jnp.abs(z) < 2))
    print(f"{result['inside']} of {HELD_OUT} held-out months are within two deviations.")
    figure = draw(passengers, mean, deviation, model.growth, deviations, simulated)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(result))
    figure.savefig(picture := args.out / "host-solver.png", dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
