"""Scans, recurrences and recurrent layers."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr

from .registry import case


def _numbers(*shape, scale=1.0):
    return scale * jr.normal(jr.key(sum(shape)), shape)


@case("linear_recurrence")
def _():
    a = jax.nn.sigmoid(_numbers(5, 2))
    return eqg.linear_recurrence, (a, _numbers(5, 2), _numbers(2))


@case("linear_recurrence: associative, reversed")
def _():
    fn = lambda a, b: eqg.linear_recurrence(a, b, reverse=True, method="associative")
    return fn, (jax.nn.sigmoid(_numbers(4, 2)), _numbers(4, 2))


def _step(carry, x):
    carry = jnp.tanh(carry + x)
    return carry, 2 * carry


@case("filter_scan")
def _():
    return lambda h, xs: eqg.filter_scan(_step, h, xs), (_numbers(2), _numbers(5, 2))


@case("filter_scan: in chunks")
def _():
    fn = lambda h, xs: eqg.filter_scan(_step, h, xs, checkpoint=2)
    return fn, (_numbers(2), _numbers(5, 2))


@case("filter_scan: replayed")
def _():
    fn = lambda h, xs: eqg.filter_scan(_step, h, xs, checkpoint="replay")
    return fn, (_numbers(2), _numbers(5, 2))


@case("filter_map")
def _():
    fn = lambda w, xs: eqg.filter_map(lambda x: jnp.tanh(w * x), xs, chunk=2)
    return fn, (_numbers(2), _numbers(5, 2))


@case("filter_while_loop")
def _():
    step = lambda h: (h[0] + 1, jnp.tanh(h[1] + h[2]), h[2])
    fn = lambda h, x: eqg.filter_while_loop(lambda h: h[0] < 3, step, (0, h, x), max_steps=5)[1]
    return fn, (_numbers(2), _numbers(2))


class _Elementwise(eqx.Module):
    w: jax.Array

    def __call__(self, carry, x):
        carry = jnp.tanh(self.w * carry + x)
        return carry, 2 * carry


@case("filter_scan: online")
def _():
    fn = lambda h, w: eqg.filter_scan(_Elementwise(w), h, _numbers(5, 2), online=True)
    return fn, (_numbers(2), _numbers(2))


@case("filter_cond")
def _():
    double = lambda x: 2 * x
    fn = lambda flag, x: eqg.filter_cond(flag, jnp.sin, double, x)
    return fn, (jnp.array(True), _numbers(3))


@case("filter_checkpoint")
def _():
    return eqg.filter_checkpoint(lambda x, y: jnp.sin(x) * y), (_numbers(3), _numbers(3))


@case("nn.GRU")
def _():
    return eqg.nn.GRU(2, 3, key=jr.key(0)), (_numbers(4, 2),)


@case("nn.LSTM")
def _():
    return eqg.nn.LSTM(2, 3, key=jr.key(0)), (_numbers(4, 2),)


@case("nn.RNN")
def _():
    return eqg.nn.RNN(2, 3, key=jr.key(0)), (_numbers(4, 2),)


@case("nn.RNNCell")
def _():
    return eqg.nn.RNNCell(2, 3, key=jr.key(0)), (_numbers(2), _numbers(3))


@case("nn.Recurrent")
def _():
    cell = eqg.nn.RNNCell(2, 3, key=jr.key(0))
    return eqg.nn.Recurrent(cell), (_numbers(4, 2),)


@case("nn.Outputs")
def _():
    return eqg.nn.Outputs(eqg.nn.RNN(2, 3, key=jr.key(0)), last=True), (_numbers(4, 2),)


@case("nn.LSTM: projected")
def _():
    return eqg.nn.LSTM(2, 3, proj_size=2, key=jr.key(0)), (_numbers(4, 2),)
