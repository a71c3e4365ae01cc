"""Functions on the host, against the same functions in JAX."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np

from .entry import entry


# A line has as many arguments as there is room for.
# fmt: off
X, Y = np.array([0.5, -1.2, 2.0]), np.array([0.7, 1.3, -0.4])
OPTION = {"transforms": False, "costs": False, "orders": ("value", "jvp", "vjp")}


def in_numpy(x, y):
    """Not symmetric, and not elementwise."""
    return np.sin(x) * y[..., ::-1] + np.sum(x * x * y, -1, keepdims=True)


in_jax = lambda x, y: jnp.sin(x) * y[..., ::-1] + jnp.sum(x * x * y, -1, keepdims=True)
fwd = lambda x, y: (in_numpy(x, y), (np.sin(x), np.cos(x), x, y))


def bwd(residuals, ct):
    sin, cos, x, y = residuals
    total = np.sum(ct, -1, keepdims=True)
    return ct * cos * y[..., ::-1] + 2 * total * x * y, (ct * sin)[..., ::-1] + total * x * x


def tangent(primals, tangents):
    (x, y), (t_x, t_y) = primals, tangents
    total = np.sum(2 * x * y * t_x + x * x * t_y, -1, keepdims=True)
    return in_numpy(x, y), np.cos(x) * t_x * y[..., ::-1] + np.sin(x) * t_y[..., ::-1] + total


def host(*rules, keep=8, **options):
    """A host function with the rules that are named."""
    function = eqg.host_function(in_numpy, **{"out": lambda x, y: x} | options)
    if "fwd" in rules:
        function.def_fwd(fwd, keep=keep)
        function.def_bwd(bwd)
    if "bwd" in rules:
        function.def_bwd(lambda args, ct: bwd(fwd(*args)[1], ct))
    if "jvp" in rules:
        function.def_jvp(tangent)
    return function


BATCH = {"vmap_method": "broadcast_all"}
# The modes without a rule take the rows or columns of the Jacobian.
entry("host_function", host("fwd"), X, Y, plain=in_jax, orders=OPTION["orders"], costs=False)
for _name, _fn in {
    "no residuals kept": host("fwd", keep=0), "backward rule": host("bwd"),
    "forward rule": host("jvp"), "both rules": host("jvp", "bwd"),
    "complex steps": host(finite_difference="complex"),
}.items():
    entry(f"host_function: {_name}", _fn, X, Y, plain=in_jax, **OPTION)
# Differences of float64 are known to 1e-10, of float32 to 1e-5; those of differences to less.
_central = host(finite_difference="central")
_steps = {"finite_difference": "central", "step": (1e-5, 2e-5)}
for _name, _fn, _precision, _tolerance, _orders in (
    ("central differences, float64", _central, "float64", 1e-8, OPTION["orders"]),
    ("central differences, float32", _central, "float32", 2e-3, OPTION["orders"]),
    ("differences of differences", _central, "float64", 1e-3, ("FF", "FR", "RF", "RR")),
    ("differences of cotangents", host("fwd", **_steps), "float64", 1e-7, ("FR", "RR")),
    ("differences of tangents", host("jvp", **_steps), "float64", 1e-7, ("FF", "RF")),
):
    _options = {"tolerance": _tolerance, "tolerance32": _tolerance, "orders": _orders}
    _options |= OPTION | {"precisions": (_precision,)} | _options
    entry(f"host_function: {_name}", _fn, X, Y, plain=in_jax, **_options)


def batched(fn):
    """With both batched, in two batches whose arrays have the same bytes, and with a captured
    argument."""

    def run(x, y):
        xs, ys = jnp.stack([x, 0.7 * x]), jnp.stack([y, 1.2 * y])
        return (
            jax.vmap(fn)(xs, ys), jax.vmap(jax.vmap(fn))(xs[:, None], ys[:, None]),
            jax.vmap(fn, (0, None))(xs, y), jax.vmap(fn, (None, 0))(x, ys),
        )

    return run


for _method in ("sequential", "sequential_unrolled", "expand_dims", "broadcast_all"):
    for _name, _fn in {
        "rules": host("fwd", "jvp", vmap_method=_method),
        "differences": host(finite_difference="complex", vmap_method=_method),
    }.items():
        if _name != "rules" and _method not in ("sequential", "broadcast_all"):
            continue
        entry(f"host_function: {_method}, {_name}", batched(_fn), X, Y, plain=batched(in_jax),
            precisions=("float64",), **OPTION)


# ---------------------------------------------------------------- trees and buffers


class Parameters(eqx.Module):
    gain: jax.Array
    name: str = eqx.field(static=True)


buffer = np.zeros(3)


def trees(params, x, n, *, power):
    """In the same memory in each call."""
    wide = np.multiply(params.gain, np.asarray(x["a"], np.float64) ** power, out=buffer)
    return {"y": wide, "n": np.asarray(n + 1), "total": np.sum(x["z"] * x["a"]) * params.gain}


def trees_jax(params, x, n, *, power):
    total = jnp.sum(x["z"] * x["a"].astype(x["z"].dtype)) * params.gain.astype(x["z"].dtype)
    n = (n + 1).astype("int32")
    return {"y": params.gain * x["a"] ** power, "n": n, "total": total}


def trees_out(params, x, n):
    n, total = np.empty(2, "int32"), jax.ShapeDtypeStruct((), x["z"].dtype)
    return {"y": x["a"], "n": n, "total": total}


def trees_bwd(residuals, ct, *, power, perturbed):
    params, x, _ = residuals
    a, z, y, total = x["a"], x["z"], ct["y"], ct["total"]
    gain = np.sum(y * a**power) + total * np.sum(z * a)  # its real part counts
    # What is not asked for may be anything.
    ct_z = total * a * params.gain if perturbed[1]["z"] else None
    ct_a = np.multiply(y, params.gain * power * a ** (power - 1), out=buffer) + np.real(
        total * z * params.gain
    )
    return eqg.tangents.of(params, gain=gain), {"a": ct_a, "z": ct_z}, None


def on_host(**options):
    def fn(gain, a, z):
        function = eqg.host_function(trees, **options)
        if "finite_difference" not in options:
            function.def_bwd(trees_bwd)
        args = Parameters(gain, "gain"), {"a": a, "z": z}, jnp.array([3, 5])
        return function(*args, power=3)

    return fn


def on_host_plain(gain, a, z):
    return trees_jax(Parameters(gain, ""), {"a": a, "z": z}, jnp.array([3, 5]), power=3)


_complex = (np.array(0.7), X, Y + 0.3j * X)
for _name, _fn, _tolerance, _precisions in (
    ("a rule", on_host(out=trees_out), 1e-9, ("float64", "float32")),
    ("differences", on_host(out=trees_out, finite_difference="central"), 1e-7, ("float64",)),
):
    entry(f"host_function: trees, {_name}", _fn, np.array(0.7), X, Y, plain=on_host_plain,
        complex_args=_complex, tolerance=_tolerance, precisions=_precisions, **OPTION)

# ---------------------------------------------------------------- linear maps

MATRIX = np.array([[0.5, -1.0, 0.3], [0.2, 0.7, -0.4]])
PHASES = np.exp(1j * np.arange(6.0).reshape(2, 3))


def matrix(x, scale):
    return MATRIX * (PHASES if np.iscomplexobj(x) else 1) * np.asarray(scale)[..., None, None]


def forward(x, scale):
    return {"u": np.einsum("...ij,...j->...i", matrix(x["a"], scale), x["a"]), "v": 2 * x["b"]}


def adjoint(y, scale):
    rows = np.conj(matrix(y["u"], scale))
    return {"a": np.einsum("...ij,...i->...j", rows, y["u"]), "b": 2 * y["v"]}


def linear(**options):
    def fn(a, b):
        out = lambda x, scale: {"u": jax.ShapeDtypeStruct((2,), x["a"].dtype), "v": x["b"]}
        function = eqg.linear_host_function(forward, adjoint, out=out, **options)
        return function({"a": a, "b": b}, 1.5)

    return fn


def linear_plain(a, b):
    m = MATRIX * PHASES if jnp.iscomplexobj(a) else MATRIX
    return {"u": 1.5 * jnp.asarray(m, a.dtype) @ a, "v": 2 * b}


entry("linear_host_function", linear(), X, np.array([0.3, -0.7]), plain=linear_plain,
    complex_args=(X + 0.4j * Y, np.array([0.3, -0.7])), costs=False)
entry("linear_host_function: a batch",
    lambda a, b: jax.vmap(linear(**BATCH), (0, None))(jnp.stack([a, 2.5 * a]), b), X,
    np.array([0.3, -0.7]),
    plain=lambda a, b: jax.vmap(linear_plain, (0, None))(jnp.stack([a, 2.5 * a]), b), **OPTION)
phase = lambda x: PHASES[0].astype(x.dtype) if np.iscomplexobj(x) else 1
entry("linear_host_function: transposed", lambda y: jax.linear_transpose(
        eqg.linear_host_function(
            lambda x: np.cumsum(phase(x) * x),
            lambda y: np.conj(phase(y)) * np.cumsum(y[::-1])[::-1],
        ), y,
    )(y)[0], X, plain=lambda y: phase(y) * jnp.cumsum(y[::-1])[::-1],
    complex_args=(X + 0.4j * Y,), **OPTION)
