"""Loops, branches, checkpoints and linear recurrences, against loops written out."""

import functools as ft
import itertools

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry


# A line has as many arguments as there is room for.
# fmt: off
rng = np.random.default_rng(2)
OPTION = {"transforms": False, "costs": False, "orders": ("value", "jvp", "vjp", "RR")}
FIRST = OPTION | {"orders": ("value", "jvp", "vjp")}
normal = lambda *shape, scale=1.0: scale * rng.normal(size=shape)


class Step(eqx.Module):
    """A cell with a captured array, a key, a count, and parts that never change."""

    w: jax.Array
    b: jax.Array
    name: str = "cell"

    def __call__(self, carry, x):
        h, count, key, name = carry
        key, now = jr.split(key)
        noise = jr.uniform(now, h.shape, h.dtype)
        h = jnp.tanh(self.w @ h + x["x"] + 0.1 * noise + 0.05 * count.astype(h.dtype))
        return (h, count + 1, key, name), (self.b * h**2, None, count, x["fn"](h))


def scan(f, carry, xs, reverse=False):
    """A loop of Python."""
    steps = len(xs["x"])
    ys = [None] * steps
    for t in range(steps)[:: -1 if reverse else 1]:
        carry, ys[t] = f(carry, jax.tree.map(lambda x, t=t: x[t] if eqx.is_array(x) else x, xs))
    return carry, jax.tree.map(lambda *y: jnp.stack(y), *ys)


def run(loop, **options):
    def fn(h, xs, w, b):
        carry = (h, jnp.array(2), jr.key(3), "a name")
        xs = {"x": xs, "fn": jnp.sin}
        (h, count, key, _), ys = loop(Step(w, b), carry, xs, **options)
        return h, count, ys, jr.key_data(key)

    return fn


arguments = lambda steps: (normal(3), normal(steps, 3), normal(3, 3, scale=0.7), normal(3))


entry("filter_scan", run(eqg.filter_scan), *arguments(3), plain=run(scan), draws=True)
entry("filter_scan: replay", run(eqg.filter_scan, checkpoint="replay"), *arguments(3),
    plain=run(scan), costs=False, draws=True)
for _steps, _options in (
    (5, {"checkpoint": 3, "reverse": True}), (5, {"checkpoint": "sqrt"}),
    (5, {"checkpoint": 2, "unroll": 2}), (5, {"checkpoint": "replay", "reverse": True}),
    (5, {"checkpoint": "auto"}), (1, {"checkpoint": "replay", "reverse": True}),
    (1, {"checkpoint": 1, "unroll": True}),
):
    _reverse = _options.get("reverse", False)
    entry(f"filter_scan: {_steps}, {_options}", run(eqg.filter_scan, **_options),
        *arguments(_steps), plain=run(scan, reverse=_reverse),
        **FIRST | {"precisions": ("float64",)})


# Many steps, more than in a chunk of those that are replayed, without keys and counts.
def tanh_step(w, b):
    def step(h, x):
        h = jnp.tanh(w @ h + x)
        return h, (b * h**2, h)

    return step


many = lambda loop, **options: lambda h, xs, w, b: loop(tanh_step(w, b), h, xs, **options)


def windows(k):
    """Without a derivative from one window to another, in the order in which they run."""

    def loop(f, h, xs, **options):
        def step(carry, x):
            h, t = carry
            h = jnp.where((t % k == 0) & (t > 0), jax.lax.stop_gradient(h), h)
            h, y = f(h, x)
            return (h, t + 1), y

        (h, _), ys = jax.lax.scan(step, (h, jnp.array(0)), xs, **options)
        return h, ys

    return loop


_long = arguments(133)
_half = (0.3 * normal(3), normal(601, 3), normal(3, 3, scale=0.3), normal(3))
for _name, _options, _plain in (
    ("replay", {"checkpoint": "replay"}, jax.lax.scan),
    ("replay in reverse", {"checkpoint": "replay", "reverse": True}, jax.lax.scan),
    ("truncated", {"truncate": 4}, windows(4)),
    ("truncated, in chunks", {"truncate": 19, "checkpoint": 4}, windows(19)),
    ("truncated, replay", {"truncate": 37, "checkpoint": "replay"}, windows(37)),
    ("truncated in reverse", {"truncate": 7, "reverse": True}, windows(7)),
):
    _reverse = {"reverse": True} if "reverse" in _options else {}
    entry(f"filter_scan: long, {_name}", many(eqg.filter_scan, **_options), *_long,
        plain=many(_plain, **_reverse), **OPTION if _name == "truncated" else FIRST,
        half=_half if _name in ("replay in reverse", "truncated") else None)


