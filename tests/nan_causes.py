"""Losses with a planted cause of a gradient that is not finite, and healthy ones.

`# HERE` marks the line to be reported, and `# MASK` the line that does not select a branch.
"""

import dataclasses
import functools as ft
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest


@dataclasses.dataclass(frozen=True)
class Planted:
    """`make()` returns the loss, the model and the other arguments. Each is found at the lines
    marked in the source of `make`, with this kind, these steps and this primitive."""

    make: Callable[[], Any]
    kind: str
    step: tuple[int, ...]
    primitive: str | None
    path: str
    threshold: float | None
    index: tuple[int, ...] | None
    others: bool
    marks: dict[str, int] | None = None

    @property
    def name(self) -> str:
        return self.make.__name__

    def lines(self, mark: str) -> list[int]:
        if self.marks is not None:
            return [self.marks[mark]] if mark in self.marks else []
        source, first = inspect.getsourcelines(self.make)
        return [first + i for i, text in enumerate(source) if f"# {mark}" in text]


PLANTED: list[Planted] = []
HEALTHY: list[Callable[[], Any]] = []


def planted(
    kind, step=(), *, primitive=None, path="", threshold=None, index=None, others=False
):
    """`others`: that records of other places are found as well."""

    def add(make):
        PLANTED.append(Planted(make, kind, step, primitive, path, threshold, index, others))
        return make

    return add


def healthy(make):
    HEALTHY.append(make)
    return make


x3 = lambda: jnp.array([1.0, 0.0, 2.0])
DEAD = "dead branch"
POLE = "true singularity"
ZERO = "0/0"


# ---------------------------------------------------------------- branches


@planted(DEAD, primitive="log", index=(1,))
def where_log():
    def loss(x):
        y = jnp.log(x)  # HERE
        y = 2 * y
        return jnp.sum(jnp.where(x > 0, y, 0.0))  # MASK

    return loss, x3()


@planted(DEAD, primitive="sub")
def attention_mask():
    def loss(q, mask):
        bias = jnp.where(mask, 0.0, -jnp.inf)
        weights = jax.nn.softmax(q @ q.T + bias, axis=-1)  # HERE
        return jnp.sum(jnp.where(mask, weights, 0.0))  # MASK

    return loss, jnp.eye(3), jnp.array([[True] * 3, [False] * 3, [True] * 3])


@planted(DEAD, primitive="sqrt", index=(1,))
def nested_where():
    def loss(x):
        y = jnp.sqrt(x)  # HERE
        y = jnp.where(x > 0, y, 0.0)  # MASK
        return jnp.sum(jnp.where(x < 5, 3 * y, 1.0))

    return loss, x3()


# ---------------------------------------------------------------- singular points


@planted(POLE, primitive="sqrt", index=(1,))
def sqrt_of_sqrt():
    def loss(x):
        y = jnp.sqrt(x)  # HERE
        return jnp.sum(jnp.sqrt(y))  # HERE

    return loss, x3()


# ---------------------------------------------------------------- loops


@planted(DEAD, (7,), primitive="sqrt")
def scan():
    def loss(x):
        def step(v, t):
            drag = jnp.where(v > 0, jnp.sqrt(v), 0.0)  # HERE MASK
            return jnp.maximum(v - 0.2 * drag - 0.05, 0.0), drag

        return jnp.sum(jax.lax.scan(step, x, jnp.arange(8.0))[1])

    return loss, jnp.array(0.5)


@planted(DEAD, (1, 2), primitive="sqrt")
def nested_scan():
    def loss(x):
        def inner(h, t):
            bad = (t == 12.0).astype(h.dtype)
            y = jnp.sqrt(h * (1 - bad))  # HERE
            return h + 0.1, jnp.where(bad == 0, y, 0.0)  # MASK

        def outer(h, t):
            h, ys = jax.lax.scan(inner, h, 10 * t + jnp.arange(4.0))
            return h, jnp.sum(ys)

        return jnp.sum(jax.lax.scan(outer, x, jnp.arange(3.0))[1])

    return loss, jnp.array(1.0)


