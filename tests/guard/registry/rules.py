"""The decorators and shorthands for rules. Where a rule is not the derivative of its function,
the numbers show which of the functions was used."""

import functools as ft
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
from eqx_grads import tangents

from .entry import entry, Nasty


# A line has as many arguments as there is room for.
# fmt: off
A, const = np.array, jax.lax.stop_gradient
X, Y, S = A([0.5, -1.2, 2.0]), A([1.5, 0.3, -0.7]), A(1.7)
Z, C = A([0.5 - 0.2j, -1.2 + 0.3j]), A([1.5 + 1.1j, -0.7j + 0.2])
VJP, FIRST, SHORT = ("value", "vjp"), ("value", "jvp", "vjp"), ("value", "jvp", "vjp", "FR")


def rule(name, fn, plain, *args, orders=SHORT, transforms=False, **options):
    options |= {"orders": orders, "transforms": transforms, "costs": False}
    entry(name, fn, *args, plain=plain, **options)


sin_times = lambda x, y, n=1: jnp.sin(x) * y**n


def slopes(x, y, n=1):
    """The partial derivatives of `sin_times`."""
    return jnp.cos(x) * y**n, n * jnp.sin(x) * y ** (n - 1)


# ---------------------------------------------------------------- forward rules

# Of trees, with a number, what is no array, and configuration.


def wave(p, y, label, *, power=2, scale=1.0, unknown_to_the_rule=None):
    del label
    return {"a": sin_times(p["x"], y, power), "sum": scale * jnp.sum(p["x"] * y)}


wave_op = eqg.custom_jvp(wave)


@wave_op.def_jvp
def wave_jvp(primals, ts, *, power, scale=1.0):
    (p, y, label), (t_p, t_y, t_label) = primals, ts
    assert (label, t_label, t_p["n"]) == ("label", None, None)
    x, t_x = p["x"], t_p["x"]
    d_x, d_y = slopes(x, y, power)
    t_out = {"a": d_x * t_x + d_y * t_y, "sum": scale * jnp.sum(t_x * y + x * t_y)}
    return wave_op(p, y, label, power=power, scale=scale), t_out


rule("custom_jvp", lambda x, y: (
        wave_op({"x": x, "n": 3}, y, "label"),
        wave_op({"x": y, "n": None}, label="label", y=x, power=3, scale=0.5),
    ), lambda x, y: (wave({"x": x}, y, 0), wave({"x": y}, x, 0, power=3, scale=0.5)), *(X, Y),
    complex_args=(Z, C), transforms=True)
power = eqg.custom_jvp(lambda x, y: x**y)


@power.def_jvp
def power_jvp(primals, ts):
    x, y = primals
    return power(x, y), x**y * jnp.log(x) * ts[1] - -y * x ** (y - 1) * ts[0]


rule("custom_jvp: the terms of constants are dropped",
    *(lambda x: power(x, 3.0), lambda x: x * x * x, A([0.5, 1.2, 2.0])),
    nasty=[Nasty(A([0.0, -1.0]))])
with_none = eqg.custom_jvp(lambda x, y: (sin_times(x, y), y))


@with_none.def_jvp(symbolic_zeros=True)
def with_none_jvp(primals, ts):
    """Three times the derivative if both are perturbed."""
    (d_x, d_y), (t_x, t_y) = slopes(*primals), ts
    t = tangents.add(tangents.scale(t_x, d_x), tangents.scale(t_y, d_y))
    factor = 1 if t_x is None or t_y is None else 3
    return with_none(*primals), (tangents.scale(t, factor), t_y)


rule("custom_jvp: symbolic zeros",
    lambda x, y: (with_none(x, y), with_none(x, const(y)), with_none(const(x), y)),
    lambda x, y: ((sin_times(x, y), y),) * 3, *(X, Y), smooth=lambda x, y: (
        (3 * sin_times(x, y), y), (sin_times(x, const(y)), const(y)),
        (sin_times(const(x), y), y),
    ), orders=FIRST)


# ---------------------------------------------------------------- reverse rules


