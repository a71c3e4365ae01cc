"""Gradient ops and probes: identities whose derivative is another, in raw JAX."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry, Nasty


# A line has as many arguments as there is room for.
# fmt: off
A, INF, NAN = np.array, np.inf, np.nan
X = A([0.5, -1.2, 2.0])
R = A([[0.5, -1.2, 2.0], [0.3, 0.9, -0.4]])
TREE = {"a": R, "b": A([[1.7, -0.6, 0.8]])}
Z = A([0.5 - 2.0j, -1.2 + 0.3j, 2.0 + 0.7j])
COMPLEX = {"a": R * (1 - 2j), "b": Z[None]}
VJP, FIRST = ("value", "vjp"), ("value", "jvp", "vjp")
# Reverse over forward mode is no derivative of one function where the modes differ.
MODES_DIFFER = ("value", "jvp", "vjp", "FF", "FR", "RR")
on_leaves = lambda fn, *trees: jax.tree.map(fn, *trees)
times = lambda s, t: on_leaves(lambda t: s.astype(t.dtype) * t, t)


def backward(rule):
    """The identity whose cotangent is `rule` of the incoming one, in raw JAX."""

    @jax.custom_vjp
    def fn(x, *params):
        return x

    zeros = ft.partial(on_leaves, jnp.zeros_like)
    fn.defvjp(lambda x, *p: (x, p), lambda p, ct: (rule(ct, *p), *zeros(p)))
    return fn


def forward(rule):
    """The identity whose tangent is `rule` of the incoming one, in raw JAX."""

    @jax.custom_jvp
    def fn(x, *params):
        return x

    fn.defjvp(lambda primals, ts: (primals[0], rule(ts[0], *primals[1:])))
    return fn


of_cotangent = lambda op: lambda ct, *params: jax.vjp(lambda x: op(x, *params), ct)[1](ct)[0]


def edge(args, value, *cts):
    """Value and cotangents by hand."""
    args = [A(x) for x in args]
    return Nasty(*args, value=[A(value)], cts=[A(ct) for ct in cts] if cts else None)


def backward_op(name, op, *params, rule, transforms=True, **options):
    """Enter an op, and its backward rule as a function of the cotangent and the parameters."""
    both = {"transforms": transforms, "costs": False, "draws": options.pop("draws", False)}
    plain, identity = backward(rule), lambda x, *_: x
    entry(name, op, R, *params, plain=plain, forward=identity, orders=MODES_DIFFER, **both)
    options = both | {"transforms": False, "orders": (*FIRST, "FR")} | options
    cts = on_leaves(lambda x: 1.3 * x - 0.2, TREE)
    name = f"{name}: as a function of the cotangent"
    entry(name, of_cotangent(op), cts, *params, plain=rule, **options)


# ---------------------------------------------------------------- linear in the gradient

STRENGTH = A([[3.0, -0.7, 1.9]])
LINEAR = {"own_rule": True, "costs": False}

entry("scale_gradient", *(eqg.scale_gradient, TREE, STRENGTH),
    plain=forward(lambda t, s: times(s, t)), complex_args=(Z, A(1.3 - 0.4j)), **LINEAR)
entry("reverse_gradient", lambda x, s: (eqg.reverse_gradient(x), eqg.reverse_gradient(x, s)),
    *(X, A(0.6)),
    plain=lambda x, s: (forward(lambda t: -t)(x), forward(lambda t, s: times(-s, t))(x, s)),
    complex_args=(Z, A(0.6)), transforms=False, **LINEAR)
MASKS = {"a": A([[True, False, True], [False, True, True]]), "b": False, "c": True}
MASKED = TREE | {"c": A([0.4, -0.9])}
entry("mask_gradient", lambda x: eqg.mask_gradient(x, MASKS), MASKED,
    plain=forward(lambda t: on_leaves(lambda m, t: jnp.where(m, t, 0), MASKS, t)),
    garbage=(on_leaves(lambda m, x: np.where(m, x, NAN), MASKS, MASKED),),
    counts=lambda out: on_leaves(lambda m, x: np.broadcast_to(m, x.shape), MASKS, out),
    complex_args=(COMPLEX | {"c": Z * 1j},), **LINEAR)


schedule = lambda p, low, high, gamma: low + (high - low) * (2 / (1 + jnp.exp(-gamma * p)) - 1)


entry("reversal_schedule", lambda p, low, high, gamma: (
        eqg.reversal_schedule(p, low=np.float32(0)),
        eqg.reversal_schedule(p, low=low, high=high, gamma=gamma),
    ), *(A([0.1, 0.3, 0.75]), A(0.2), A(1.7), A(4.0)),
    plain=lambda p, *params: (schedule(p, 0, 1, 10), schedule(p, *params)), transforms=False)


def over_devices(fn, *args):
    """`fn` of each of two rows, on two devices."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    of_row = lambda *rows: fn(*(r[0] for r in rows))[None]
    options = {"mesh": mesh, "in_specs": spec, "out_specs": spec, "check_vma": False}
    return jax.shard_map(of_row, **options)(*args)


