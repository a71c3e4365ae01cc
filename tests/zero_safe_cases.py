"""Functions of one number with a poisoned derivative, and the branch that each takes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import mpmath
import optax


@dataclasses.dataclass(frozen=True)
class Case:
    """`fn` is `truth`, a function of `mpmath`, near `x`, by what it takes there."""

    name: str
    fn: Callable[[Any], Any]
    x: float
    truth: Callable[[Any], Any]


where = jnp.where
sqrt, log = jnp.sqrt, jnp.log


def _scan(step, init, xs):
    return jax.lax.scan(step, init, xs)[0]


def _quaternion(v):
    """MJX, `math.axis_angle_to_quat` after `math.normalize_with_norm`."""
    norm = jnp.linalg.norm(v)
    axis = where(norm > 0, v / norm, jnp.zeros_like(v))
    return jnp.cos(norm / 2) + jnp.sum(axis) * jnp.sin(norm / 2)


def _contact(x):
    """MJX, the impedance of a contact: a power that is taken inside the margin only."""
    position = jnp.clip(x, 0.0, 1.0)
    power = where(position > 0, position**0.7, 0.0)
    return where(x > 0, power / position, 1.0)


@jax.custom_jvp
def _root(x):
    return jnp.sqrt(x)


_root.defjvp(lambda primals, tangents: (_root(*primals), tangents[0] / (2 * _root(*primals))))


@eqg.custom_jvp
def _our_root(x):
    return jnp.sqrt(x)


@_our_root.def_jvp
def _our_root_jvp(primals, tangents):
    (x,) = primals
    return _our_root(x), tangents[0] / (2 * _our_root(x))


def _reset(x):
    step = lambda c, reset: (where(reset, x * x, sqrt(c)), None)
    return _scan(step, x, jnp.array([False, False, True]))


def _late(x):
    """The last step takes nothing of the others."""
    step = lambda c, last: (where(last, 2 * x, c + log(x)), None)
    return _scan(step, x, jnp.array([False, True]))


def _attention(x):
    q = x * jnp.arange(1.0, 5.0).reshape(2, 2)
    scores = where(jnp.array([[True, True], [False, False]]), q @ q.T, -jnp.inf)
    rows = jax.nn.softmax(scores) @ q
    return jnp.sum(where(jnp.array([[True], [False]]), rows, 0.0))


def _attention_truth(x):
    rows = [[x, 2 * x], [3 * x, 4 * x]]
    scores = [sum(a * b for a, b in zip(rows[0], row, strict=True)) for row in rows]
    weights = [mpmath.exp(s) / sum(mpmath.exp(t) for t in scores) for s in scores]
    return sum(w * sum(row) for w, row in zip(weights, rows, strict=True))


def _segment(x):
    data = sqrt(jnp.stack([x, x + 4, x]))
    return jax.ops.segment_sum(data, jnp.array([0, 1, 0]), 2)[1]


def _masked_labels(x):
    logits = jnp.stack([jnp.stack([x, 1 + 0 * x]), jnp.stack([-jnp.inf + 0 * x, x - jnp.inf])])
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.array([0, 0]))
    return jnp.sum(where(jnp.array([True, False]), losses, 0.0))


def _cond(x):
    return jax.lax.cond(x > 0, lambda x: sqrt(x) * x, lambda x: x**2, x)


def _switch(x):
    branches = [lambda x: 3 * x, lambda x: 1 / x, sqrt]
    return jax.lax.switch((x > 0).astype(jnp.int32), branches, x)


_shifted = lambda x: sqrt(x + jnp.array([0.0, 4.0, 9.0]))


def _dropped_segment(x):
    """Padding has an index out of bounds."""
    data = jnp.stack([log(x), x * x])
    return jnp.sum(jax.ops.segment_sum(data, jnp.array([7, 1]), 2))


def _dropped_update(x):
    data = jnp.stack([log(x), x * x])
    return jnp.sum(jnp.zeros(2).at[jnp.array([7, 1])].subtract(data, mode="drop"))


def _segment_max(x):
    return jax.ops.segment_max(_shifted(x)[:2], jnp.array([1, 1]), 2)[1]


def _steep_segment_max(x):
    """The cotangent is infinite as well, of what is not taken."""
    largest = jax.ops.segment_max(jnp.stack([x, x - 1]), jnp.array([0, 0]), 1)[0]
    return where(x > 0, sqrt(largest), x)


def _at_min(x):
    return jnp.zeros(2).at[jnp.array([0, 0])].min(-_shifted(x)[:2])[0]


def _top_k(x):
    return jnp.sum(jax.lax.top_k(_shifted(x), 2)[0])


def _approx_max_k(x):
    return jnp.sum(jax.lax.approx_max_k(_shifted(x), 1)[0])


def _scan_of_top_k(x):
    step = lambda h, _: (jax.lax.top_k(sqrt(jnp.stack([x, x + 4])), 1)[0][0], None)
    return jax.lax.scan(step, x, None, length=2)[0]


zero = lambda x: mpmath.mpf(0)
same = lambda x: x

# A scalar gets a cotangent from each element, and that of the second one is dead.
_data = jnp.array([1.0, 0.0])
_of_data = lambda terms: jnp.sum(where(_data > 0, terms, 0.0))

CASES = [
    Case("sqrt", lambda x: where(x > 0, sqrt(x), 0.0), 0.0, zero),
    Case("sqrt of a negative", lambda x: where(x > 0, sqrt(x), x**2), -1.0, lambda x: x**2),
    Case("log", lambda x: where(x <= 0, 0.0, log(x)), 0.0, zero),
    Case("log, taken", lambda x: where(x <= 0, 0.0, log(x)), 2.0, mpmath.log),
    Case("reciprocal", lambda x: where(x == 0, 0.0, 1 / x), 0.0, zero),
    Case("infinite literal", lambda x: where(x > 0, 0.0, x * jnp.inf), 1.0, zero),
    Case("factor of data", lambda x: _of_data(x * (x / _data)), 0.5, lambda x: x**2),
    Case("logarithm of data", lambda x: _of_data(x * (2 + log(_data))), 0.5, lambda x: 2 * x),
    Case("divisor of data", lambda x: _of_data(x / _data), 0.5, same),
    Case("exponent of data", lambda x: _of_data(x ** (1 / _data)), 0.5, same),
    Case("power", lambda x: where(x > 0, x**0.3, 2 * x), 0.0, lambda x: 2 * x),
    Case("power, second order", lambda x: where(x > 0, x**1.5, x**2), 0.0, lambda x: x**2),
    Case("negative power", lambda x: where(x != 0, x**-2, x), 0.0, same),
    Case("sinc", lambda x: where(x != 0, jnp.sin(x) / x, 1 - x**2 / 6), 0.0, mpmath.sinc),
    Case("exp, overflow", lambda x: where(x < 80, jnp.exp(x), x), 1000.0, same),
    Case("expm1", lambda x: where(x < 1, jnp.expm1(x) / x, x), 1e4, same),
    Case("arccos", lambda x: where(jnp.abs(x) < 1, jnp.arccos(x), x), 1.0, same),
    Case("arctanh", lambda x: where(jnp.abs(x) < 1, jnp.arctanh(x), x), -1.0, same),
    Case("arctan2", lambda x: where(x > 0, jnp.arctan2(x, x), x), 0.0, same),
    Case("cbrt", lambda x: where(x > 0, jnp.cbrt(x), x), 0.0, same),
    Case("lgamma", lambda x: where(x > 0, jax.lax.lgamma(x), x), -1.0, same),
    Case("nested where", lambda x: where(x > 0, where(x > 1, log(x), sqrt(x)), x), 0.0, same),
    Case("poison upstream", lambda x: where(x > 0, jnp.sin(3 * sqrt(x)), x), 0.0, same),
    Case("used twice", lambda x: where(x > 0, x / sqrt(x), 0.0) * 1e3 + x, 0.0, same),
    Case("maximum", lambda x: jnp.maximum(sqrt(x), 1.0), 0.0, lambda x: mpmath.mpf(1)),
    Case("sqrt of a maximum", lambda x: sqrt(jnp.maximum(x, 0.0)) + x, -1.0, same),
    Case("minimum", lambda x: jnp.minimum(1 / x, 2.0) + x, 0.0, lambda x: 2 + x),
    Case("clamp", lambda x: jax.lax.clamp(0.5, sqrt(x), 1.0) + x, 0.0, lambda x: 0.5 + x),
    Case("relu", lambda x: jax.nn.relu(sqrt(x) - 1) + x, 0.0, same),
    Case("sqrt of a relu", lambda x: sqrt(jax.nn.relu(x)) + x, -2.0, same),
    Case("norm", lambda x: where(x > 0, jnp.linalg.norm(x * jnp.ones(3)), x), 0.0, same),
    Case("std", lambda x: where(x > 1, jnp.std(x * jnp.ones(3)), x), 1.0, same),
    Case(
        "reduce_max",
        lambda x: jnp.max(sqrt(jnp.stack([x, x + 4]))),
        0.0,
        lambda x: mpmath.sqrt(x + 4),
    ),
    Case("index", lambda x: sqrt(jnp.stack([x, x + 1]))[1], 0.0, lambda x: mpmath.sqrt(x + 1)),
    Case(
        "dynamic index",
        lambda x: log(jnp.stack([x, x + 1]))[jnp.argmax(jnp.stack([x, x + 1]))],
        0.0,
        lambda x: mpmath.log(x + 1),
    ),
    Case(
        "set",
        lambda x: jnp.sum(sqrt(jnp.stack([x, x + 1])).at[0].set(x)),
        0.0,
        lambda x: mpmath.sqrt(x + 1) + x,
    ),
    Case(
        "update slice",
        lambda x: jnp.sum(
            jax.lax.dynamic_update_slice(log(jnp.stack([x, x + 1])), jnp.stack([x]), (0,))
        ),
        0.0,
        lambda x: mpmath.log(x + 1) + x,
    ),
    Case(
        "negative padding",
        lambda x: jnp.sum(
            jax.lax.pad(
                sqrt(jnp.stack([x, x + 1])), jnp.zeros((), jnp.result_type(x)), [(-1, 0, 0)]
            )
        ),
        0.0,
        lambda x: mpmath.sqrt(x + 1),
    ),
    Case(
        "sort",
        lambda x: sqrt(jnp.sort(jnp.stack([x + 4, x])))[1],
        0.0,
        lambda x: mpmath.sqrt(x + 4),
    ),
    Case("segment_sum", _segment, 0.0, lambda x: mpmath.sqrt(x + 4)),
    Case("segment_sum, dropped", _dropped_segment, 0.0, lambda x: x**2),
    Case("scatter-sub, dropped", _dropped_update, 0.0, lambda x: -(x**2)),
    Case("segment_max", _segment_max, 0.0, lambda x: mpmath.sqrt(x + 4)),
    Case("segment_max of -inf", _steep_segment_max, 0.0, lambda x: x),
    Case("scatter-min", _at_min, 0.0, lambda x: -mpmath.sqrt(x + 4)),
    Case("top_k", _top_k, 0.0, lambda x: mpmath.sqrt(x + 4) + mpmath.sqrt(x + 9)),
    Case("approx_max_k", _approx_max_k, 0.0, lambda x: mpmath.sqrt(x + 9)),
    Case("scan of top_k", _scan_of_top_k, 0.0, lambda x: mpmath.sqrt(x + 4)),
    Case(
        "concatenate",
        lambda x: jnp.sum(sqrt(jnp.stack([0 * x + 4, jnp.maximum(x, 0.0)]))) + x,
        -1.0,
        lambda x: 2 + x,
    ),
    Case(
        "matrix product",
        lambda x: jnp.sum(
            where(
                jnp.array([True, False]),
                jnp.array([[1.0, 0.0], [0.0, 1.0]]) @ jnp.stack([sqrt(x + 4), x]),
                0.0,
            )
        ),
        0.0,
        lambda x: mpmath.sqrt(x + 4),
    ),
    Case("attention, masked row", _attention, 0.5, _attention_truth),
    Case(
        "cholesky",
        lambda x: where(x > 0, jnp.linalg.cholesky(jnp.eye(2) * x)[0, 0], x),
        0.0,
        same,
    ),
    Case(
        "solve",
        lambda x: where(x > 0, jnp.linalg.solve(jnp.eye(2) * x, jnp.ones(2))[0], x),
        0.0,
        same,
    ),
    Case(
        "scan",
        lambda x: _scan(
            lambda c, _: (where(c > 0, c - sqrt(c) / 10, c), None), x, jnp.arange(5)
        ),
        0.0,
        same,
    ),
    Case("scan, reset", _reset, 0.0, lambda x: x**2),
    Case("scan, late", _late, 0.0, lambda x: 2 * x),
    Case(
        "scan, from zero",
        lambda x: _scan(lambda c, _: (sqrt(c) * x + x, None), jnp.zeros_like(x), jnp.arange(2)),
        1.0,
        lambda x: mpmath.sqrt(x) * x + x,
    ),
    Case(
        "scan, output",
        lambda x: jax.lax.scan(lambda c, u: (c, sqrt(c * u)), x, jnp.array([0.0, 1.0]))[1][1],
        4.0,
        mpmath.sqrt,
    ),
    Case(
        "fori_loop",
        lambda x: where(x > 0, jax.lax.fori_loop(0, 3, lambda _, c: sqrt(c), x), x),
        0.0,
        same,
    ),
    Case(
        "associative_scan",
        lambda x: where(
            x > 0, jax.lax.associative_scan(jnp.multiply, jnp.stack([log(x), x, x]))[-1], x
        ),
        0.0,
        same,
    ),
    Case("cond", _cond, 0.0, lambda x: x**2),
    Case("switch", _switch, 0.0, lambda x: 3 * x),
    Case("jit", lambda x: where(x > 0, jax.jit(sqrt)(x), x), 0.0, same),
    Case("checkpoint", jax.checkpoint(lambda x: where(x > 0, sqrt(x), x)), 0.0, same),
    Case("scan in checkpoint", jax.checkpoint(_reset), 0.0, lambda x: x**2),
    Case(
        "vmap of cond",
        lambda x: jnp.sum(jax.vmap(_cond)(jnp.stack([x, x + 1]))),
        0.0,
        lambda x: x**2 + mpmath.sqrt(x + 1) * (x + 1),
    ),
    Case("custom_jvp", lambda x: where(x > 0, _root(x), x), 0.0, same),
    Case("custom_jvp of ours", lambda x: where(x > 0, _our_root(x), x), 0.0, same),
    Case(
        "logsumexp",
        lambda x: where(x > 1, jax.scipy.special.logsumexp(x * jnp.full(2, -jnp.inf)), x),
        1.0,
        same,
    ),
    Case("logaddexp", lambda x: where(x > 0, jnp.logaddexp(log(x), -jnp.inf), x), 0.0, same),
    Case(
        "optax cross-entropy", _masked_labels, 0.0, lambda x: mpmath.log(1 + mpmath.exp(1 - x))
    ),
    Case(
        "optax safe_norm",
        lambda x: optax.safe_norm(jnp.stack([x, x]), 1e-3) + x,
        0.0,
        lambda x: 1e-3 + x,
    ),
    Case(
        "MJX, rotation",
        lambda x: _quaternion(where(x > 0, x, 0.0) * jnp.ones(3)) + x,
        -1.0,
        lambda x: 1 + x,
    ),
    Case("MJX, contact", _contact, -0.5, lambda x: mpmath.mpf(1)),
]