class Layer(eqx.Module):
    """A method: `self` has a cotangent of its own, and integers have no cotangent."""

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
        assert ct[1] is None
        ct = jnp.where(mask, ct[0], 0)
        of_self = tangents.of(perturbed[0], weight=jnp.outer(ct, x), bias=ct)
        return of_self, weight.T @ ct, None


MASK = A([True, False, True, True])
W, B = A(np.arange(12.0).reshape(4, 3) * 0.13 - 0.7), A([0.3, -0.2, 0.9, 0.1])
entry("custom_vjp", *(lambda x, w, b: Layer(w, b)(x, MASK), X, W, B),
    plain=lambda x, w, b: (jnp.where(MASK, w @ x + b, 0), jnp.argmax(x)))

# Twice the derivative in reverse mode, three times in forward mode, here and in raw JAX.


def twice(residuals, ct):
    d_x, d_y = slopes(*residuals)
    return 2 * d_x * ct, 2 * jnp.sum(d_y * ct)


def thrice(fn):
    def jvp(primals, ts):
        d_x, d_y = slopes(*primals)
        return fn(*primals), 3 * (d_x * ts[0] + d_y * ts[1])

    return jvp


three = eqg.custom_vjp(lambda x, y: sin_times(x, y))
three.def_fwd(lambda x, y: (three(x, y), (x, y)))
three.def_bwd(twice)
three.def_jvp(thrice(three))
three_reverse = jax.custom_vjp(lambda x, y: sin_times(x, y))
three_reverse.defvjp(lambda x, y: (sin_times(x, y), (x, y)), twice)
three_forward = jax.custom_jvp(lambda x, y: sin_times(x, y))
three_forward.defjvp(thrice(three_forward))
options = {"forward": three_forward, "orders": FIRST, "transforms": True}
rule("custom_vjp: three rules", three, three_reverse, X, S, **options)
# The second derivative is that of the rule, and not of the function.
rule("custom_vjp: the gradient", lambda x, y: jax.vjp(three, x, y)[1](x * y),
    *(lambda x, y: twice((x, y), x * y), X, S), orders=VJP)

# Two outputs, of which one may be unused, and cotangents that are not like the argument: one is
# complex, one is to be summed over the axes of broadcasting.
fit = eqg.custom_vjp(lambda x, y: (x[None] * y, x**2))
fit.def_fwd(lambda x, y: (fit(x, y), (x, y)))


@fit.def_bwd(symbolic_zeros=True)
def fit_bwd(residuals, ct):
    (x, y), (c, d) = residuals, ct
    if c is None:
        return 5 * x * d, None  # instead of two
    ct_x = c * y if d is None else c * y + 2 * x[None] * d[None] / y.shape[0]
    wide = ct_x.astype(float)  # there are no complex numbers in half precision
    return jax.lax.complex(wide, wide), c * x[None]


rule(
    "custom_vjp: symbolic zeros, and cotangents that are fitted",
    lambda x, y: (fit(x, y), fit(x, y)[0], fit(x, y)[1]),
    lambda x, y: ((x[None] * y, x**2), x[None] * y, x**2),
    *(X, np.outer(B, X) + 0.1),
    smooth=lambda x, y: ((x[None] * y, x**2), x[None] * y, 2.5 * x**2),
    orders=VJP,
)

# A rule for batches is used before differentiation: it is twice the function.
batched = eqg.custom_vjp(lambda x, w: jnp.sin(w @ x))
batched.def_fwd(lambda x, w: (batched(x, w), (x, w, jnp.cos(w @ x))))
batched.def_bwd(lambda r, ct: (r[1].T @ (ct * r[2]), jnp.outer(ct * r[2], r[0])))


@batched.def_vmap
def batched_vmap(size, flags, x, w):
    if flags[1]:
        return NotImplemented
    assert x.shape[0] == size
    return 2 * jnp.sin(x @ w.T), True


rule("custom_vjp: def_vmap", lambda xs, w: (
        jax.vmap(batched, (0, None))(xs, w),
        jax.vmap(lambda x: jax.vmap(batched)(x[None], w[None]))(xs)[:, 0],
    ), lambda xs, w: (2 * jnp.sin(xs @ w.T), jnp.sin(xs @ w.T)), *(np.outer(Y, X), W))

