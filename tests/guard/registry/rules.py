"""What rules are written with. Where a rule is not the derivative of its function, the numbers
show which of the functions was used."""

import functools as ft
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
from eqx_grads import tangents

from .entry import entry, Nasty


A = np.array
X, Y = A([0.5, -1.2, 2.0]), A([1.5, 0.3, -0.7])
Z, C = A([0.5 - 0.2j, -1.2 + 0.3j]), A([1.5 + 1.1j, -0.7j + 0.2])
SHORT = ("value", "jvp", "vjp", "FR")


def option(name, fn, *args, orders=SHORT, transforms=False, **options):
    entry(name, fn, *args, orders=orders, transforms=transforms, **options)


# ---------------------------------------------------------------- forward rules

# Trees, a number, what is no array, and configuration.


def wave(p, y, label, *, power=2, scale=1.0):
    del label
    return {"a": jnp.sin(p["x"]) * y**power, "sum": scale * jnp.sum(p["x"] * y)}


wave_op = eqg.custom_jvp(wave)


@wave_op.def_jvp
def wave_jvp(primals, ts, *, power, scale=1.0):
    p, y, label = primals
    t_p, t_y, t_label = ts
    assert label == "label" and t_label is None and t_p["n"] is None
    x, t_x = p["x"], t_p["x"]
    t_a = jnp.cos(x) * y**power * t_x + jnp.sin(x) * power * y ** (power - 1) * t_y
    out = wave_op(p, y, label, power=power, scale=scale)
    return out, {"a": t_a, "sum": scale * jnp.sum(t_x * y + x * t_y)}


entry(
    "custom_jvp",
    lambda x, y: (
        wave_op({"x": x, "n": 3}, y, "label"),
        wave_op({"x": y, "n": None}, label="label", y=x, power=3, scale=0.5),
    ),
    X,
    Y,
    plain=lambda x, y: (wave({"x": x}, y, None), wave({"x": y}, x, None, power=3, scale=0.5)),
    complex_args=(Z, C),
)

without_dead_terms = eqg.custom_jvp(lambda x, y: x**y)
without_dead_terms.def_jvp(
    lambda p, t: (
        without_dead_terms(*p),
        p[1] * p[0] ** (p[1] - 1) * t[0] + p[0] ** p[1] * jnp.log(p[0]) * t[1],
    )
)
option(
    "custom_jvp: the terms of constants are dropped",
    lambda x: without_dead_terms(x, 3.0),
    A([0.5, 1.2, 2.0]),
    plain=lambda x: x * x * x,
    nasty=[Nasty(A([0.0, -1.0]))],
)

with_none = eqg.custom_jvp(lambda x, y: (jnp.sin(x) * y, y))


@with_none.def_jvp(symbolic_zeros=True)
def with_none_jvp(primals, ts):
    """Three times the derivative if both are perturbed."""
    (x, y), (t_x, t_y) = primals, ts
    factor = 1 if t_x is None or t_y is None else 3
    t = tangents.add(tangents.scale(t_x, jnp.cos(x) * y), tangents.scale(t_y, jnp.sin(x)))
    return with_none(x, y), (tangents.scale(t, factor), t_y)


option(
    "custom_jvp: symbolic zeros",
    lambda x, y: (
        with_none(x, y),
        with_none(x, jax.lax.stop_gradient(y)),
        with_none(jax.lax.stop_gradient(x), y),
    ),
    X,
    Y,
    plain=lambda x, y: (
        (jnp.sin(x) * y, y),
        (jnp.sin(x) * jax.lax.stop_gradient(y), jax.lax.stop_gradient(y)),
        (jax.lax.stop_gradient(jnp.sin(x)) * y, y),
    ),
    smooth=lambda x, y: (
        (3 * jnp.sin(x) * y, y),
        (jnp.sin(x) * jax.lax.stop_gradient(y), jax.lax.stop_gradient(y)),
        (jax.lax.stop_gradient(jnp.sin(x)) * y, y),
    ),
    orders=("value", "jvp", "vjp"),
    # The pattern of zeros is another one where `y` is captured and constant.
    costs=False,
)


def of_captured(x, y):
    """The function and its rule close over values that are being differentiated."""
    fn = eqg.custom_jvp(lambda x: jnp.sin(x) * y)
    fn.def_jvp(lambda p, t: (fn(*p), jnp.cos(p[0]) * y * t[0]))
    body = eqg.custom_vjp(lambda x: jnp.sin(x) * c)
    c = jax.lax.stop_gradient(2 * y)
    body.def_fwd(lambda x: (body(x), lambda: jnp.cos(x) * c))  # a function as residual
    body.def_bwd(lambda slope, ct: (slope() * ct,))
    return jax.lax.scan(lambda s, z: (s + fn(z), body(z) + s), jnp.zeros_like(x[0]), x)