over_batch = lambda fn, *args: jax.vmap(fn, axis_name="i")(*args)


def gradient_inside(over, weight, x):
    """The gradient with respect to a shared weight, which each device takes for itself."""
    loss = lambda w, x: jnp.sum(jnp.sin(eqg.psum_gradient(w, "i") * x))
    return over(jax.grad(loss), jnp.broadcast_to(weight[None], x.shape), x)


for _name, _over in (("", over_batch), (": in shard_map", over_devices)):
    entry(f"psum_gradient{_name}", ft.partial(_over, lambda x: eqg.psum_gradient(x, "i")), R,
        plain=backward(lambda ct: jnp.broadcast_to(jnp.sum(ct, 0)[None], ct.shape)),
        forward=lambda x: x, orders=MODES_DIFFER, transforms=_over is over_batch)
    entry(
        f"psum_gradient: the gradient{_name}",
        ft.partial(gradient_inside, _over),
        *(X, R),
        plain=lambda w, x: 0 * x + jnp.sum(x * jnp.cos(w[None] * x), 0)[None],
        orders=FIRST,
        # JAX's leak checker finds leaks of `shard_map` with a raw `jax.custom_vjp` too.
        precisions=("float64", "float32")[_over is over_devices :],
        transforms=False,
        costs=False,
    )

# ---------------------------------------------------------------- not linear in it


clip = lambda ct, low, high: jnp.where(ct < low, low, jnp.where(ct > high, high, ct))


backward_op(
    "clip_gradient",
    eqg.clip_gradient,
    *(A(-0.5), A([[1.0, 0.7, 0.3]])),
    rule=lambda ct, low, high: on_leaves(lambda c: clip(c, low, high), ct),
    # the slope at a bound is one half
    nasty=[
        edge(
            ([-0.5, 0.9, 1.0, -2.0], -0.5, 1.0), [-0.5, 0.9, 1, -0.5],
            *([0.5, 1, 0.5, 0], 1.5, 0.5),
        )
    ],
)
for _low, _high, _clipped in (
    (-0.5, None, [0.5 - 0.5j, -0.5 + 0.3j, 2 + 0.7j]),
    (None, 1.0, [0.5 - 2j, -1.2 + 0.3j, 1 + 0.7j]),
    (-0.5, 1.0, [0.5 - 0.5j, -0.5 + 0.3j, 1 + 0.7j]),
):
    entry(f"clip_gradient: from {_low} to {_high}, complex, NaN",
        of_cotangent(lambda x, low=_low, high=_high: eqg.clip_gradient(x, low, high)), X,
        plain=lambda ct, low=_low, high=_high: jnp.clip(ct, low, high), orders=("value",),
        transforms=False, nasty=[Nasty(A([NAN, INF, -INF])), edge((Z,), _clipped)])


def norm_of(ct, axis=None):
    return jnp.sqrt(jnp.sum(jnp.abs(ct) ** 2, axis, keepdims=axis is not None))


