"""The properties of an op: each is a function of an entry that yields what was found wrong.

An op and its reference run through the same program, and what comes out is compared by name.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..helpers import checking_leaks
from .registry import Entry


# ---------------------------------------------------------------- a function of its arrays


def cast(tree: Any, dtype: str) -> Any:
    """The floating arrays in another precision; complex arrays in the same precision."""

    def leaf(x):
        if not isinstance(x, np.ndarray | np.generic):
            return x
        if np.issubdtype(x.dtype, np.complexfloating):
            return jnp.asarray(x, {"float64": "complex128", "float32": "complex64"}[dtype])
        return jnp.asarray(x, dtype) if np.issubdtype(x.dtype, np.floating) else jnp.asarray(x)

    return jax.tree.map(leaf, tree)


class Flat:
    """A function of the inexact arrays in `args` alone, which returns the ones in its
    output."""

    def __init__(self, fn: Callable[..., Any], args: Any):
        self.dynamic, self.static = eqx.partition(args, eqx.is_inexact_array)
        self.leaves, self.treedef = jax.tree.flatten(self.dynamic)
        self.fn = fn

    def __call__(self, *leaves: Any) -> list[Any]:
        return [x for x in self.all_outputs(*leaves) if eqx.is_inexact_array(x)]

    def all_outputs(self, *leaves: Any) -> list[Any]:
        """With the outputs that have no derivative."""
        dynamic = jax.tree.unflatten(self.treedef, leaves)
        out = self.fn(*eqx.combine(dynamic, self.static))
        return [x for x in jax.tree.leaves(out) if eqx.is_array_like(x)]


def reference(entry: Entry) -> Callable[..., Any]:
    """A function without the library that has the value and all derivatives of the op."""
    plain, smooth_fn = entry.plain, entry.smooth
    if smooth_fn is None:
        return plain

    def fn(*args):
        def leaf(value, smooth):
            if not eqx.is_inexact_array(value):
                return value
            return jax.lax.stop_gradient(value - smooth) + smooth

        return jax.tree.map(leaf, plain(*args), smooth_fn(*args))

    return fn


def numbers(seed: int, types: Any) -> list[jax.Array]:
    """Arrays with these shapes and dtypes, of numbers around one that are all different."""
    rng = np.random.default_rng(seed)

    def array(x):
        values = rng.normal(size=x.shape)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            values = values + 1j * rng.normal(size=x.shape)
        return jnp.asarray(values, x.dtype)

    return [array(x) for x in types]


# ---------------------------------------------------------------- the program


def derivatives(fn: Flat, orders: Any) -> Callable[..., dict[str, Any]]:
    """Value and derivatives of `fn`, and the second derivatives of `fn` between two others."""

    def curved(*leaves):
        """Nonlinear before and after, and other outputs than `fn` has."""
        outs = fn(*(x + 0.05 * jnp.sin(x) for x in leaves))
        return [x + 0.3 * x * x for x in outs]

    def run(xs, ts, us, cts):
        found = {}
        if "value" in orders:
            found["value"] = fn.all_outputs(*xs)
        if "jvp" in orders:
            found["jvp"] = jax.jvp(fn, xs, ts)[1]
        if "vjp" in orders:
            found["vjp"] = jax.vjp(fn, *xs)[1](cts)
        forward = lambda *xs: jax.jvp(curved, xs, us)[1]
        reverse = lambda *xs: jax.vjp(curved, *xs)[1](cts)
        if "FF" in orders:
            found["FF"] = jax.jvp(forward, xs, ts)[1]
        if "FR" in orders:
            found["FR"] = jax.jvp(reverse, xs, us)[1]
        if "RF" in orders:
            found["RF"] = jax.vjp(forward, *xs)[1](cts)
        if "RR" in orders:
            found["RR"] = jax.vjp(reverse, *xs)[1](us)
        return found

    return run


# Each is the product of the Hessian with `us`, if it is symmetric.
PRODUCTS = ("FR", "RF", "RR")


def derivatives_of_smooth(fn: Flat, orders: Any) -> Callable[..., dict[str, Any]]:
    """The same for a real function whose rules are autodiff's: one product with its Hessian."""
    products = [order for order in orders if order in PRODUCTS]
    some = [order for order in orders if order not in products[1:]]

    def run(*operands):
        found = derivatives(fn, some)(*operands)
        for order in products[1:]:
            found[order] = found[products[0]]
        return found

    return run