option(
    "custom_jvp: captured arrays",
    lambda x, y: of_captured(x, jax.lax.stop_gradient(y)),
    X,
    A(1.7),
    plain=lambda x, y: (
        jnp.sum(jnp.sin(x)) * jax.lax.stop_gradient(y),
        (jnp.cumsum(jnp.sin(x)) + jnp.sin(x)) * jax.lax.stop_gradient(y),
    ),
    transforms=True,
)

# ---------------------------------------------------------------- reverse rules


class Layer(eqx.Module):
    """A method: `self` has a cotangent of its own, of which one part is zero."""

    weight: jax.Array
    bias: jax.Array | None
    name: str = eqx.field(static=True, default="layer")
    activation: Any = jnp.tanh

    @eqg.custom_vjp
    def __call__(self, x, mask):
        return jnp.where(mask, self.weight @ x + self.bias, 0), jnp.argmax(x)

    @__call__.def_fwd
    def _fwd(self, x, mask, *, perturbed):
        assert perturbed[2] is False
        return self(x, mask), (self.weight, x, mask, perturbed)

    @__call__.def_bwd
    def _bwd(residuals, ct):
        weight, x, mask, perturbed = residuals
        ct, of_index = ct
        assert of_index is None
        ct = jnp.where(mask, ct, 0)
        of_self = tangents.of(perturbed[0], weight=jnp.outer(ct, x), bias=ct)
        return of_self, weight.T @ ct, None


MASK = A([True, False, True, True])
W, B = A(np.arange(12.0).reshape(4, 3) * 0.13 - 0.7), A([0.3, -0.2, 0.9, 0.1])
entry(
    "custom_vjp",
    lambda x, w, b: Layer(w, b)(x, MASK),
    X,
    W,
    B,
    plain=lambda x, w, b: (jnp.where(MASK, w @ x + b, 0), jnp.argmax(x)),
)

# Twice the derivative in reverse mode, three times in forward mode.
three = eqg.custom_vjp(lambda x, y: jnp.sin(x) * y)
three.def_fwd(lambda x, y: (three(x, y), {"x": x, "y": y}))
three.def_bwd(
    lambda r, ct: (2 * jnp.cos(r["x"]) * r["y"] * ct, 2 * jnp.sum(jnp.sin(r["x"]) * ct))
)
three.def_jvp(
    lambda p, t: (three(*p), 3 * (jnp.cos(p[0]) * p[1] * t[0] + jnp.sin(p[0]) * t[1]))
)


@jax.custom_vjp
def three_reverse(x, y):
    return jnp.sin(x) * y


three_reverse.defvjp(
    lambda x, y: (jnp.sin(x) * y, (x, y)),
    lambda r, ct: (2 * jnp.cos(r[0]) * r[1] * ct, 2 * jnp.sum(jnp.sin(r[0]) * ct)),
)


@jax.custom_jvp
def three_forward(x, y):
    return jnp.sin(x) * y


three_forward.defjvp(
    lambda p, t: (three_forward(*p), 3 * (jnp.cos(p[0]) * p[1] * t[0] + jnp.sin(p[0]) * t[1]))
)
option(
    "custom_vjp: three rules",
    three,
    X,
    A(1.7),
    plain=three_reverse,
    forward=three_forward,
    orders=("value", "jvp", "vjp"),
    transforms=True,
)
# The second derivative is that of the rule, and not of the function.
option(
    "custom_vjp: the gradient",
    lambda x, y: jax.vjp(three, x, y)[1](x * y),
    X,
    A(1.7),
    plain=lambda x, y: (2 * jnp.cos(x) * y * (x * y), 2 * jnp.sum(jnp.sin(x) * x * y)),
    orders=("value", "vjp"),
)

# Two outputs, of which one may be unused, and cotangents that do not have their argument's
# shape and dtype: one is summed over the axes of broadcasting, one is real.
fit = eqg.custom_vjp(lambda x, y: (x[None] * y, x**2))
fit.def_fwd(lambda x, y: (fit(x, y), (x, y)))


@fit.def_bwd(symbolic_zeros=True)
def fit_bwd(residuals, ct):
    x, y = residuals
    c, d = ct
    if c is None:
        return 5 * x * d, None  # instead of two
    ct_x = c * y if d is None else c * y + 2 * x[None] * d[None] / y.shape[0]
    return jax.lax.complex(ct_x, ct_x), c * x[None]