# A linear function, applied to a tangent and transposed: its backward rule is three times the
# transpose.
linear = eqg.custom_vjp(lambda x: 2 * x[1:])
linear.def_fwd(lambda x: (linear(x), None))
linear.def_bwd(lambda _, ct: (6 * jnp.concatenate([0 * ct[:1], ct]),))
outer = eqg.custom_jvp(lambda x: 2 * jnp.sin(x)[1:])
outer.def_jvp(lambda p, t: (outer(*p), linear(jnp.cos(p[0]) * t[0])))
TAIL = A([0, 1, 1])
rule("custom_vjp: a linear function of a tangent", lambda x, y: (
        jax.linear_transpose(linear, x)(y[1:])[0], jax.vjp(outer, x)[1](y[1:])[0],
        jax.jvp(outer, (x,), (y,))[1],
    ), lambda x, y: (
        6 * y * TAIL.astype(y.dtype), 6 * jnp.cos(x) * y * TAIL.astype(y.dtype),
        (2 * jnp.cos(x) * y)[1:],
    ), *(X, Y), orders=("value",))

# ---------------------------------------------------------------- shorthands


product = lambda x, y, *, n=2: sin_times(x, y, n)
partials = (
    lambda out, x, y, shared, *, n=2: shared[1] * y**n,
    lambda out, x, y, shared, *, n=2: n * shared[0] * y ** (n - 1),
)
shared = eqg.elementwise(product, partials, setup=lambda out, x, y: (out / y**2, jnp.cos(x)))
of_both = eqg.elementwise(derivative=lambda out, x, y, *, n=2: slopes(x, y, n))(product)
of_one = eqg.elementwise(jnp.exp, lambda out, x: 2 * out)
steps = lambda x, y: jnp.sin(x) + jnp.round(y)
with_zero = eqg.elementwise(steps, (lambda out, x, y: jnp.cos(x), None))
rule("elementwise", lambda x, y: (shared(x, y), of_both(x, y, n=3)),
    lambda x, y: (product(x, y), product(x, y, n=3)), *(np.outer(B, X), Y[None]),
    complex_args=(np.outer(C, Z), C[None]), transforms=True)
rule("elementwise: another derivative, and zero",
    lambda x, y: (of_one(x), with_zero(x, y), of_one(0.3)),
    lambda x, y: (jnp.exp(x), steps(x, y), jnp.exp(0.3 + 0 * x[0])), *(X, Y),
    smooth=lambda x, y: (2 * jnp.exp(x), jnp.sin(x), jnp.exp(0.3 + 0 * x[0])), orders=FIRST)
replaced = eqg.replace_gradient
CTS = [A([np.nan, 2]), A([np.nan, 0])]
rule("replace_gradient",
    lambda x, y: replaced({"a": jnp.round(x * y), "n": 1}, {"a": sin_times(x, y), "n": 2})["a"],
    *(lambda x, y: jnp.round(x * y), X, Y), smooth=sin_times,
    nasty=[Nasty(A([np.inf, 0]), A([1.0, 2]), value=[A([np.inf, 0])], cts=CTS)])


class Slope(eqx.Module):
    weight: jax.Array

    def __call__(self, x, *, power=1):
        return jnp.tanh(self.weight * x) ** power


# It has no derivative in JAX, and is given none.
on_host = lambda x, *, power: jax.pure_callback(np.round, x, x, vmap_method="expand_dims")
rule("with_gradient_of", lambda x, w: eqg.with_gradient_of(on_host, Slope(w))(x, power=2),
    *(lambda x, w: jnp.round(x), X, A(0.7)), smooth=lambda x, w: jnp.tanh(w * x) ** 2,
    transforms=True)


@eqg.custom_gradient
def with_closure(x, y, *, n=2):
    """Three times the derivative with respect to `x`."""
    d_x, d_y = slopes(x, y, n)
    return {"a": sin_times(x, y, n)}, lambda ct: (3 * d_x * ct["a"], d_y * ct["a"])


# An only cotangent need not be in a tuple.
of_only = eqg.custom_gradient(lambda x: (x**2, lambda ct: 4 * x * ct))