# ---------------------------------------------------------------- online


def elementwise(w, v):
    """Two states that depend on the same element of each other."""

    def step(carry, x):
        old, g = carry
        h, g = jnp.tanh(w * old + 0.3 * g + x), jnp.sin(v) * g * old + x**2
        return (h, g), (h * g, jnp.sum(old * h))

    return step


def online(loop, **options):
    def fn(h, g, w, v):
        xs = jnp.asarray(_xs, h.dtype)
        return loop(elementwise(w, v), (h, g), xs, **options)

    return fn


_xs = normal(7, 3)
_states = normal(3), normal(3), normal(3), normal(3)
for _options in ({}, {"reverse": True}):
    entry(f"filter_scan: online, {_options}", online(eqg.filter_scan, online=True, **_options),
        *_states, plain=online(jax.lax.scan, **_options),
        **FIRST if _options else OPTION | {"transforms": True})


def of_weights(h, w, b, xs, loop=jax.lax.scan):
    """Each element of the state depends on a row of the weights, in products of matrices."""

    def step(h, x):
        product = jnp.einsum("bij,bjk->bik", w, x)
        h = jnp.tanh(0.5 * h + product - jnp.concatenate([b[1:], x[:1, :3]]))
        return h, (b * h)[::-1]

    # Inputs are constants for an online scan.
    return loop(step, h, jax.lax.stop_gradient(xs))


entry("filter_scan: online, weights",
    ft.partial(of_weights, loop=ft.partial(eqg.filter_scan, online=True)),
    *(normal(2, 3, 2), normal(2, 3, 4), normal(2, 3, 2), normal(5, 2, 4, 2)), plain=of_weights,
    half=(normal(2, 3, 2), normal(2, 3, 4, scale=0.5), normal(2, 3, 2),
          0.5 * np.abs(normal(601, 2, 4, 2))), **FIRST)


def of_complex(h, rate, w, u, loop=jax.lax.scan):
    """A complex state whose factor is made of real numbers, beside a real state."""

    def step(carry, x):
        h, g = carry
        h = jax.lax.complex(rate, jnp.sin(rate)) * h + w * jnp.conj(x)
        g = 0.3 * g - 0.4 * g[::-1][::-1] + rate * u + jnp.real(x)
        return (h, g), (jnp.real(h) * g + jnp.imag(jnp.conj(h)) * u, g)

    xs = jnp.asarray(_xs + 1j * _xs[::-1], h.dtype)
    return loop(step, (h, jnp.zeros_like(rate)), xs)


entry("filter_scan: online, complex",
    ft.partial(of_complex, loop=ft.partial(eqg.filter_scan, online=True)),
    *(normal(3) + 1j * normal(3), normal(3, scale=0.4), normal(3) - 0.5j, normal(3)),
    plain=of_complex, precisions=("float64",), **FIRST)


def of_two_precisions(h, g, w, v, loop=jax.lax.scan):
    h, v = h.astype("float32"), v.astype("float32")
    half = lambda x: 0.5 * x.astype("float32")

    def step(carry, x):
        g, h = carry
        h = jnp.sin(h + half(w * g) + half(x))
        return (v.astype(g.dtype) * g + h.astype(g.dtype), h), (g, h)

    return loop(step, (g, h), jnp.asarray(_xs, g.dtype))


entry("filter_scan: online, two precisions",
    ft.partial(of_two_precisions, loop=ft.partial(eqg.filter_scan, online=True)), *_states,
    plain=of_two_precisions, precisions=("float64",), tolerance=1e-5,
    **FIRST | {"orders": ("vjp",)})


def e_prop(h, w, b, loop=jax.lax.scan, product=None):
    def step(carry, x):
        h, g = carry
        h = jnp.tanh((product or jnp.matmul)(w, h) + 0.4 * h + x)
        g = 0.5 * g + h
        return (h, g), (b * h, jnp.sum(jnp.outer(h, g) @ b))

    return loop(step, (h, jnp.zeros_like(h)), jnp.asarray(_xs, h.dtype))


