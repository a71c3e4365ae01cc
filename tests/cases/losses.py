"""Losses whose gradients are formed chunk by chunk."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr

from .registry import case


LABELS = jnp.array([0, 3, -100, 1, 2])


def _numbers(*shape):
    return jr.normal(jr.key(sum(shape)), shape)


def _args():
    return _numbers(5, 2), _numbers(4, 2), _numbers(4)


def _smoothed(x, weight, bias):
    """Of the tokens that count, each with `label_smoothing` and `z_loss`."""
    logits = x @ weight.T + bias[None]
    lse = jax.nn.logsumexp(logits, 1)
    target = 0.9 * jax.nn.one_hot(LABELS, 4, dtype=x.dtype) + 0.1 / 4
    losses = lse - jnp.sum(target * logits, 1) + 0.01 * lse**2
    return jnp.where(LABELS >= 0, losses, 0)


@case("losses.linear_cross_entropy", reference=lambda *args: jnp.mean(_smoothed(*args)) * 5 / 4)
def _():
    def fn(x, weight, bias):
        return eqg.losses.linear_cross_entropy(
            x, weight, LABELS, bias=bias, chunk=2, label_smoothing=0.1, z_loss=0.01
        )

    return fn, _args()


@case("losses.linear_cross_entropy: of each token", reference=_smoothed)
def _():
    def fn(x, weight, bias):
        return eqg.losses.linear_cross_entropy(
            x,
            weight,
            LABELS,
            bias=bias,
            chunk=2,
            label_smoothing=0.1,
            z_loss=0.01,
            reduction="none",
        )

    return fn, _args()


def _squares(weight, xs, ys):
    return jnp.sum(jnp.tanh(xs @ weight - ys) ** 2)


@case("losses.chunked", reference=_squares)
def _():
    args = _numbers(3), _numbers(5, 3), _numbers(5)
    return eqg.losses.chunked(_squares, axis=0, chunk=2), args


@case("losses.chunked: a mean", reference=lambda w, xs, ys: _squares(w, xs.T, ys) / 5)
def _():
    mean = lambda w, xs, ys: jnp.mean(jnp.tanh(xs.T @ w - ys) ** 2)
    fn = eqg.losses.chunked(mean, axis=(None, 1, 0), chunk=2, reduction="mean")
    return fn, (_numbers(3), _numbers(3, 5), _numbers(5))