def more_of_x(factor, x, y, n):
    """`sin_times`, with a multiple of its derivative with respect to `x`."""
    return sin_times(x, y, n) + (factor - 1) * sin_times(x, const(y), n)


rule("custom_gradient", lambda x, y: (with_closure(x, y), with_closure(x, y, n=3), of_only(x)),
    lambda x, y: ({"a": sin_times(x, y, 2)}, {"a": sin_times(x, y, 3)}, x**2), *(X, Y),
    smooth=lambda x, y: (*({"a": more_of_x(3, x, y, n)} for n in (2, 3)), 2 * x**2), orders=VJP,
    transforms=True)


def differences(params, x):
    """Linear in `x`, a tree."""
    return {"d": params["w"] * (x["a"][1:] - x["a"][:-1]), "s": jnp.sum(x["b"] * params["v"])}


differences_op = eqg.linear_function(argnum=1)(differences)


@differences_op.def_rmatvec
def adjoint(params, y):
    d, zero = jnp.conj(params["w"]) * y["d"], jnp.zeros_like(y["d"][:1])
    a = jnp.concatenate([zero, d]) - jnp.concatenate([d, zero])
    return {"a": a, "b": y["s"] * jnp.conj(params["v"]), "n": None}


on_trees = lambda fn, x, w: fn({"w": w, "v": 3 * w}, {"a": x, "b": jnp.sin(x)[:2], "n": None})


rule("linear_function",
    *(ft.partial(on_trees, differences_op), ft.partial(on_trees, differences), X, Y[:2]),
    complex_args=(A([1 + 2j, 0.3j, -0.7]), C), transforms=True)
# The adjoint is five times the right one, and so it is seen to be used.
scaled = eqg.linear_function(lambda x: 2 * x[::-1], lambda y: 10 * y[::-1])
transpose = lambda fn, x: jax.linear_transpose(fn, x)(x)[0]
rule("linear_function: which of the two is used", lambda x: (
        scaled(x), jax.jvp(scaled, (x,), (x,))[1], jax.vjp(scaled, x)[1](x)[0],
        transpose(scaled, x), transpose(lambda y: jax.linear_transpose(scaled, x)(y)[0], x),
    ), *(lambda x: tuple(c * x[::-1] for c in (2, 2, 10, 10, 2)), X), orders=("value",))

# ---------------------------------------------------------------- drop-ins

jax_jvp = eqg.jax_custom_jvp(sin_times, nondiff_argnums=(2,))


@jax_jvp.defjvp
def jax_jvp_rule(n, primals, ts):
    d_x, d_y = slopes(*primals, n)
    return jax_jvp(*primals, n), d_x * ts[0] + d_y * ts[1]


jax_jvps = eqg.jax_custom_jvp(lambda x, y: sin_times(x, y))
jax_jvps.defjvps(lambda t, out, x, y: 2 * jnp.cos(x) * y * t, None)
rule("jax_custom_jvp", lambda x, y: (jax_jvp(x, y, 3), jax_jvps(x, y)),
    lambda x, y: (sin_times(x, y, 3), sin_times(x, y)), *(X, Y),
    smooth=lambda x, y: (sin_times(x, y, 3), 2 * sin_times(x, const(y))), orders=FIRST,
    transforms=True)
SymbolicZero = jax.custom_derivatives.SymbolicZero
is_zero = lambda t: isinstance(t, SymbolicZero)
# What is no argument of the rule comes first, whatever was its place.
named = eqg.jax_custom_jvp(
    lambda n, x, fn, y: fn(x) * y**n, nondiff_argnums=0, nondiff_argnames="fn"
)


@ft.partial(named.defjvp, symbolic_zeros=True)
def named_rule(n, fn, primals, ts):
    """Three times the derivative if only `x` is perturbed."""
    (x, y), (t_x, t_y) = primals, ts
    zero = jnp.zeros_like(x)
    d_x, d_y = slopes(x, y, n)
    of_x = zero if is_zero(t_x) else d_x * t_x
    return fn(x) * y**n, 3 * of_x if is_zero(t_y) else of_x + d_y * t_y


