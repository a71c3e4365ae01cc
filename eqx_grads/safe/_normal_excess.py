r"""The mean excess of a normal variable over a threshold, and its derivatives: for the lower
half of the hazard.

For $x < 0$, let $V$ be what is left of a normal variable above $-x$: its density is
proportional to $e^{xv - v^2/2}$ on $v > 0$. Then

$$\log \Phi(x) = -\tfrac12 x^2 - \tfrac12 \log 2\pi + \log \int_0^\infty e^{xv - v^2/2}\,dv.$$

The derivatives of the last term are the cumulants of $V$. The first is the mean, which is the
hazard plus $x$, and each derivative of it is the next cumulant, about $(n - 1)! / |x|^n$. So
small a number is not left of products of the hazard, as in the textbook form.
"""

import decimal
import functools as ft
import math
from decimal import Decimal

import jax
import jax.numpy as jnp

from .._rules.elementwise import elementwise


TAIL = 3  # where the continued fraction begins


@ft.partial(jax.jit, static_argnames="order")
def _excess_value(x, *, order):
    in_tail = x < -TAIL
    tail, body = jnp.where(in_tail, -x, TAIL), jnp.where(in_tail, _CENTER, x)
    return jnp.where(in_tail, _cumulant(tail, order + 1), _taylor(body, order))


def _excess_slope(out, x, *, order):
    del out
    return excess(x, order=order + 1)


# The derivative, of an order, of the hazard plus `x`; for a negative `x`.
excess = elementwise(_excess_value, _excess_slope)


# ---------------------------------------------------------------- in the tail


def hazard_of_tail(t):
    """The hazard at `-t`."""
    return t + _fractions(t, 1)[0]


def _fractions(t, n):
    """The continued fractions `k / (t + (k + 1) / (t + ...))` (Laplace), for `k` from one to
    `n` at least."""
    first, last = max(n, 4), 14 if t.dtype == jnp.float32 else 48
    # The last one as first / t over 1 + (first + 1) u / (1 + (first + 2) u / (1 + ...)), by the
    # recurrence of numerators and denominators (Wallis): in powers of `u` they stay in range,
    # and there is one division.
    u = 1 / (t * t)
    p = p_before = q = jnp.ones_like(t)
    q_before = jnp.zeros_like(t)
    for k in range(first + 1, last):
        p, p_before = p + k * u * p_before, p
        q, q_before = q + k * u * q_before, q
    # What is left out is near to the root of `r = 1 + (last + 1) * u / r`.
    r = 0.5 * (1 + jnp.sqrt(1 + 4 * (last + 1) * u))
    s = first * (r * q + last * u * q_before) / (t * (r * p + last * u * p_before))
    fractions = [s]
    for k in range(first - 1, 0, -1):
        fractions.insert(0, k / (t + fractions[0]))
    return fractions


def _cumulant(t, n):
    """The `n`-th cumulant of what is left of a normal variable above `t`."""
    # Integration by parts: moment k + 1 is k * moment k - 1 less t * moment k. So each of the
    # fractions is the quotient of two moments.
    moments = [jnp.ones_like(t)]
    for s in _fractions(t, n)[:n]:
        moments.append(moments[-1] * s)
    cumulants = []
    for k in range(1, n + 1):
        lower = [math.comb(k - 1, m) * cumulants[m] * moments[k - 1 - m] for m in range(k - 1)]
        # These are of one order in `t`: what cancels does not grow with it.
        cumulants.append(moments[k] - sum(lower))
    return cumulants[-1]


# ---------------------------------------------------------------- between the tail and zero

_CENTER = -1.5


def _taylor(x, order):
    # The nearest pole, a zero of the distribution function, is at 1.92 + 2.82i: each term is
    # at most 0.34 of the one before.
    n = 18 if x.dtype == jnp.float32 else 40
    coefficients = [
        float(a * math.perm(k, order))
        for k, a in enumerate(_coefficients(n + order))
        if k >= order
    ]
    s = x - _CENTER
    return ft.reduce(lambda total, a: total * s + a, reversed(coefficients), jnp.zeros_like(x))


@ft.cache
def _coefficients(n):
    """The first coefficients of the power series at the center, to many digits.

    The excess `e` has the derivative `1 - e * (e - x)`, of which they follow from that at the
    center; each step of the recurrence cancels, in doubles up to a few digits in the end.
    """
    with decimal.localcontext(prec=50):
        center = Decimal(_CENTER)
        e = Decimal(0)
        for k in range(2000, 0, -1):
            e = k / (e - center)
        a = [e]
        for k in range(n - 1):
            products = sum(a[i] * a[k - i] for i in range(k + 1))
            rest = 1 if k == 0 else a[k - 1]
            a.append((rest - products + center * a[k]) / (k + 1))
        return tuple(a)