option(
    "custom_vjp: symbolic zeros, and cotangents that are fitted",
    lambda x, y: (fit(x, y), fit(x, y)[0], fit(x, y)[1]),
    X,
    np.outer(B, X) + 0.1,
    plain=lambda x, y: ((x[None] * y, x**2), x[None] * y, x**2),
    smooth=lambda x, y: ((x[None] * y, x**2), x[None] * y, 2.5 * x**2),
    orders=("value", "vjp"),
)

# A rule for batches is used before differentiation: it is twice the function.
batched = eqg.custom_vjp(lambda x, w: jnp.sin(w @ x))
batched.def_fwd(lambda x, w: (batched(x, w), (x, w)))
batched.def_bwd(lambda r, ct: (r[1].T @ (ct := ct * jnp.cos(r[1] @ r[0])), jnp.outer(ct, r[0])))


@batched.def_vmap
def batched_vmap(size, flags, x, w):
    if flags[1]:
        return NotImplemented
    assert x.shape[0] == size and flags[0]
    return 2 * jnp.sin(x @ w.T), True


option(
    "custom_vjp: def_vmap",
    lambda xs, w: (
        jax.vmap(batched, (0, None))(xs, w),
        jax.vmap(lambda x: jax.vmap(batched)(x[None], w[None]))(xs)[:, 0],
    ),
    np.outer(Y, X),
    W,
    plain=lambda xs, w: (2 * jnp.sin(xs @ w.T), jnp.sin(xs @ w.T)),
    costs=False,
)

# A linear function, applied to a tangent and transposed: the backward rule is three times the
# transpose.
linear = eqg.custom_vjp(lambda x: 2 * x[1:])
linear.def_fwd(lambda x: (linear(x), None))
linear.def_bwd(lambda _, ct: (6 * jnp.concatenate([0 * ct[:1], ct]),))
outer = eqg.custom_jvp(lambda x: 2 * jnp.sin(x)[1:])
outer.def_jvp(lambda p, t: (outer(*p), linear(jnp.cos(p[0]) * t[0])))
option(
    "custom_vjp: a linear function of a tangent",
    lambda x, y: (
        jax.linear_transpose(linear, x)(y[1:])[0],
        jax.vjp(outer, x)[1](y[1:])[0],
        jax.jvp(outer, (x,), (y,))[1],
    ),
    X,
    Y,
    plain=lambda x, y: (
        6 * y * A([0, 1, 1]).astype(y.dtype),
        6 * jnp.cos(x) * y * A([0, 1, 1]).astype(y.dtype),
        (2 * jnp.cos(x) * y)[1:],
    ),
    orders=("value",),
)

# ---------------------------------------------------------------- shorthands


def product(x, y, *, n=2):
    return jnp.sin(x) * y**n


shared_parts = eqg.elementwise(
    product,
    (lambda out, x, y, u, *, n=2: u[1] * y**n, lambda out, x, y, u, *, n=2: n * out / y),
    setup=lambda out, x, y: (jnp.sin(x), jnp.cos(x)),
)
of_both = eqg.elementwise(
    derivative=lambda out, x, y, *, n=2: (jnp.cos(x) * y**n, n * y ** (n - 1) * jnp.sin(x))
)(product)
of_one = eqg.elementwise(jnp.exp, lambda out, x: 2 * out)
without = eqg.elementwise(
    lambda x, y: jnp.sin(x) + jnp.round(y), (lambda o, x, y: jnp.cos(x), None)
)
entry(
    "elementwise",
    lambda x, y: (shared_parts(x, y), of_both(x, y, n=3)),
    np.outer(B, X),
    Y[None],
    plain=lambda x, y: (product(x, y), product(x, y, n=3)),
    complex_args=(np.outer(C, Z), C[None]),
    costs=False,
)
option(
    "elementwise: another derivative, and zero",
    lambda x, y: (of_one(x), without(x, y), of_one(0.3)),
    X,
    Y,
    plain=lambda x, y: (jnp.exp(x), jnp.sin(x) + jnp.round(y), jnp.exp(0.3 + 0 * x[0])),
    smooth=lambda x, y: (2 * jnp.exp(x), jnp.sin(x), jnp.exp(0.3 + 0 * x[0])),
    orders=("value", "jvp", "vjp"),
)
entry(
    "replace_gradient",
    lambda x, y: eqg.replace_gradient(
        {"a": jnp.round(x * y), "n": 1}, {"a": jnp.sin(x) * y, "n": 2}
    )["a"],
    X,
    Y,
    plain=lambda x, y: jnp.round(x * y),
    smooth=lambda x, y: jnp.sin(x) * y,
    nasty=[
        Nasty(
            A([np.inf, 0.0]),
            A([1.0, 2.0]),
            value=[A([np.inf, 0])],
            cts=[A([np.nan, 2]), A([np.nan, 0])],
        )
    ],
)


