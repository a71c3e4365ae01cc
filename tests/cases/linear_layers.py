"""Layers over linear recurrences."""

import eqx_grads as eqg
import jax.random as jr

from .registry import case


def _numbers(*shape):
    return jr.normal(jr.key(sum(shape)), shape)


@case("nn.LRU")
def _():
    return eqg.nn.LRU(2, 2, 3, r_max=0.9, key=jr.key(0)), (_numbers(4, 2),)


@case("nn.S5")
def _():
    return eqg.nn.S5(2, 1, 4, min_step=0.1, key=jr.key(0)), (_numbers(4, 2),)


@case("nn.MinGRU")
def _():
    return eqg.nn.MinGRU(2, 3, key=jr.key(0)), (_numbers(4, 2),)


@case("nn.MinLSTM")
def _():
    return eqg.nn.MinLSTM(2, 3, key=jr.key(0)), (_numbers(4, 2),)