def weighted(outs: Any) -> Any:
    return sum(jnp.sum(jnp.real(x * w)) for x, w in zip(outs, numbers(7, outs), strict=True))


def transformed(fn: Flat, entry: Entry) -> Callable[..., dict[str, Any]]:
    """Gradients of sums over a batch, and of each example, with `scan` and `checkpoint`."""

    def of_batch(batch, xs):
        """Only the first argument is batched."""
        outs = jax.vmap(lambda x: fn(x, *xs[1:]))(batch)
        return sum(weighted([x[i] for x in outs]) for i in range(len(batch)))

    def of_scan(batch, xs):
        def step(carry, x):
            return carry + weighted(jax.checkpoint(fn)(x, *xs[1:])), None

        total, _ = jax.lax.scan(step, jnp.zeros((), jnp.finfo(batch.dtype).dtype), batch)
        return total

    def run(xs):
        batch = jnp.stack([xs[0], 0.97 * xs[0]])
        found = {"scan": jax.grad(of_scan, (0, 1))(batch, xs)}
        if entry.batches:
            found["vmap"] = jax.grad(of_batch, (0, 1))(batch, xs)
            # For each example, with respect to the others: the batched one is not perturbed.
            per_example = lambda x: jax.grad(lambda xs: weighted(fn(x, *xs[1:])))(xs)
            found["per example"] = jax.vmap(per_example)(batch)
        return found

    return run


def transformed_reference(fn: Flat, entry: Entry) -> Callable[..., dict[str, Any]]:
    """The same from the gradients at each example, computed one after the other."""

    def run(xs):
        batch = jnp.stack([xs[0], 0.97 * xs[0]])
        gradient = jax.grad(lambda xs: weighted(fn(*xs)))
        of_first, *of_others = jax.lax.map(lambda x: gradient((x, *xs[1:])), batch)
        total = of_first, (jnp.zeros_like(xs[0]), *(jnp.sum(ct, 0) for ct in of_others))
        each = jnp.zeros_like(batch), *of_others
        found = {"vmap": total, "per example": each} if entry.batches else {}
        return found | {"scan": total}

    return run


def eager(entry: Entry) -> dict[str, Any]:
    """Value and cotangents as users see them first: eagerly, in float32."""
    op = Flat(entry.fn, cast(entry.args, "float32"))
    if "vjp" not in entry.orders:
        return {"value": op.all_outputs(*op.leaves)}
    outs, pull = jax.vjp(op, *op.leaves)
    return {"value": op.all_outputs(*op.leaves), "vjp": pull(numbers(3, outs))}


def orders_of(
    entry: Entry, dtype: str, of_eager: dict[str, Any] | None = None
) -> Iterator[str]:
    """Value, both modes, second order, `jit`, `vmap`, `scan`, `checkpoint`. And the results of
    `eager`, which are in float32."""
    tolerance = entry.tolerance if dtype == "float64" else entry.tolerance32
    args = cast(entry.args, dtype)
    op, plain = Flat(entry.fn, args), Flat(reference(entry), args)
    outs = jax.eval_shape(plain, *plain.leaves)
    xs, ts, us = (tuple(x) for x in (op.leaves, numbers(1, op.leaves), numbers(2, op.leaves)))
    pairs = [(op, entry.orders)]
    if entry.forward is None:
        pairs.append((plain, entry.orders))
    else:
        forward = {"value", "jvp", "FF"} & set(entry.orders)
        pairs.append((plain, [order for order in entry.orders if order not in forward]))
        pairs.append((Flat(entry.forward, args), forward))
    is_smooth = not (entry.own_rule or entry.forward or any(map(jnp.iscomplexobj, op.leaves)))

    # One compilation for the op and its references.
    def program(*operands):
        for fn, orders in pairs:
            is_op = fn is op
            of = derivatives_of_smooth if is_smooth and not is_op else derivatives
            found = of(fn, orders)(*operands)
            if "vjp" in orders and entry.transforms:
                found |= (transformed if is_op else transformed_reference)(fn, entry)(xs)
            yield found

    run = jax.jit(lambda *operands: list(program(*operands)))
    got, *wanted = run(xs, ts, us, numbers(3, outs))
    want = {name: array for found in wanted for name, array in found.items()}
    yield from differences(got, want, tolerance)
    narrowed = {name: [narrow(x) for x in want[name]] for name in of_eager or ()}
    for text in differences(of_eager, narrowed, entry.tolerance32):
        yield f"eager {text}"