class Slope(eqx.Module):
    weight: jax.Array

    def __call__(self, x, *, power=1):
        return jnp.tanh(self.weight * x) ** power


option(
    "with_gradient_of",
    lambda x, w: eqg.with_gradient_of(lambda x, *, power: jnp.round(x), Slope(w))(x, power=2),
    X,
    A(0.7),
    plain=lambda x, w: jnp.round(x),
    smooth=lambda x, w: jnp.tanh(w * x) ** 2,
    transforms=True,
)


@eqg.custom_gradient
def with_closure(x, y, *, n=2):
    sin, cos = jnp.sin(x), jnp.cos(x)
    return {"a": sin * y**n}, lambda ct: (
        3 * cos * y**n * ct["a"],
        n * sin * y ** (n - 1) * ct["a"],
    )


def three_times_x(x, y, n):
    return {"a": jnp.sin(x) * y**n + 2 * jnp.sin(x) * jax.lax.stop_gradient(y**n)}


option(
    "custom_gradient",
    lambda x, y: (with_closure(x, y), with_closure(x, y, n=3)),
    X,
    Y,
    plain=lambda x, y: tuple({"a": jnp.sin(x) * y**n} for n in (2, 3)),
    smooth=lambda x, y: (three_times_x(x, y, 2), three_times_x(x, y, 3)),
    orders=("value", "vjp"),
    transforms=True,
)


def differences(params, x):
    """Linear in `x`, a tree."""
    return {"d": params["w"] * (x["a"][1:] - x["a"][:-1]), "s": jnp.sum(x["b"] * params["v"])}


@ft.partial(eqg.linear_function, argnum=1)
def differences_op(params, x):
    return differences(params, x)


@differences_op.def_rmatvec
def adjoint(params, y):
    d, zero = jnp.conj(params["w"]) * y["d"], jnp.zeros_like(y["d"][:1])
    b = y["s"] * jnp.conj(params["v"])
    return {"a": jnp.concatenate([zero, d]) - jnp.concatenate([d, zero]), "b": b}


def linear_args(x, w):
    return {"w": w, "v": 3 * w}, {"a": x, "b": jnp.sin(x)[:2]}


entry(
    "linear_function",
    lambda x, w: differences_op(*linear_args(x, w)),
    X,
    Y[:2],
    plain=lambda x, w: differences(*linear_args(x, w)),
    complex_args=(A([1 + 2j, 0.3j, -0.7]), C),
)
# The adjoint is five times the right one, and so it is seen to be used.
scaled = eqg.linear_function(lambda x: 2 * x[::-1], lambda y: 10 * y[::-1])
option(
    "linear_function: which of the two is used",
    lambda x: (
        scaled(x),
        jax.jvp(scaled, (x,), (x,))[1],
        jax.vjp(scaled, x)[1](x)[0],
        jax.linear_transpose(scaled, x)(x)[0],
        jax.linear_transpose(lambda y: jax.linear_transpose(scaled, x)(y)[0], x)(x)[0],
    ),
    X,
    plain=lambda x: tuple(c * x[::-1] for c in (2, 2, 10, 10, 2)),
    orders=("value",),
)

# ---------------------------------------------------------------- drop-ins


def sin_times(x, y, n=1):
    return jnp.sin(x) * y**n


jax_jvp = eqg.jax_custom_jvp(sin_times, nondiff_argnums=(2,))
jax_jvp.defjvp(
    lambda n, p, t: (
        sin_times(*p, n),
        jnp.cos(p[0]) * p[1] ** n * t[0] + n * jnp.sin(p[0]) * p[1] ** (n - 1) * t[1],
    )
)
jax_jvps = eqg.jax_custom_jvp(lambda x, y: jnp.sin(x) * y)
jax_jvps.defjvps(lambda t, out, x, y: 2 * jnp.cos(x) * y * t, None)
option(
    "jax_custom_jvp",
    lambda x, y: (jax_jvp(x, y, 3), jax_jvps(x, y)),
    X,
    Y,
    plain=lambda x, y: (sin_times(x, y, 3), sin_times(x, y)),
    smooth=lambda x, y: (sin_times(x, y, 3), 2 * jnp.sin(x) * jax.lax.stop_gradient(y)),
    orders=("value", "jvp", "vjp"),
    transforms=True,
)

