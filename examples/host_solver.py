"""Calibrate a differential equation of SciPy inside an Equinox model, with error bars.

The monthly number of airline passengers from 1949 to 1960 is modeled as a growing market, with
twelve factors for the months. The market is a logistic differential equation, which SciPy's
`solve_ivp` solves on the host; the factors and the likelihood are in JAX. All parameters are
calibrated together, by Gauss-Newton steps (forward mode). Their error bars come from the
Hessian of the likelihood (forward over reverse mode), and are compared with the spread of the
parameters that are calibrated to simulated data. The last two years are held out, and forecast
with error bars.
"""

import argparse
import csv
import importlib.util
import json
import pathlib
import time

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.flatten_util
import jax.numpy as jnp
import jax.random as jr
import matplotlib
import numpy as np
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from scipy.integrate import solve_ivp


jax.config.update("jax_enable_x64", True)  # SciPy computes in double precision

HELD_OUT = 24  # months
STEPS = 12  # of Gauss-Newton
SIMULATIONS = 200

# ---------------------------------------------------------------- the model


# The solver's relative error is 1e-9, and the step of the differences its third root.
@eqg.host_function(out=lambda growth, years: years, finite_difference="central", step=1e-3)
def solve_growth(growth, years):
    """The logarithm of the market at these years, starting at zero."""

    def logistic(year, market):
        return np.exp(growth.log_rate) * market * (1 - market / np.exp(growth.log_capacity))

    start = [np.exp(growth.log_start)]
    solution = solve_ivp(logistic, (0, years[-1]), start, t_eval=years, rtol=1e-9, atol=1e-9)
    return np.log(solution.y[0])


class Growth(eqx.Module):
    """The logarithms of the parameters of a logistic equation, all of which are positive."""

    log_start: Float[Array, ""]
    log_rate: Float[Array, ""]
    log_capacity: Float[Array, ""]

    def __call__(self, years):
        return solve_growth(self, years)


class Passengers(eqx.Module):
    """The logarithm of the number of passengers (in thousands) at the months from a first
    January on."""

    growth: Growth
    months: Float[Array, "11"]  # the twelfth makes the sum zero

    def __call__(self, n):
        months = jnp.append(self.months, -jnp.sum(self.months))
        index = jnp.arange(n)
        return self.growth(index / 12.0) + months[index % 12]


# ---------------------------------------------------------------- calibration


def calibrate(model, y, steps=STEPS):
    """The model with the least squares, by Gauss-Newton steps."""
    flat, unflatten = jax.flatten_util.ravel_pytree(model)
    residuals = lambda flat: unflatten(flat)(len(y)) - y
    for _ in range(steps):
        step = jnp.linalg.lstsq(jax.jacfwd(residuals)(flat), -residuals(flat))[0]
        # The first step of an exponential may be too long.
        flat = flat + step * jnp.minimum(1.0, 0.5 / jnp.max(jnp.abs(step)))
    return unflatten(flat)


def noise_of(model, y):
    residuals = model(len(y)) - y
    n_parameters = sum(x.size for x in jax.tree.leaves(model))
    return jnp.sqrt(jnp.sum(residuals**2) / (len(y) - n_parameters))


@jax.jit
def covariances(model, y, noise):
    """Of the calibrated parameters: from the Hessian, and from first derivatives only."""
    flat, unflatten = jax.flatten_util.ravel_pytree(model)
    residuals = lambda flat: (unflatten(flat)(len(y)) - y) / noise
    hessian = jax.hessian(lambda flat: jnp.sum(residuals(flat) ** 2) / 2)(flat)
    jacobian = jax.jacrev(residuals)(flat)
    return jnp.linalg.inv(hessian), jnp.linalg.inv(jacobian.T @ jacobian)


def forecast(model, covariance, noise, n):
    """Mean and standard deviation of the logarithm at `n` months, new noise included."""
    flat, unflatten = jax.flatten_util.ravel_pytree(model)
    of_months = lambda flat: unflatten(flat)(n)
    jacobian = jax.jacfwd(of_months)(flat)
    variance = jnp.einsum("ti,ij,tj->t", jacobian, covariance, jacobian)
    return of_months(flat), jnp.sqrt(variance + noise**2)


def simulate(model, noise, n, simulations, key):
    """Models that are calibrated to data simulated by this one."""
    recalibrate = jax.jit(lambda y: calibrate(model, y, steps=4))
    clean = model(n)
    data = clean + noise * jr.normal(key, (simulations, n))
    return jax.tree.map(lambda *xs: jnp.stack(xs), *map(recalibrate, data))