fixed_product = lambda w, h: w @ jax.lax.stop_gradient(h)


entry("filter_scan: e-prop",
    ft.partial(e_prop, loop=ft.partial(eqg.filter_scan, online="e-prop")), normal(3),
    normal(3, 3, scale=0.7), normal(3), plain=ft.partial(e_prop, product=fixed_product),
    **FIRST | {"orders": ("value", "vjp")})

# ---------------------------------------------------------------- other control flow


def root(x, n, **options):
    """Newton, with a count that becomes an array and a function in the carry. After the last
    step, nothing is finite."""
    left = lambda c: (n - c[0]).astype(x.dtype)
    step = lambda c: (c[0] + 1, c[1], 0.5 * (c[2] + c[1](x) / c[2]) * (left(c) / left(c)))
    more = lambda c: c[0] < n
    return eqg.filter_while_loop(more, step, (0, jnp.exp, x), **options)[::2]


def root_plain(x, n):
    y = x
    for _ in range(4):
        y = 0.5 * (y + jnp.exp(x) / y)
    return jnp.array(4), y


entry("filter_while_loop", root, np.array([0.5, 1.2]), np.array(4), plain=root_plain,
    orders=("value", "jvp", "FF"))
# Chunks that the steps fill, that they do not fill, and that `max_steps` cuts.
for options in ({}, {"checkpoint": 4}, {"checkpoint": None}, {"max_steps": 4, "checkpoint": 3}):
    entry(f"filter_while_loop: bounded, {options}",
        ft.partial(root, **{"max_steps": 11} | options), np.array([0.5, 1.2]),
        np.array(9 if "max_steps" in options else 4), plain=root_plain, transforms=not options)


def mapped(run):
    """Of two arrays, with an array that is the same for all slices, and two outputs."""
    each = lambda w: lambda x, s: (jnp.tanh(x["x"] @ w) * s, jnp.sum(x["x"] ** 2))
    return lambda xs, w, s: run(each(w))({"x": xs}, s)


for options in ({}, {"chunk": 3}, {"chunk": 7, "checkpoint": False}):
    entry(f"filter_map: {options}",
        mapped(lambda f, options=options: lambda *xs: eqg.filter_map(f, *xs, **options)),
        np.linspace(-1, 1, 14).reshape(7, 2), np.array([[0.3, -0.8, 1.1], [0.5, 0.2, -0.4]]),
        np.linspace(0.5, 2, 7), plain=mapped(jax.vmap), transforms=bool(options))


def branches(flags):
    def fn(x, w):
        one, two = (
            lambda x: (w * jnp.sin(x["x"]), 3 * w[0], "name"),
            lambda x: (x["x"] ** 2, w[0], "name"),
        )
        return [eqg.filter_cond(flag, one, two, {"x": x, "fn": jnp.sin})[:2] for flag in flags]

    return fn


entry("filter_cond", lambda x, w, flag: branches([flag, ~flag])(x, w), normal(3), normal(3),
    np.array(True), plain=lambda x, w, flag: [(w * jnp.sin(x), 3 * w[0]), (x**2, w[0])],
    costs=False)
entry("filter_cond: numbers and a batch",
    lambda x, w: jax.vmap(lambda x: branches([x > 0, 2])(x[None], w[:1]))(x),
    np.array([0.5, -1.2, 2.0]), normal(3), plain=lambda x, w: [
        (jnp.where(x > 0, w[:1] * jnp.sin(x), x**2)[:, None], jnp.where(x > 0, 3, 1) * w[0]),
        ((w[:1] * jnp.sin(x))[:, None], 0 * x + 3 * w[0]),
    ], **OPTION)


class Layer(eqx.Module):
    w: jax.Array

    def __call__(self, x, power, *, scale):
        return {"y": jnp.sin(self.w @ x) ** power * scale, "name": "name"}


def checkpointed(**options):
    return lambda w, x: eqg.filter_checkpoint(Layer(w), **options)(x, 3, scale=x[0])["y"]


entry("filter_checkpoint", checkpointed(), normal(3, 3), normal(3),
    plain=lambda w, x: jnp.sin(w @ x) ** 3 * x[0])
entry("filter_checkpoint: options",
    checkpointed(prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable), normal(3, 3),
    normal(3), plain=lambda w, x: jnp.sin(w @ x) ** 3 * x[0], **OPTION)