jax_vjp = eqg.jax_custom_vjp(sin_times, nondiff_argnums=(2,))
jax_vjp.defvjp(
    lambda x, y, n: (sin_times(x, y, n), (x, y)),
    lambda n, r, ct: (jnp.cos(r[0]) * r[1] ** n * ct, n * jnp.sin(r[0]) * r[1] ** (n - 1) * ct),
)
jax_zeros = eqg.jax_custom_vjp(lambda x, y: (jnp.sin(x), y))
jax_zeros.defvjp(
    lambda x, y: ((jnp.sin(x.value), y.value), (x.value, x.perturbed, y.perturbed)),
    lambda r, ct: (
        (2 if r[2] else 3) * jnp.cos(r[0]) * ct[0],
        None if isinstance(ct[1], jax.custom_derivatives.SymbolicZero) else 4 * ct[1],
    ),
    symbolic_zeros=True,
)
option(
    "jax_custom_vjp",
    lambda x, y: (jax_vjp(x, y, 3), jax_zeros(x, y), jax_zeros(x, jax.lax.stop_gradient(y))[0]),
    X,
    Y,
    plain=lambda x, y: (sin_times(x, y, 3), (jnp.sin(x), y), jnp.sin(x)),
    smooth=lambda x, y: (sin_times(x, y, 3), (2 * jnp.sin(x), 4 * y), 3 * jnp.sin(x)),
    orders=("value", "vjp"),
)


@eqg.filter_custom_jvp
def filter_jvp(x, y, n, *, scale):
    return scale * jnp.sin(x) * y**n


@filter_jvp.def_jvp
def filter_jvp_rule(primals, ts, *, scale):
    x, y, n = primals
    t_x, t_y, t_n = ts
    assert t_n is None
    factor = 1 if t_y is not None else 3
    terms = (
        tangents.scale(t_x, factor * scale * jnp.cos(x) * y**n),
        tangents.scale(t_y, scale * n * jnp.sin(x) * y ** (n - 1)),
    )
    return filter_jvp(x, y, n, scale=scale), tangents.add(*terms)


option(
    "filter_custom_jvp",
    lambda x, y: (
        filter_jvp(x, y, 2, scale=0.5),
        filter_jvp(x, jax.lax.stop_gradient(y), 3, scale=2),
    ),
    X,
    Y,
    plain=lambda x, y: (0.5 * sin_times(x, y, 2), 2 * sin_times(x, y, 3)),
    smooth=lambda x, y: (
        0.5 * sin_times(x, y, 2),
        6 * sin_times(x, jax.lax.stop_gradient(y), 3),
    ),
    orders=("value", "jvp", "vjp"),
)


@eqg.filter_custom_vjp
def filter_vjp(xy, n, *, scale):
    return scale * sin_times(*xy, n), xy[1]


@filter_vjp.def_fwd
def filter_vjp_fwd(perturbed, xy, n, *, scale):
    return filter_vjp(xy, n, scale=scale), perturbed


@filter_vjp.def_bwd
def filter_vjp_bwd(kept, ct, perturbed, xy, n, *, scale):
    """Twice the derivative with respect to `x`, and three times that of the second output."""
    assert kept == perturbed
    (x, y), (c, d) = xy, ct
    if not perturbed[1]:
        return 2 * scale * jnp.cos(x) * y**n * c, None
    ct_y = scale * n * jnp.sin(x) * y ** (n - 1) * c
    return 2 * scale * jnp.cos(x) * y**n * c, tangents.add(ct_y, tangents.scale(d, 3))


option(
    "filter_custom_vjp",
    lambda x, y: (
        filter_vjp((x, y), 2, scale=0.5)[0],
        filter_vjp((x, y), 3, scale=2),
        filter_vjp((x, jax.lax.stop_gradient(y)), 3, scale=2)[0],
    ),
    X,
    Y,
    plain=lambda x, y: (
        0.5 * sin_times(x, y, 2),
        (2 * sin_times(x, y, 3), y),
        2 * sin_times(x, y, 3),
    ),
    smooth=lambda x, y: (
        sin_times(x, y, 2) - jax.lax.stop_gradient(jnp.sin(x)) * y**2 / 2,
        (4 * sin_times(x, y, 3) - 2 * jax.lax.stop_gradient(jnp.sin(x)) * y**3, 3 * y),
        4 * sin_times(x, jax.lax.stop_gradient(y), 3),
    ),
    orders=("value", "vjp"),
)