SCANS = {
    "scan": jax.lax.scan,
    "checkpointed": lambda f, init, xs: jax.lax.scan(jax.checkpoint(f), init, xs),
    "unrolled": lambda f, init, xs: jax.lax.scan(f, init, xs, unroll=2),
    "reverse": lambda f, init, xs: jax.lax.scan(f, init, xs, reverse=True),
    "filter_scan": eqg.filter_scan,
    "sqrt": ft.partial(eqg.filter_scan, checkpoint="sqrt"),
    "reverse sqrt": ft.partial(eqg.filter_scan, checkpoint="sqrt", reverse=True),
    "chunks": ft.partial(eqg.filter_scan, checkpoint=3),
    "replay": ft.partial(eqg.filter_scan, checkpoint="replay"),
    "auto": ft.partial(eqg.filter_scan, checkpoint="auto"),
}


def scanned(scan, bad_step=2):
    """A dead branch in one step of five."""

    def loss(x, ts):
        def step(h, t):
            y = jnp.log(h * t)  # HERE
            return h * 0.9 + 0.1, jnp.where(t > 0, y, 0.0)  # MASK

        return jnp.sum(scan(step, x, ts)[1])

    return loss, jnp.array(1.0), jnp.ones(5).at[bad_step].set(0.0)


@planted("overflow", (3,), primitive="exp")
def value_in_a_scan():
    def loss(x):
        def step(h, t):
            return jnp.exp(3 * h), None  # HERE

        return jax.lax.scan(step, x, jnp.arange(9))[0]

    return loss, jnp.array(-0.2)


@planted("exceeds the threshold", (9,), path="GRUCell", threshold=1e4, others=True)
def exploding_gru():
    # A cotangent is multiplied by 0.5 + 0.5 * 0.5 * 8 = 2.5 in a step; 2.5**11 > 1e4.
    cell = eqx.nn.GRUCell(1, 3, key=jr.key(0))
    cell = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, cell)
    weight = jnp.concatenate([jnp.zeros((6, 3)), 8 * jnp.eye(3)])
    cell = eqx.tree_at(lambda cell: cell.weight_hh, cell, weight)

    def loss(cell, xs):
        step = lambda h, x: (cell(x, h), None)  # HERE
        return jnp.sum(jax.lax.scan(step, jnp.zeros(3), xs)[0])

    return loss, cell, jnp.zeros((20, 1))


@planted("inf - inf", primitive="sub")
def softmax_of_nothing():
    def loss(x, mask):
        scores = jnp.where(mask, x, -jnp.inf)
        return jax.nn.softmax(scores)[0]  # HERE

    return loss, jnp.ones(3), jnp.zeros(3, bool)


@planted(POLE, primitive="eigh", others=True)
def degenerate_eigenvalues():
    def loss(a):
        return jnp.sum(jnp.linalg.eigh(a)[1])  # HERE

    return loss, jnp.eye(2)


# ---------------------------------------------------------------- rules, layers and libraries


@planted(ZERO, primitive="square")
def rule_custom_vjp():
    @jax.custom_vjp
    def square(x):
        return x * x

    def bwd(x, ct):
        return (ct * x**2 * 2 / x,)

    square.defvjp(lambda x: (square(x), x), bwd)

    def loss(x):
        return jnp.sum(square(x))  # HERE

    return loss, x3()


@planted(POLE, primitive="sqrt")
def jitted_helper():
    @jax.jit
    def distance(x):
        return jnp.sqrt(jnp.sum(x * x))  # HERE

    return lambda x: distance(x) + 1.0, jnp.zeros(3)


