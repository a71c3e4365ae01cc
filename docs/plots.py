"""Draws `docs/images/plots/`: each surrogate, straight-through function and gradient op.

Blue is the value, orange the derivative, as JAX computes them. For a gradient op, whose value
is its argument, orange is the gradient that leaves it over the gradient that arrives. A dashed
line is a smooth step (surrogates), or the derivative in another parameter (`lsq`, `pact`).

    python docs/plots.py
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure


FOLDER = pathlib.Path(__file__).parent / "images" / "plots"
# Readable on white and on black.
BLUE, ORANGE, GRAY = "#3d85c6", "#e07b1a", "#888888"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "eqx_grads",  # the names of clip paths, which are random otherwise
    "path.simplify_threshold": 0.2,
    "font.family": "sans-serif",
    "font.size": 7,
    "lines.linewidth": 1.2,
    **dict.fromkeys(("text.color", "axes.edgecolor", "xtick.color", "ytick.color"), GRAY),
}
POINTS = 401
KEY = jax.random.key(1)


class Lines(NamedTuple):
    """The lines that are drawn over `x`. Two axes in `value` are the points of a plane."""

    x: jax.Array
    value: jax.Array
    slope: jax.Array | None = None
    dashed: jax.Array | None = None


def _function(fn: Callable, low: float = -2.0, high: float = 2.0) -> Callable[[], Lines]:
    def lines():
        x = jnp.linspace(low, high, POINTS)
        return Lines(x, jax.vmap(fn)(x), jax.vmap(jax.grad(fn))(x))

    return lines


def _with_parameter(fn: Callable, parameter: float) -> Callable[[], Lines]:
    """And the derivative in the second argument."""

    def lines():
        plain = _function(lambda x: fn(x, parameter))()
        return plain._replace(
            dashed=jax.vmap(jax.grad(fn, argnums=1), (0, None))(plain.x, parameter)
        )

    return lines


def _surrogate(
    surrogate: eqg.surrogates.AbstractSurrogate, width: float = 1.5
) -> Callable[[], Lines]:
    def lines():
        plain = _function(lambda v: eqg.surrogates.spike(v, surrogate), -width, width)()
        return plain._replace(dashed=surrogate.primitive(plain.x))

    return lines


def _op(op: Callable, arrives: Callable = lambda g: g) -> Callable[[], Lines]:
    def lines():
        g = jnp.linspace(-2.0, 2.0, POINTS)
        leaves = jax.vmap(lambda g: jax.vjp(op, 0.0)[1](arrives(g))[0])(g)
        return Lines(g, g, leaves)

    return lines


def _vector_op(op: Callable) -> Callable[[], Lines]:
    """The first element of the gradient, where the second is a half."""

    def lines():
        g = jnp.linspace(-2.0, 2.0, POINTS)
        pull = lambda g: jax.vjp(op, jnp.zeros(2))[1](jnp.stack([g, 0.5 * jnp.ones_like(g)]))[
            0
        ][0]
        return Lines(g, g, jax.vmap(pull)(g))

    return lines


def _noise() -> Lines:
    g = jnp.linspace(-2.0, 2.0, POINTS)
    op = lambda x, key: eqg.noise_gradient(x, key=key, stddev=0.2)
    pull = lambda g, key: jax.vjp(lambda x: op(x, key), 0.0)[1](g)[0]
    return Lines(g, g, jax.vmap(pull)(g, jax.random.split(KEY, POINTS)))


def _psum() -> Lines:
    """Two devices; the other one has the gradient one."""
    g = jnp.linspace(-2.0, 2.0, POINTS)
    op = lambda x: eqg.psum_gradient(x, "devices")
    pull = jax.vmap(lambda g: jax.vjp(op, 0.0)[1](g)[0], axis_name="devices")
    return Lines(g, g, jax.vmap(lambda g: pull(jnp.stack([g, jnp.ones_like(g)]))[0])(g))


def _codebook() -> Lines:
    points = eqg.ste.fsq_codebook([5, 3])
    return Lines(points[:, 0], points)


def _first(fn: Callable) -> Callable:
    """The first entry, as a function of the first of two logits."""
    return lambda x: fn(jnp.stack([x, jnp.zeros_like(x)]))[0]


def _top_2(x: jax.Array) -> jax.Array:
    return eqg.ste.top_k(jnp.stack([x, jnp.zeros_like(x), jnp.ones_like(x)]), 2)[0]


_s, _ste = eqg.surrogates, eqg.ste
# By page in `docs/api`, and by name: the call, and what is drawn of it.
PLOTS: dict[str, dict[str, tuple[str, Callable[[], Lines]]]] = {
    "surrogates": {
        "superspike": ("superspike()", _surrogate(_s.superspike(), 0.3)),
        "atan": ("atan()", _surrogate(_s.atan())),
        "sigmoid": ("sigmoid()", _surrogate(_s.sigmoid())),
        "gaussian": ("gaussian()", _surrogate(_s.gaussian())),
        "multi_gaussian": ("multi_gaussian()", _surrogate(_s.multi_gaussian(), 4.0)),
        "triangle": ("triangle()", _surrogate(_s.triangle())),
        "rectangle": ("rectangle()", _surrogate(_s.rectangle())),
        "leaky": ("leaky()", _surrogate(_s.leaky())),
    },
    "ste": {
        "round": ("round(x)", _function(_ste.round)),
        "floor": ("floor(x)", _function(_ste.floor)),
        "ceil": ("ceil(x)", _function(_ste.ceil)),
        "trunc": ("trunc(x)", _function(_ste.trunc)),
        "sign": ("sign(x)", _function(_ste.sign)),
        "binary_sign": ("binary_sign(x)", _function(_ste.binary_sign)),
        "ternary": (
            "ternary(x, threshold=0.5)",
            _function(lambda x: _ste.ternary(x, threshold=0.5)),
        ),
        "heaviside": ("heaviside(x)", _function(_ste.heaviside)),
        "hard_tanh": ("hard_tanh(x)", _function(_ste.hard_tanh)),
        "approx_sign": ("approx_sign(x)", _function(_ste.approx_sign)),
        "swish_sign": ("swish_sign(x)", _function(_ste.swish_sign)),
        "clip": ("clip(x, -1, 1)", _function(lambda x: _ste.clip(x, -1.0, 1.0))),
        "one_hot_argmax": (
            "one_hot_argmax([x, 0])[0]",
            _function(_first(_ste.one_hot_argmax), -4, 4),
        ),
        "top_k": ("top_k([x, 0, 1], 2)[0]", _function(_top_2, -4, 4)),
        "gumbel_softmax": (
            "gumbel_softmax(..., hard=True)",
            _function(_first(lambda x: _ste.gumbel_softmax(x, key=KEY, hard=True)), -4, 4),
        ),
        "gumbel_sigmoid": (
            "gumbel_sigmoid(x, hard=True)",
            _function(lambda x: _ste.gumbel_sigmoid(x, key=KEY, hard=True), -4, 4),
        ),
        "bernoulli": ("bernoulli(x)", _function(lambda p: _ste.bernoulli(p, key=KEY), 0, 1)),
        "reinmax": (
            "reinmax([x, 0])[0]",
            _function(_first(lambda x: _ste.reinmax(x, key=KEY)), -4, 4),
        ),
        "fake_quantize": (
            "fake_quantize(x, 0.4, bits=3)",
            _function(lambda x: _ste.fake_quantize(x, 0.4, bits=3)),
        ),
        "absmax_scale": (
            "absmax_scale([x, 1], bits=2)",
            _function(lambda x: _ste.absmax_scale(jnp.stack([x, jnp.ones_like(x)]), bits=2)),
        ),
        "lsq": (
            "lsq(x, 0.4, bits=3)",
            _with_parameter(lambda x, step: _ste.lsq(x, step, bits=3), 0.4),
        ),
        "fsq": ("fsq([x], [5])", _function(lambda x: _ste.fsq(x[None], [5])[0][0])),
        "fsq_codebook": ("fsq_codebook([5, 3])", _codebook),
        "vector_quantize": (
            "vector_quantize([x], codebook)",
            _function(
                lambda x: _ste.vector_quantize(x[None], jnp.array([[-1.5], [0.0], [1.0]]))[0][0]
            ),
        ),
    },
    "gradient-ops": {
        "scale_gradient": ("scale_gradient(x, 0.5)", _op(lambda x: eqg.scale_gradient(x, 0.5))),
        "reverse_gradient": ("reverse_gradient(x)", _op(eqg.reverse_gradient)),
        "reversal_schedule": ("reversal_schedule(x)", _function(eqg.reversal_schedule, 0, 1)),
        "mask_gradient": (
            "mask_gradient(x, False)",
            _op(lambda x: eqg.mask_gradient(x, False)),
        ),
        "psum_gradient": ('psum_gradient(x, "devices")', _psum),
        "clip_gradient": (
            "clip_gradient(x, -1, 1)",
            _op(lambda x: eqg.clip_gradient(x, -1.0, 1.0)),
        ),
        "clip_gradient_norm": (
            "clip_gradient_norm(x, 1)",
            _vector_op(lambda x: eqg.clip_gradient_norm(x, 1.0)),
        ),
        "normalize_gradient": ("normalize_gradient(x)", _vector_op(eqg.normalize_gradient)),
        "zero_nonfinite_gradient": (
            "zero_nonfinite_gradient(x)",
            _op(
                eqg.zero_nonfinite_gradient,
                arrives=lambda g: jnp.where(jnp.abs(g) > 1, jnp.nan, g),
            ),
        ),
        "noise_gradient": ("noise_gradient(x, stddev=0.2)", _noise),
        "cast_gradient": (
            "cast_gradient(x, float8_e5m2)",
            _op(lambda x: eqg.cast_gradient(x, jnp.float8_e5m2)),
        ),
        "on_backward": (
            "on_backward(x, jnp.tanh)",
            _op(lambda x: eqg.on_backward(x, jnp.tanh)),
        ),
    },
}


def _rounded(y: jax.Array | None) -> np.ndarray:
    """On another processor, the last digits differ."""
    return np.zeros(0) if y is None else np.round(np.asarray(y), 4)


def draw(call: str, lines: Lines) -> Figure:
    x, value, slope, dashed = map(_rounded, lines)
    figure = Figure(figsize=(2.15, 1.45))
    axes = figure.add_axes((0.13, 0.15, 0.84, 0.7))
    if value.ndim == 2:
        axes.plot(value[:, 0], value[:, 1], ".", color=BLUE)
    else:
        axes.plot(x, value, color=BLUE)
    if lines.dashed is not None:
        axes.plot(x, dashed, color=GRAY, linestyle="--", linewidth=0.8)
    if lines.slope is not None:
        axes.plot(x, slope, color=ORANGE)
    axes.set_title(call, family="monospace", size=7, pad=4)
    axes.locator_params(nbins=4)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def save_one(path: pathlib.Path, call: str, lines: Callable[[], Lines]) -> None:
    with mpl.rc_context(STYLE):
        # Without a date and a version, so that the same plot is the same file.
        metadata = {"Date": None, "Creator": None}
        draw(call, lines()).savefig(path, metadata=metadata, transparent=True)


def save(folder: pathlib.Path = FOLDER) -> None:
    for page, plots in PLOTS.items():
        (folder / page).mkdir(parents=True, exist_ok=True)
        for name, (call, lines) in plots.items():
            save_one(folder / page / f"{name}.svg", call, lines)


if __name__ == "__main__":
    save()