# ---------------------------------------------------------------- the data and the picture


def load_passengers():
    """The monthly passengers in thousands, from the file that sktime ships."""
    spec = importlib.util.find_spec("sktime")
    if spec is None or spec.origin is None:
        raise ImportError("The data come with sktime: `pip install sktime`.")
    data = pathlib.Path(spec.origin).parent / "datasets" / "data" / "Airline" / "Airline.csv"
    with data.open() as file:
        return jnp.array([float(row[1]) for row in list(csv.reader(file))[1:]])


INK, GRAY, TEAL, RUST = "#2b2b2b", "#c4c4c4", "#00798c", "#c8553d"
STYLE: dict = {
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), INK),
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.spines.right": False,
    "axes.spines.top": False,
}
NAMES = {"log_start": "start", "log_rate": "rate per year", "log_capacity": "capacity"}


@matplotlib.rc_context(STYLE)
def draw(passengers, mean, deviation, growth, deviations, simulated):
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, *right = figure.subplots(1, 4, width_ratios=(3.4, 1, 1, 1))
    years = 1949 + np.arange(len(passengers)) / 12
    left.plot(years, passengers, ".", color=INK, markersize=4, label="passengers")
    left.plot(years, np.exp(mean), color=TEAL, label="model")
    low, high = np.exp(mean - 2 * deviation), np.exp(mean + 2 * deviation)
    left.fill_between(years, low, high, color=TEAL, alpha=0.2, lw=0, label="2 deviations")
    left.axvline(years[-HELD_OUT], color=GRAY, lw=1)
    left.annotate("held out", (years[-HELD_OUT] + 0.1, 110), color=INK)
    left.set(title="Thousands of passengers a month", ylim=(0, None))
    left.legend(frameon=False, loc="upper left")
    for panel, (name, title) in zip(right, NAMES.items(), strict=True):
        samples = np.exp(getattr(simulated, name))
        center, width = float(getattr(growth, name)), deviations[name]
        panel.hist(samples, bins=20, color=GRAY, density=True)
        grid = np.linspace(samples.min(), samples.max(), 200)
        # That the logarithm is normal, with the standard deviation from the Hessian.
        z = (np.log(grid) - center) / width
        panel.plot(grid, np.exp(-(z**2) / 2) / (grid * width * (2 * np.pi) ** 0.5), color=RUST)
        panel.set(title=title, yticks=[])
        panel.spines["left"].set_visible(False)
    return figure


# ---------------------------------------------------------------- all of it


def main():
    root = pathlib.Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description="Calibrate a SciPy model in an Equinox model.")
    parser.add_argument("--quick", action="store_true", help="few steps, few simulations")
    parser.add_argument("--out", type=pathlib.Path, default=root / "docs" / "images")
    args = parser.parse_args()
    steps, simulations = (8, 4) if args.quick else (STEPS, SIMULATIONS)
    start = time.perf_counter()

    passengers = load_passengers()
    y = jnp.log(passengers[:-HELD_OUT])
    first = Growth(jnp.log(120.0), jnp.log(0.15), jnp.log(1000.0))
    model = calibrate(Passengers(first, jnp.zeros(11)), y, steps)
    noise = noise_of(model, y)
    covariance, of_first_order = covariances(model, y, noise)
    simulated = simulate(model, noise, len(y), simulations, jr.key(0)).growth

    deviations, result = {}, {}
    print("                      value   Hessian   Gauss-Newton   simulated")
    for i, (name, title) in enumerate(NAMES.items()):
        bars = [float(jnp.sqrt(c[i, i])) for c in (covariance, of_first_order)]
        bars.append(float(jnp.std(getattr(simulated, name))))
        value = float(jnp.exp(getattr(model.growth, name)))
        deviations[name] = bars[0]
        result[title] = {"value": value, "deviations": bars}
        percent = "  ".join(f"{100 * bar:8.1f} %" for bar in bars)
        print(f"{title:16} {value:10.3f} {percent}")

    mean, deviation = forecast(model, covariance, noise, len(passengers))
    z = (jnp.log(passengers) - mean)[-HELD_OUT:] / deviation[-HELD_OUT:]
    inside = int(jnp.sum(jnp.abs(z) < 2))
    print(f"{inside} of the {HELD_OUT} months held out are within two standard deviations.")
    result["inside"] = inside
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(result))
    band = np.asarray(mean), np.asarray(deviation)
    figure = draw(np.asarray(passengers), *band, model.growth, deviations, simulated)
    picture = args.out / "host-solver.png"
    figure.savefig(picture, dpi=150)
    print(f"The picture is {picture}, after {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
