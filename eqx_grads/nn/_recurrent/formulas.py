"""The elementwise formulas of GRU, LSTM and vanilla recurrent cells, and of their derivatives.

In the comments, a bar over a name is written `d_`: `d_h` is the cotangent of `h`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Formulas(NamedTuple):
    """A step is elementwise in `x = W x_t + b` and `h = V h_{t-1} + c`, with one array for each
    of `n` gates. The state is a tuple; its first array is the output, and is fed back.

    - `gates(x, h)`, or if `of_sum`, `gates(x + h)`: the activations.
    - `next(gates, state)`: the next state.
    - `factors(gates, before, after)`: what the backward step needs of the states, with no
        cotangent in it. If `of_states`, the gates are not read, and need not be known.
    - `pull(d, factors)`: given the cotangents of the next state, three cotangents. First the
        cotangents of `h`. Then the cotangent of the last gate's `x` if it differs, or `None`.
        Then the cotangents of the state before, without the part through `h`, or `None` for a
        zero.
    """

    n: int
    gates: Callable[..., Any]
    next: Callable[..., Any]
    factors: Callable[..., Any]
    pull: Callable[..., Any]
    of_sum: bool = True
    of_states: bool = False


# ---------------------------------------------------------------- vanilla
#
#     h' = phi(a)                d_a = s d_h',  s = phi'(a)
#
# The slope s is a function of h' for either phi: 1 - h'² and h' > 0. So the states are the only
# residuals of the recurrence.


def _rnn(phi, slope):
    return Formulas(
        n=1,
        gates=lambda a: (phi(a[0]),),
        next=lambda gates, state: gates,
        factors=lambda gates, before, after: slope(after[0]),
        pull=lambda d, s: ([d[0] * s], None, (None,)),
        of_states=True,
    )


ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu}
RNN = {
    "tanh": _rnn(jnp.tanh, lambda h: 1 - h * h),
    "relu": _rnn(jax.nn.relu, lambda h: (h > 0).astype(h.dtype)),
}


# ---------------------------------------------------------------- LSTM
#
#     i = sigmoid(a_i)    f = sigmoid(a_f)    g = tanh(a_g)    o = sigmoid(a_o)
#     c' = f c + i g      h' = o tanh(c')
#
# Since h' is a function of c', the whole cotangent of c' is
#
#     d = d_c' + k d_h',    k = o (1 - tanh²(c'))
#
# and the cotangents of the gates' arguments are multiples of d and d_h':
#
#     of a_i:  j_i d,      j_i = g i (1 - i)
#     of a_f:  j_f d,      j_f = c f (1 - f)
#     of a_g:  j_g d,      j_g = i (1 - g²)
#     of a_o:  j_o d_h',   j_o = tanh(c') o (1 - o)
# The cotangent of c is f d. With a projection P, the output of these formulas is m = o
# tanh(c'), and h' = P m: then d_m = Pᵀ d_h' is used instead of d_h'.


def _lstm_gates(a):
    i, f, g, o = a
    return jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)


def _lstm_next(gates, state):
    i, f, g, o = gates
    c = f * state[1] + i * g
    return o * jnp.tanh(c), c


def _lstm_factors(gates, before, after):
    i, f, g, o = gates
    t = jnp.tanh(after[1])
    j = g * i * (1 - i), before[1] * f * (1 - f), i * (1 - g * g), t * o * (1 - o)
    return j, o * (1 - t * t), f


def _lstm_pull(cts, factors):
    (j_i, j_f, j_g, j_o), k, f = factors
    d_h, d_c = cts
    d = d_c + d_h * k
    return [d * j_i, d * j_f, d * j_g, d_h * j_o], None, (None, d * f)


LSTM = Formulas(4, _lstm_gates, _lstm_next, _lstm_factors, _lstm_pull)


# ---------------------------------------------------------------- GRU
#
#     r = sigmoid(x_r + h_r)    z = sigmoid(x_z + h_z)    n = tanh(x_n + r h_n)
#     h' = n + z (h - n)
#
# The reset comes after the product with V, as in Equinox, PyTorch, Keras and cuDNN. With d the
# cotangent of h', the cotangents of the gates' arguments are multiples of d:
#
#     of x_n:          c_x d,    c_x = (1 - z) (1 - n²)
#     of h_n:          c_n d,    c_n = c_x r
#     of x_r and h_r:  c_r d,    c_r = c_n h_n (1 - r)
#     of x_z and h_z:  c_z d,    c_z = (h - n) z (1 - z)
# and the cotangent of h, without the part through h_r, h_z and h_n, is z d.


def _gru_gates(x, h):
    r, z = jax.nn.sigmoid(x[0] + h[0]), jax.nn.sigmoid(x[1] + h[1])
    return r, z, jnp.tanh(x[2] + r * h[2]), h[2]


def _gru_next(gates, state):
    _, z, n, _ = gates
    return (n + z * (state[0] - n),)


def _gru_factors(gates, before, after):
    r, z, n, h_n = gates
    c_x = (1 - z) * (1 - n * n)
    c_n = c_x * r
    return c_n * h_n * (1 - r), (before[0] - n) * z * (1 - z), c_x, c_n, z


def _gru_pull(cts, factors):
    c_r, c_z, c_x, c_n, z = factors
    (d,) = cts
    return [d * c_r, d * c_z, d * c_n], d * c_x, (d * z,)


GRU = Formulas(3, _gru_gates, _gru_next, _gru_factors, _gru_pull, of_sum=False)