@planted(POLE, path="layers[2]", primitive="sqrt", others=True)
def layer_of_a_stack():
    class Distance(eqx.Module):
        scale: jax.Array

        def __call__(self, x, *, key=None):
            return self.scale * jnp.linalg.norm(x)  # HERE

    linear = eqx.nn.Linear(3, 3, key=jr.key(0))
    linear = eqx.tree_at(lambda m: m.bias, linear, jnp.zeros(3))
    tanh = eqx.nn.Lambda(jnp.tanh)
    model = eqx.nn.Sequential([linear, tanh, Distance(jnp.array(1.0))])
    return lambda model, x: model(x), model, jnp.zeros(3)


@planted(ZERO, others=True)
def optax_cosine_distance():
    def loss(x):
        return jnp.sum(optax.losses.cosine_distance(x, jnp.ones(3)))  # HERE

    return loss, jnp.zeros(3)


@planted(POLE, others=True)
def optimistix_root():
    optx = pytest.importorskip("optimistix")

    def loss(a):
        fn = lambda y, a: y**3 - a
        y = optx.root_find(fn, optx.Newton(1e-4, 1e-4), jnp.array(1.0), a).value
        return jnp.sqrt(y - y)  # HERE

    return loss, jnp.array(8.0)


@planted("exceeds the threshold", threshold=1e9, others=True)
def duplicate_knots():
    def loss(x):
        knots = jnp.sort(x)
        return jnp.interp(jnp.array(3e-13), knots, jnp.arange(4.0))  # HERE

    return loss, jnp.array([0.0, 1.0, 1e-12, -1.0])


# ---------------------------------------------------------------- two lines

# Losses of two lines: the operation that is to be named, and what is made of its result.
LINES = {
    "where_sqrt": (DEAD, "sqrt", (1,), lambda: (x3(),),
        lambda x: jnp.sqrt(x),
        lambda y, x: jnp.sum(jnp.where(x > 0, y, 0.0))),
    "where_exp": (DEAD, "exp", (1,), lambda: (jnp.array([0.0, 2.0, 0.01]),),
        lambda x: jnp.exp(1000.0 * x),
        lambda big, x: jnp.sum(jnp.where(x > 0.05, x, big))),
    "select": (DEAD, "sqrt", (1,), lambda: (x3(),),
        lambda x: jnp.sqrt(x),
        lambda y, x: jnp.sum(jnp.select([x > 1, x > 0], [x, y], 0.0))),
    "padding": (DEAD, "sqrt", (3,), lambda: (jnp.array(1.0), jnp.ones(3),),
        lambda w, x: jnp.sqrt(w * jnp.pad(x, (0, 1))),
        lambda y, w, x: jnp.sum(y[:-1])),
    "maximum_of_a_segment": (DEAD, "sqrt", (1,), lambda: (x3(),),
        lambda x: jnp.sqrt(x),
        lambda y, x: jnp.sum(jax.ops.segment_max(y, jnp.array([0, 0, 1]), 2))),
    "median": (DEAD, "sqrt", (1,), lambda: (x3(),),
        lambda x: jnp.sqrt(x),
        lambda y, x: jnp.median(y)),
    "arctan2": (DEAD, "atan2", (1,), lambda: (x3(),),
        lambda x: jnp.arctan2(x, x),
        lambda angle, x: jnp.sum(jnp.where(x != 0, angle, 0.0))),
    "nan_in_masked_data": (DEAD, "mul", (1,),
        lambda: (jnp.ones(3), jnp.array([1.0, jnp.nan, 2.0]),),
        lambda w, data: w * data,
        lambda y, w, data: jnp.sum(jnp.where(jnp.isnan(data), 0.0, y))),
    "cbrt": (POLE, "cbrt", (1,), lambda: (x3(),),
        lambda x: jnp.sum(jnp.cbrt(x)), None),
    "square_of_sqrt": ("zero times infinity", "sqrt", (1,), lambda: (x3(),),
        lambda x: jnp.sum(jnp.sqrt(x) ** 2), None),
    "power_of_50": ("overflow", "integer_pow", (2,), lambda: (jnp.array([1e-9, 0.0, 2.0]),),
        lambda x: jnp.sum((1e7 * x) ** 50), None),
    "entropy": ("true singularity", "log", None, lambda: (jnp.array([1.0, 0.0]),),
        lambda p: -jnp.sum(p * jnp.log(p)), None),
    "sine_of_an_infinity": (DEAD, "log", (1,), lambda: (x3(),),
        lambda x: jnp.log(x),
        lambda y, x: jnp.sum(jnp.where(x > 0, jnp.sin(y), 0.0))),
    "singular_matrix": (ZERO, "custom_linear_solve", None, lambda: (jnp.ones((2, 2)),),
        lambda a: jnp.sum(jnp.linalg.solve(a, jnp.ones(2))), None),
}  # fmt: skip