def narrow(x: Any) -> np.ndarray:
    """In the dtype that corresponds without `jax_enable_x64`."""
    x = np.asarray(x)
    shorter = {"float64": "float32", "complex128": "complex64", "int64": "int32"}
    return x.astype(shorter.get(str(x.dtype), x.dtype))


def at_edges(entry: Entry) -> Iterator[str]:
    """Value and cotangents at the points where formulas break."""
    for i, point in enumerate(entry.nasty):
        args = cast(point.args, "float64")
        op = Flat(entry.fn, args)
        got = jax.jit(ft.partial(_value_and_vjp, op))(*op.leaves)
        want = {"value": point.value, "vjp": point.cts}
        if "vjp" not in entry.orders:
            del want["vjp"]
        if any(x is None for x in want.values()):
            plain = Flat(reference(entry), args)
            of_plain = jax.jit(ft.partial(_value_and_vjp, plain))(*plain.leaves)
            want = {name: of_plain[name] if x is None else x for name, x in want.items()}
        if point.second is not None:
            got["second"] = jax.jit(ft.partial(_gradient_of_cotangents, op))(*op.leaves)
            want["second"] = point.second
        # The dtypes are compared elsewhere, and are those of the arguments here.
        for text in differences(got, want, entry.tolerance, dtypes=False, each=point.each):
            yield f"nasty point {i}: {text}"


def _value_and_vjp(fn: Flat, *xs: Any) -> dict[str, Any]:
    """The value, and the cotangents for ones."""
    outs, pull = jax.vjp(fn, *xs)
    return {"value": fn.all_outputs(*xs), "vjp": pull([jnp.ones_like(x) for x in outs])}


def _gradient_of_cotangents(fn: Flat, *xs: Any) -> Any:
    def total(*xs):
        outs, pull = jax.vjp(fn, *xs)
        cts = pull([jnp.ones_like(x) for x in outs])
        return sum(i * jnp.sum(jnp.real(ct)) for i, ct in enumerate(cts, start=1))

    return jax.grad(total, range(len(xs)))(*xs)


def in_half_precision(entry: Entry) -> Iterator[str]:
    """Long sums are accumulated in a higher precision."""
    for dtype in ("bfloat16", "float16") if entry.half else ():
        args = cast(entry.half, dtype)
        widen = lambda x: x.astype("float64") if eqx.is_inexact_array(x) else x
        exact = jax.tree.map(widen, args)
        op, plain = Flat(entry.fn, args), Flat(reference(entry), exact)
        got = jax.jit(ft.partial(_value_and_vjp, op))(*op.leaves)
        want = jax.jit(ft.partial(_value_and_vjp, plain))(*plain.leaves)
        eps = float(jnp.finfo(dtype).eps)
        for text in differences(got, want, 4 * eps, dtypes=False):
            yield f"{dtype}: {text}"
        plain = Flat(reference(entry), args).all_outputs
        of_value = jax.eval_shape(plain, *op.leaves) if entry.half_as_plain else None
        types = *(of_value or got["value"]), *op.leaves
        for x, t in zip((*got["value"], *got["vjp"]), types, strict=True):
            if x.dtype != t.dtype:
                yield f"{dtype}: a value or a cotangent is {x.dtype} instead of {t.dtype}"


# Their first output stays in single precision, as the values of a loss do.
IN_SINGLE = ("losses.linear_cross_entropy", "probe", "reversal_schedule", "nn.VectorQuantizer")


def types_in_half_precision(entry: Entry) -> Iterator[str]:
    """Also where its numbers are not compared, the op runs, and returns the dtype that it was
    given."""
    if entry.half or any(map(np.iscomplexobj, jax.tree.leaves(entry.args))):
        return
    op = Flat(entry.fn, cast(entry.args, "bfloat16"))
    values = lambda *xs: {"value": op.all_outputs(*xs)}
    run = ft.partial(_value_and_vjp, op) if "vjp" in entry.orders else values
    dtypes = [x.dtype for x in jax.eval_shape(run, *op.leaves)["value"]]
    dtype = next((t for t in dtypes if jnp.issubdtype(t, jnp.inexact)), jnp.bfloat16)
    is_single = entry.name.split(":")[0] in IN_SINGLE or not entry.half_as_plain
    if dtype != jnp.bfloat16 and not is_single:
        yield f"in bfloat16, the first output is {dtype}"


def of_complex_numbers(entry: Entry) -> Iterator[str]:
    """The same for complex arguments."""
    if entry.complex_args is not None:
        other = dataclasses.replace(entry, args=entry.complex_args, complex_args=None)
        yield from (f"complex: {text}" for text in orders_of(other, "float64"))