whole_norm = lambda ct: jnp.sqrt(sum(norm_of(c) ** 2 for c in jax.tree.leaves(ct)))
factor = lambda norm, max_norm: jnp.where(norm > max_norm, max_norm / norm, 1)
LONG = 40 * np.sin(np.arange(1.0, 1500.0))
backward_op(
    "clip_gradient_norm",
    eqg.clip_gradient_norm,
    A(0.7),
    rule=lambda ct, m: times(factor(whole_norm(ct), m), ct),
    half=(LONG, A(0.7)),
    complex_args=(COMPLEX, A(0.7)),
    nasty=[
        edge((np.zeros(3), 0.7), np.zeros(3), np.ones(3), 0.0),
        edge(([3.0, 4.0], 5.0), [3.0, 4.0], [1.0, 1.0], 0.0),  # the largest norm: the identity
        edge(([3e200, -4e200], 0.5), [0.3, -0.4], [0.0, 0.0], -0.2),
    ],
)
SHORT = [[NAN, 2.0], [INF, 2.0], [0.33, -0.44], [0.27, -0.36]]
entry("clip_gradient_norm: not finite",
    of_cotangent(lambda x: eqg.clip_gradient_norm(x, 0.5, axis=-1)), R,
    plain=lambda ct: ct * 0.5 / norm_of(ct, -1), orders=("value",), transforms=False,
    nasty=[edge((SHORT,), [*SHORT[:2], [0.3, -0.4], SHORT[3]])])
backward_op("clip_gradient_norm: along an axis",
    lambda x, m: eqg.clip_gradient_norm(x, m, axis=-1), A(1.6),
    rule=lambda ct, m: on_leaves(lambda c: c * factor(norm_of(c, -1), m), ct), transforms=False)
backward_op("normalize_gradient", lambda x: eqg.normalize_gradient(x),
    rule=lambda ct: times(1 / whole_norm(ct), ct), half=(LONG,), complex_args=(COMPLEX,),
    nasty=[
        edge(([3e-200, -4e-200],), [0.6, -0.8], [2.24e199, 1.68e199]),
        edge((np.zeros(3),), np.zeros(3), np.ones(3)),
        edge(([NAN, 2.0],), [NAN, NAN], [NAN, NAN]),
    ])
backward_op("normalize_gradient: with eps, along an axis",
    lambda x, eps: eqg.normalize_gradient(x, axis=0, eps=eps), A(0.3),
    rule=lambda ct, eps: on_leaves(lambda c: c / (norm_of(c, 0) + eps), ct), transforms=False)
backward_op("zero_nonfinite_gradient", eqg.zero_nonfinite_gradient, rule=lambda ct: ct, nasty=[
        edge(([NAN, 2.0, INF, -INF],), [0, 2, 0, 0], [0, 1, 0, 0]),
        edge(([complex(1, NAN), 2 - 1j, complex(INF, 1)],), [0, 2 - 1j, 0], [0, 1, 0]),
    ])


def with_noise(ct, stddev):
    """From the standard normal distribution, for each leaf with a key of its own."""
    leaves, treedef = jax.tree.flatten(ct)
    keys = jr.split(jr.key(5), len(leaves))
    noise = [jr.normal(k, c.shape, c.dtype) for k, c in zip(keys, leaves, strict=True)]
    return on_leaves(lambda c, n: c + stddev * n, ct, jax.tree.unflatten(treedef, noise))


backward_op("noise_gradient",
    lambda x, stddev: eqg.noise_gradient(x, key=jr.key(5), stddev=stddev), A([[0.5, 2.0, 0.1]]),
    rule=with_noise, transforms=False, draws=True)

# Halfway cases, subnormal numbers, overflows.
ROUNDED = A([1 / 3, 1.0625, 1.1875, 3e-3, 2e-6, 1.3e-7, 460, 7e4, -1e6, INF, NAN, -0.7])
for _dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2):
    _cast = lambda x, d=_dtype: jax.lax.optimization_barrier(x.astype(d)).astype(x.dtype)
    with np.errstate(all="ignore"):
        parts = [x.astype(_dtype).astype(float) for x in (ROUNDED, Z.real, Z.imag)]
    entry(f"cast_gradient: {_dtype.dtype.name}",
        of_cotangent(lambda x, d=_dtype: eqg.cast_gradient(x, d)), X, plain=_cast,
        smooth=lambda x: x, orders=VJP, transforms=False, nasty=[
            edge((ROUNDED,), parts[0], np.ones(12)),
            edge((Z,), parts[1] + 1j * parts[2], np.ones(3)),
        ])

# ---------------------------------------------------------------- other functions