# ---------------------------------------------------------------- linear recurrences


def recurrence(a, b, h, reverse=False):
    shape = jnp.broadcast_shapes(a.shape, b.shape)
    a, b = (
        jnp.broadcast_to(x.reshape((1,) * (len(shape) - x.ndim) + x.shape), shape)
        for x in (a, b)
    )
    h = jnp.broadcast_to(h.reshape((1,) * (len(shape) - 1 - h.ndim) + h.shape), shape[1:])

    def step(h, ab):
        h = ab[0] * h + ab[1]
        return h, h

    return jax.lax.scan(step, h, (a, b), reverse=reverse)[1]


def complex_normal(*shape):
    return 0.7 * np.exp(1j * normal(*shape)), normal(*shape) + 1j * normal(*shape)


A, B, H = 0.9 * rng.random((7, 2)) - 0.2, normal(7, 2), normal(2)
OF_ALL_STEPS = {"a row": normal(2, scale=0.6), "a number": np.array(0.7), "one": normal(1, 1)}
for _method, _reverse in itertools.product(("scan", "associative"), (False, True)):
    _linear = ft.partial(eqg.linear_recurrence, reverse=_reverse, method=_method)
    _is_first = (_method, _reverse) == ("scan", False)
    entry(f"linear_recurrence: {_method}, {_reverse}", _linear, A, B, H,
        plain=ft.partial(recurrence, reverse=_reverse),
        complex_args=(*complex_normal(7, 2), H + 0.3j) if _reverse else None,
        **{} if _is_first else OPTION)
    for _name, _a in OF_ALL_STEPS.items():
        entry(f"linear_recurrence: {_method}, {_reverse}, {_name}", _linear, _a,
            B[:1] if _name == "one" else B,
            plain=lambda a, b, r=_reverse: recurrence(a, b, jnp.zeros_like(b[0]), r),
            half=(np.array(0.7), normal(997, 2)) if _name == "a number" else None,
            complex_args=(_a * np.exp(0.4j), B + 0.3j) if _name == "a row" else None,
            precisions=("float64",), **FIRST)
entry("linear_recurrence: auto",
    lambda a, b, h: eqg.linear_recurrence(a[:, None], b, h, reverse=True), A[:, 0],
    normal(7, 3), np.array(0.4), plain=lambda a, b, h: recurrence(a[:, None], b, h, True),
    **OPTION | {"orders": ("value", "jvp", "vjp", "FR")})


# ---------------------------------------------------------------- what the input decides


def delta_rule(q, k, v, beta, g, state, delta=True, reverse=False):
    """Yang et al. (2025), step by step, for one head."""

    def step(s, of):
        q, k, v, beta, g = of
        s = jnp.exp(g) * s
        s = s + beta * jnp.outer(k, v - k @ s if delta else v)
        return s, q @ s

    last, out = jax.lax.scan(step, state, (q, k, v, beta, g), reverse=reverse)
    return out, last


HEAD = (normal(3, 2), normal(3, 2) / 2, normal(3, 2), rng.random(3), -rng.random(3))
for _options in ({}, {"reverse": True, "delta": False}):
    entry(f"gated_delta_rule: {sorted(_options)}",
        lambda *args, options=_options: eqg.gated_delta_rule(
            *args[:5], state=args[5], chunk=2, **options
        ), *HEAD, normal(2, 2), plain=ft.partial(delta_rule, **_options),
        **OPTION if _options else {})


def selective(x, step, a, b, c, state, reverse=True):
    """Gu and Dao (2023), step by step."""

    def run(h, of):
        x, step, b, c = (v.astype(h.dtype) for v in of)
        h = jnp.exp(step[:, None] * a) * h + (step * x)[:, None] * b[None]
        return h, jnp.real(h @ c)

    last, y = jax.lax.scan(run, state, (x, step, b, c), reverse=reverse)
    return y, last


_args = (-rng.random((2, 3)), normal(5, 3), normal(5, 3), normal(2, 3))
_args = (normal(5, 2), rng.random((5, 2)), *_args)
entry("selective_scan",
    lambda *args: eqg.selective_scan(*args[:5], state=args[5], reverse=True), *_args,
    complex_args=(*_args[:2], *(x * (1 - 0.4j) for x in _args[2:])), plain=selective, **OPTION)