def without_leaks(entry: Entry) -> Iterator[str]:
    """Under JAX's leak checker."""
    if not entry.leaks:
        return
    op = Flat(entry.fn, cast(entry.args, "float32"))
    run = ft.partial(_value_and_vjp, op) if "vjp" in entry.orders else op
    with checking_leaks():
        jax.make_jaxpr(run)(*op.leaves)
    yield from ()


def frozen_arguments(entry: Entry) -> Iterator[str]:
    """A gradient with respect to one argument costs less than with respect to all, where this
    is so without the library."""
    args = cast(entry.args, "float32")
    op, plain = Flat(entry.fn, args), Flat(reference(entry), args)
    if not entry.costs or "vjp" not in entry.orders or len(op.leaves) < 2:
        return

    def flops(fn, chosen):
        def run(xs):
            at = lambda some: fn(*(some.get(i, x) for i, x in enumerate(xs)))
            outs, pull = jax.vjp(at, {i: xs[i] for i in chosen})
            return pull([jnp.ones_like(x) for x in outs])

        return jax.jit(run).lower(op.leaves).cost_analysis().get("flops", 0.0)

    everything = range(len(op.leaves))
    every_op, every_plain = flops(op, everything), flops(plain, everything)
    for i in everything:
        if flops(plain, [i]) < 0.8 * every_plain and flops(op, [i]) >= every_op:
            yield f"argument {i} alone costs {flops(op, [i])} FLOPs, as all do"


def with_garbage(entry: Entry) -> Iterator[str]:
    """What does not count may be NaN or infinite, and its cotangents too."""
    if entry.garbage is None:
        return
    counts = entry.counts or (lambda out: jax.tree.map(lambda x: np.ones(x.shape, bool), out))

    def run(args, bad):
        op = Flat(entry.fn, args)
        out = entry.fn(*args)
        flags = [
            flag
            for x, flag in zip(jax.tree.leaves(out), jax.tree.leaves(counts(out)), strict=True)
            if eqx.is_inexact_array(x)
        ]
        outs, pull = jax.vjp(op, *op.leaves)
        cts = [
            jnp.where(flag, ct, bad) for ct, flag in zip(numbers(3, outs), flags, strict=True)
        ]
        value = [jnp.where(flag, x, 0) for x, flag in zip(outs, flags, strict=True)]
        return {"garbage: value": value, "garbage: vjp": pull(cts)}

    clean, dirty = cast(entry.args, "float64"), cast(entry.garbage, "float64")
    run = jax.jit(run)
    want = run(clean, 0.0)
    for bad in (np.inf, np.nan):
        yield from differences(run(dirty, bad), want, entry.tolerance)


PROPERTIES = (
    at_edges, in_half_precision, types_in_half_precision, of_complex_numbers, without_leaks,
    frozen_arguments, with_garbage,
)  # fmt: skip


# ---------------------------------------------------------------- the comparison


def differences(
    got: Any, want: Any, tolerance: float, dtypes: bool = True, each: bool = False
) -> Iterator[str]:
    """By name, where two programs differ by more than a tolerance relative to the largest
    number of the array, or to each number. NaN and infinities are equal only to themselves."""
    for name in want:
        pairs = jax.tree.leaves(got[name]), jax.tree.leaves(want[name])
        if len(pairs[0]) != len(pairs[1]):
            yield f"{name}: {len(pairs[0])} arrays instead of {len(pairs[1])}"
            continue
        for i, (x, y) in enumerate(zip(*pairs, strict=True)):
            x, y = np.asarray(x), np.asarray(y)
            if x.shape != y.shape or (dtypes and x.dtype != y.dtype):
                yield f"{name}[{i}]: {x.dtype}{x.shape} instead of {y.dtype}{y.shape}"
                continue
            wide = np.result_type(x.dtype, np.float64) if x.dtype.kind in "fcV" else x.dtype
            x, y = x.astype(wide), y.astype(wide)
            if x.dtype.kind not in "fc":
                if not np.array_equal(x, y):
                    yield f"{name}[{i}]: {x} instead of {y}"
                continue
            size = np.max(np.abs(y[np.isfinite(y)]), initial=0.0)
            rtol, atol = (tolerance, 1e-300) if each else (0, tolerance * max(size, 1e-3))
            close = np.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
            if not close.all():
                yield f"{name}[{i}]: {x[~close][:5]} instead of {y[~close][:5]}"