backward_op("on_backward", lambda x, s: eqg.on_backward(
        {"t": x, "n": 3, "u": X.astype(s.dtype)},
        lambda ct: {"t": on_leaves(lambda c: jnp.tanh(s * c), ct["t"]), "n": None, "u": None},
    )["t"], A(0.8), rule=lambda ct, s: on_leaves(lambda c: jnp.tanh(s * c), ct))
entry(
    "probe",
    lambda x, slot: eqg.probe((x, x["a"]), ({"a": slot, "b": None}, None)),
    TREE,
    np.full((2, 3), 0.3),  # the value of a slot is ignored
    plain=lambda x, slot: (x, x["a"]),
    smooth=lambda x, slot: (x | {"a": x["a"] + slot}, x["a"]),
    complex_args=(COMPLEX, COMPLEX["a"] * 3),
)


def statistics(ct):
    """Over two steps of a scan, whose probes are passed one half and three halves of `ct`."""

    def steps(slot, x):
        step = lambda x, s: (times(s, eqg.probe(x, slot)), None)
        return jax.lax.scan(step, x, jnp.asarray([3, 0.5], ct["b"].dtype))[0]

    slot = eqx.filter_vjp(steps, eqg.GradientStatistics(), ct)[1](ct)[0]
    means = lambda slot: (slot.mean_norm, slot.mean_max)
    layers = on_leaves(lambda x: jnp.stack([x, 3 * x]), slot)
    return slot.norm, slot.max, slot.nonfinite, slot.steps, *means(slot), *means(layers)


def statistics_plain(ct):
    norm, zero = whole_norm(ct), 0 * whole_norm(ct)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(c)) for c in jax.tree.leaves(ct)]))
    return 2 * norm, 2 * largest, zero, zero + 2, norm, largest, norm, largest


NOT_FINITE = {"a": A([3.0, NAN, -4.0, INF]), "b": A([-INF])}
AT_NOT_FINITE = [A([2.4, 0, -7.2, 0]), np.zeros(1)]
entry("probe: statistics", statistics, TREE, plain=statistics_plain, orders=FIRST,
    transforms=False, costs=False,
    nasty=[Nasty(NOT_FINITE, value=[10, 8, 6, 2, 5, 4, 5, 4], cts=AT_NOT_FINITE)])
for _name, _op in (
    ("tap_gradient", lambda x: eqg.tap_gradient(x, lambda *_: None, 3)),
    ("watch_gradient", lambda x: eqg.watch_gradient(x, "x", step=3)),
):
    entry(_name, _op, TREE, plain=lambda x: x, complex_args=(Z,))
entry("nondifferentiable", lambda x, y: x * eqg.nondifferentiable(jax.lax.stop_gradient(y)),
    *(X, X + 0.3), plain=lambda x, y: x * y, smooth=lambda x, y: x * jax.lax.stop_gradient(y))

# ---------------------------------------------------------------- selections


def selections(x, y):
    """Of branches that are infinite or NaN where they are not taken."""
    root = jnp.where(x > 0, jnp.sqrt(x) * y, y**2)
    log = jnp.maximum(jnp.where(x == 0, 0, x * jnp.log(jnp.abs(x))), -3)
    return root, log, jnp.stack([y / x, jnp.exp(1000 * jnp.abs(x))])[0, 1:]


UP = A([False, False, False, True])


def selections_plain(x, y):
    root = jnp.where(UP, jnp.sqrt(jnp.where(UP, x, 1)) * y, y**2)
    log = jnp.where(x == 0, 0, x * jnp.log(jnp.abs(jnp.where(x == 0, 1, x))))
    return root, log, y[1:] / x[1:]


ZERO, Y = A([0.0, -1.2, -0.8, 0.9]), A([1.3, -0.6, 0.9, 0.4])
entry("zero_safe", *(eqg.zero_safe(selections), ZERO - A([0.5, 0, 0, 0]), Y),
    plain=selections_plain, nasty=[Nasty(ZERO, Y)], tolerance32=1e-3, costs=False)
entry("zero_safe: an exact zero wins", eqg.zero_safe(lambda x: jnp.sqrt(x) ** 2, policy="zero"),
    A([0.5, 1.2, 2.0]), plain=lambda x: x, transforms=False,
    nasty=[edge(([0.0, 4.0],), [0.0, 4.0], [0.0, 1.0])])