rule("jax_custom_jvp: symbolic zeros and a name",
    lambda x, y: (named(3, x, jnp.sin, y), named(n=2, x=x, y=const(y), fn=jnp.sin)),
    lambda x, y: (sin_times(x, y, 3), sin_times(x, y, 2)), *(X, Y),
    smooth=lambda x, y: (sin_times(x, y, 3), 3 * sin_times(x, const(y), 2)), orders=FIRST)
jax_vjp = eqg.jax_custom_vjp(sin_times, nondiff_argnums=(-1,))
jax_vjp.defvjp(
    lambda x, y, n: (sin_times(x, y, n), slopes(x, y, n)),
    lambda n, partials, ct: (partials[0] * ct, partials[1] * ct),
)
jax_zeros = eqg.jax_custom_vjp(lambda x, y: (jnp.sin(x), y))
jax_zeros.defvjp(
    lambda x, y: ((jnp.sin(x.value), y.value), (jnp.cos(x.value), y.perturbed)),
    lambda r, ct: (
        (2 if r[1] or not is_zero(ct[1]) else 3) * r[0] * ct[0],
        None if is_zero(ct[1]) else 4 * ct[1],
    ),
    symbolic_zeros=True,
)
rule("jax_custom_vjp",
    lambda x, y: (jax_vjp(x, y, 3), jax_zeros(x, y), jax_zeros(x, const(y))[0]),
    lambda x, y: (sin_times(x, y, 3), (jnp.sin(x), y), jnp.sin(x)), *(X, Y),
    smooth=lambda x, y: (sin_times(x, y, 3), (2 * jnp.sin(x), 4 * y), 3 * jnp.sin(x)),
    orders=VJP)


@eqg.filter_custom_jvp
def filter_jvp(x, y, n, *, scale):
    return scale * sin_times(x, y, n)


@filter_jvp.def_jvp
def filter_jvp_rule(primals, ts, *, scale):
    """Three times the derivative if only `x` is perturbed."""
    (d_x, d_y), (t_x, t_y, t_n) = slopes(*primals), ts
    assert t_n is None
    of_x = tangents.scale(t_x, (3 if t_y is None else 1) * scale * d_x)
    of_y = tangents.scale(t_y, scale * d_y)
    return filter_jvp(*primals, scale=scale), tangents.add(of_x, of_y)


rule("filter_custom_jvp",
    lambda x, y: (filter_jvp(x, y, 2, scale=0.5), filter_jvp(x, const(y), 3, scale=2)),
    lambda x, y: (0.5 * sin_times(x, y, 2), 2 * sin_times(x, y, 3)), *(X, Y),
    smooth=lambda x, y: (0.5 * sin_times(x, y, 2), 6 * sin_times(x, const(y), 3)), orders=FIRST)


@eqg.filter_custom_vjp
def filter_vjp(xy, n, *, scale):
    return scale * sin_times(*xy, n), xy[1]


@filter_vjp.def_fwd
def filter_vjp_fwd(perturbed, xy, n, *, scale):
    return filter_vjp(xy, n, scale=scale), perturbed


@filter_vjp.def_bwd
def filter_vjp_bwd(kept, ct, perturbed, xy, n, *, scale):
    """Twice the derivative of the first output in `x`, three times the identity."""
    assert kept == perturbed
    d_x, d_y = slopes(*xy, n)
    ct_x = tangents.scale(ct[0], 2 * scale * d_x)
    if not perturbed[1]:
        return ct_x, None
    of_y = tangents.scale(ct[0], scale * d_y)
    return ct_x, tangents.add(of_y, tangents.scale(ct[1], 3))


rule("filter_custom_vjp", lambda x, y: (
        filter_vjp((x, y), 2, scale=0.5)[0], filter_vjp((x, y), 3, scale=2),
        filter_vjp((x, const(y)), 3, scale=2)[0],
    ), lambda x, y: (
        0.5 * sin_times(x, y, 2), (2 * sin_times(x, y, 3), y), 2 * sin_times(x, y, 3),
    ), *(X, Y), smooth=lambda x, y: (
        0.5 * more_of_x(2, x, y, 2), (2 * more_of_x(2, x, y, 3), 3 * y),
        4 * sin_times(x, const(y), 3),
    ), orders=VJP)