def _of_lines(name, here, mask, args):
    def loss(x, *rest):
        y = here(x, *rest)
        return y if mask is None else mask(y, x, *rest)

    make = lambda: (loss, *args())
    make.__name__ = name
    return make


for _name, (_kind, _primitive, _index, _args, _here, _mask) in LINES.items():
    _make = _of_lines(_name, _here, _mask, _args)
    _marks = {
        mark: f.__code__.co_firstlineno for mark, f in (("HERE", _here), ("MASK", _mask)) if f
    }
    PLANTED.append(Planted(_make, _kind, (), _primitive, "", None, _index, False, _marks))


# ---------------------------------------------------------------- healthy


@healthy
def double_where():
    def loss(x):
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0))

    return loss, x3()


@healthy
def masked_softmax():
    def loss(q, mask):
        return jnp.sum(jax.nn.softmax(jnp.where(mask, q, -jnp.inf), -1)[0] ** 2)

    return loss, jnp.ones((2, 3)), jnp.array([[True, False, True], [True, True, True]])


@healthy
def logsumexp():
    return lambda x, y: jax.nn.logsumexp(x + y), jnp.ones(2), jnp.array([0.0, -jnp.inf])


@healthy
def gru():
    cell = eqx.nn.GRUCell(2, 3, key=jr.key(0))
    loss = lambda m, xs: jnp.sum(jax.lax.scan(lambda h, x: (m(x, h), h), jnp.zeros(3), xs)[0])
    return loss, cell, jnp.ones((5, 2))


@healthy
def cond():
    return lambda x: jax.lax.cond(x > 0, jnp.sqrt, lambda x: 0 * x, x), jnp.array(0.0)


@healthy
def cond_under_vmap():
    # JAX replaces the operands of the branch that is not taken.
    one = lambda x: jax.lax.cond(x > 0, jnp.sqrt, lambda x: 0 * x, x)
    return lambda x: jnp.sum(jax.vmap(one)(x)), x3()


@healthy
def unused_nan():
    return lambda x: jnp.sum(jnp.where(jnp.log(x) > -5, x, 2 * x)), x3()


@healthy
def nan_that_is_not_selected():
    # Its derivative is stopped.
    return lambda x: jnp.sum(jnp.where(x < 5, x, jax.lax.stop_gradient(jnp.log(x)))), x3()


@healthy
def bad_cotangent_that_is_not_used():
    def loss(x):
        return jnp.sum(jnp.sqrt(jnp.zeros(3) + 0 * jax.lax.stop_gradient(x)) + x)

    return loss, x3()


@healthy
def attention():
    model = eqx.nn.MultiheadAttention(2, 4, key=jr.key(0))
    mask = jnp.tril(jnp.ones((3, 3), bool))
    return lambda m, x: jnp.sum(m(x, x, x, mask=mask) ** 2), model, jnp.ones((3, 4))


@healthy
def while_loop_that_is_right():
    loss = lambda x: jax.lax.while_loop(lambda y: y < 100, lambda y: y * x, x)
    return loss, jnp.array(2.0)


@healthy
def cross_entropy():
    def loss(x):
        return jnp.sum(optax.losses.softmax_cross_entropy_with_integer_labels(x, jnp.array(1)))

    return loss, x3()


@healthy
def zero_nonfinite_gradient():
    return lambda x: jnp.sum(jnp.sqrt(eqg.zero_nonfinite_gradient(x))), x3()
