"""Gradient ops and probes: identities whose derivative is another, in raw JAX."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry, Nasty


A = np.array
X = A([0.5, -1.2, 2.0])
TREE = {"a": A([[0.5, -1.2, 2.0], [0.3, 0.9, -0.4]]), "b": A([[1.7, -0.6, 0.8]])}
Z = A([0.5 - 2.0j, -1.2 + 0.3j, 2.0 + 0.7j])
# Reverse over forward mode is no derivative of one function where the modes differ.
ORDERS = ("value", "jvp", "vjp", "FF", "FR", "RR")


def times(s, t):
    return jax.tree.map(lambda t: s.astype(t.dtype) * t, t)


def backward(rule):
    """The identity whose cotangent is `rule` of the incoming one, in raw JAX."""

    @jax.custom_vjp
    def fn(x, *params):
        return x

    zeros = ft.partial(jax.tree.map, jnp.zeros_like)
    fn.defvjp(lambda x, *p: (x, p), lambda p, ct: (rule(ct, *p), *zeros(p)))
    return fn


def forward(rule):
    """The identity whose tangent is `rule` of the incoming one, in raw JAX."""

    @jax.custom_jvp
    def fn(x, *params):
        return x

    fn.defjvp(lambda primals, ts: (primals[0], rule(ts[0], *primals[1:])))
    return fn


def of_cotangent(op):
    return lambda ct, *params: jax.vjp(lambda x: op(x, *params), ct)[1](ct)[0]


def backward_op(
    name, op, cts, *params, rule, nasty=(), half=None, complex_args=None, **options
):
    """Enter an op, and its backward rule as a function of the cotangent and the parameters."""
    entry(
        name,
        op,
        TREE["a"],
        *params,
        plain=backward(rule),
        forward=lambda x, *_: x,
        orders=ORDERS,
        costs=False,
        **options,
    )
    entry(
        f"{name}: as a function of the cotangent",
        of_cotangent(op),
        cts,
        *params,
        plain=rule,
        orders=("value", "jvp", "vjp", "FR"),
        nasty=nasty,
        half=half,
        complex_args=complex_args,
        transforms=False,
        costs=False,
    )


# ---------------------------------------------------------------- linear in the gradient

STRENGTH = A([[3.0, -0.7, 1.9]])

entry(
    "scale_gradient",
    eqg.scale_gradient,
    TREE,
    STRENGTH,
    plain=forward(lambda t, s: times(s, t)),
    own_rule=True,
    complex_args=(Z, A(1.3 - 0.4j)),
)
entry(
    "reverse_gradient",
    lambda x, s: (eqg.reverse_gradient(x), eqg.reverse_gradient(x, s)),
    X,
    A(0.6),
    plain=lambda x, s: (forward(lambda t: -t)(x), forward(lambda t, s: times(-s, t))(x, s)),
    own_rule=True,
    complex_args=(Z, A(0.6)),
)

MASKS = {"a": A([[True, False, True], [False, True, True]]), "b": False, "c": True}
MASKED = TREE | {"c": A([0.4, -0.9])}


def masked(t):
    return jax.tree.map(lambda m, t: jnp.where(m, t, 0), MASKS, t)


def with_nan(x, mask):
    return np.where(mask, x, np.nan)


entry(
    "mask_gradient",
    lambda x: eqg.mask_gradient(x, MASKS),
    MASKED,
    plain=forward(masked),
    own_rule=True,
    garbage=(jax.tree.map(lambda m, x: with_nan(x, m), MASKS, MASKED),),
    counts=lambda out: jax.tree.map(lambda m, x: np.broadcast_to(m, x.shape), MASKS, out),
    complex_args=({"a": TREE["a"] * (1 - 2j), "b": Z, "c": Z * 1j},),
    costs=False,
)
entry(
    "mask_gradient: a mask that depends on x",
    lambda x: eqg.mask_gradient(x, x < 1),
    X,
    plain=forward(lambda t: t * A([1, 1, 0], "bool").astype(t.dtype)),
    own_rule=True,
    transforms=False,
)
entry(
    "reversal_schedule",
    lambda p, low, high, gamma: (
        eqg.reversal_schedule(p),
        eqg.reversal_schedule(p, low=low, high=high, gamma=gamma),
    ),
    A([0.1, 0.3, 0.75]),
    A(0.2),
    A(1.7),
    A(4.0),
    plain=lambda p, low, high, gamma: (
        2 / (1 + jnp.exp(-10 * p)) - 1,
        low + (high - low) * (2 / (1 + jnp.exp(-gamma * p)) - 1),
    ),
    transforms=False,
)


def over_devices(fn, *args):
    """`fn` on each of two rows, on two devices."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    of_row = lambda *rows: fn(*(r[0] for r in rows))[None]
    return jax.shard_map(of_row, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(
        *args
    )


def over_batch(fn, *args):
    return jax.vmap(fn, axis_name="i")(*args)


def gradient_inside(over):
    """The gradient with respect to a shared weight, which each device takes for itself."""

    def fn(weight, x):
        loss = lambda w, x: jnp.sum(jnp.sin(eqg.psum_gradient(w, "i") * x))
        return over(jax.grad(loss), jnp.broadcast_to(weight[None], x.shape), x)

    return fn


def summed_gradient(weight, x):
    return jnp.broadcast_to(jnp.sum(x * jnp.cos(weight[None] * x), 0)[None], x.shape)


for _name, _over in (("in vmap", over_batch), ("in shard_map", over_devices)):
    entry(
        "psum_gradient" if _over is over_batch else "psum_gradient: in shard_map",
        lambda x, over=_over: over(lambda x: eqg.psum_gradient(x, "i"), x),
        TREE["a"],
        plain=backward(lambda ct: jnp.broadcast_to(jnp.sum(ct, 0)[None], ct.shape)),
        forward=lambda x: x,
        orders=ORDERS,
        transforms=_over is over_batch,
    )
    entry(
        f"psum_gradient: the gradient {_name}",
        gradient_inside(_over),
        X,
        TREE["a"],
        plain=summed_gradient,
        orders=("value", "jvp", "vjp"),
        # JAX's leak checker finds leaks of `shard_map` with a raw `jax.custom_vjp` too.
        precisions=("float64", "float32")[_over is over_devices :],
        transforms=False,
        costs=False,
    )


# ---------------------------------------------------------------- not linear in it

INF, NAN = np.inf, np.nan

backward_op(
    "clip_gradient",
    lambda x, low, high: eqg.clip_gradient(x, low, high),
    TREE,
    A(-0.5),
    A([[1.0, 0.7, 0.3]]),
    rule=lambda ct, low, high: jax.tree.map(
        lambda c: jnp.where(c < low, low, jnp.where(c > high, high, c)), ct
    ),
    nasty=[  # the slope at a bound is one half
        Nasty(A([-0.5, 0.9, 1.0, -2.0]), A(-0.5), A(1.0), cts=[A([0.5, 1, 0.5, 0]), 1.5, 0.5]),
    ],
)
entry(
    "clip_gradient: complex, NaN, or without a bound",
    lambda ct: [
        of_cotangent(lambda x: eqg.clip_gradient(x, low, high))(ct)
        for low, high in ((-0.5, None), (None, 1.0), (-0.5, 1.0))
    ],
    X,
    plain=lambda ct: [jnp.maximum(ct, -0.5), jnp.minimum(ct, 1), jnp.clip(ct, -0.5, 1)],
    orders=("value",),
    transforms=False,
    nasty=[
        Nasty(A([NAN, INF, -INF])),
        Nasty(
            Z,
            value=[
                A([0.5 - 0.5j, -0.5 + 0.3j, 2 + 0.7j]),
                A([0.5 - 2j, -1.2 + 0.3j, 1 + 0.7j]),
                A([0.5 - 0.5j, -0.5 + 0.3j, 1 + 0.7j]),
            ],
        ),
    ],
)


def norm_of(ct, axis=None):
    return jnp.sqrt(jnp.sum(jnp.abs(ct) ** 2, axis, keepdims=axis is not None))


def whole_norm(ct):
    return jnp.sqrt(sum(norm_of(c) ** 2 for c in jax.tree.leaves(ct)))


def to_norm(max_norm, norm):
    return jnp.where(norm > max_norm, max_norm / norm, 1)


LONG = 40 * np.sin(np.arange(1.0, 1500.0))

backward_op(
    "clip_gradient_norm",
    eqg.clip_gradient_norm,
    TREE,
    A(0.7),
    rule=lambda ct, m: jax.tree.map(lambda c: times(to_norm(m, whole_norm(ct)), c), ct),
    half=(LONG, A(0.7)),
    complex_args=({"a": TREE["a"] * (1 - 2j), "b": Z[None]}, A(0.7)),
    nasty=[
        Nasty(np.zeros(3), A(0.7), value=[np.zeros(3)], cts=[np.ones(3), 0.0]),
        # Where the norm is the largest one, as the identity.
        Nasty(A([3.0, 4.0]), A(5.0), value=[A([3.0, 4.0])], cts=[np.ones(2), 0.0]),
        Nasty(A([3e200, -4e200]), A(0.5), value=[A([0.3, -0.4])], cts=[np.zeros(2), -0.2]),
    ],
)
entry(
    "clip_gradient_norm: not finite",
    of_cotangent(lambda x: eqg.clip_gradient_norm(x, 0.5)),
    X,
    plain=lambda ct: ct * 0.5 / norm_of(ct),
    orders=("value",),
    transforms=False,
    nasty=[
        Nasty(A([NAN, 2.0]), value=[A([NAN, 2.0])]),
        Nasty(A([INF, 2.0]), value=[A([INF, 2.0])]),
    ],
)
backward_op(
    "clip_gradient_norm: along an axis",
    lambda x, m: eqg.clip_gradient_norm(x, m, axis=-1),
    TREE,
    A(1.6),
    rule=lambda ct, m: jax.tree.map(lambda c: c * to_norm(m, norm_of(c, -1)), ct),
    transforms=False,
)
backward_op(
    "normalize_gradient",
    lambda x: eqg.normalize_gradient(x),
    TREE,
    rule=lambda ct: jax.tree.map(lambda c: times(1 / whole_norm(ct), c), ct),
    half=(LONG,),
    complex_args=({"a": TREE["a"] * (1 - 2j), "b": Z[None]},),
    nasty=[
        Nasty(A([3e-200, -4e-200]), value=[A([0.6, -0.8])], cts=[A([2.24e199, 1.68e199])]),
        Nasty(np.zeros(3), value=[np.zeros(3)], cts=[np.ones(3)]),
        Nasty(A([NAN, 2.0]), value=[A([NAN, NAN])], cts=[A([NAN, NAN])]),
    ],
)
backward_op(
    "normalize_gradient: with eps, along an axis",
    lambda x, eps: eqg.normalize_gradient(x, axis=0, eps=eps),
    TREE,
    A(0.3),
    rule=lambda ct, eps: jax.tree.map(lambda c: c / (norm_of(c, 0) + eps), ct),
    transforms=False,
)
backward_op(
    "zero_nonfinite_gradient",
    eqg.zero_nonfinite_gradient,
    TREE,
    rule=lambda ct: ct,
    nasty=[
        Nasty(A([NAN, 2.0, INF, -INF]), value=[A([0, 2, 0, 0])], cts=[A([0, 1, 0, 0])]),
        Nasty(
            A([complex(1, NAN), 2 - 1j, complex(INF, 1)]),
            value=[A([0, 2 - 1j, 0])],
            cts=[A([0, 1 + 0j, 0])],
        ),
    ],
)


def with_noise(ct, stddev):
    """From the standard normal distribution, for each leaf with a key of its own."""
    leaves, treedef = jax.tree.flatten(ct)
    keys = jr.split(jr.key(5), len(leaves))
    noise = [jr.normal(k, c.shape, c.dtype) for k, c in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(
        treedef, [c + stddev * n for c, n in zip(leaves, noise, strict=True)]
    )


backward_op(
    "noise_gradient",
    lambda x, stddev: eqg.noise_gradient(x, key=jr.key(5), stddev=stddev),
    TREE,
    A([[0.5, 2.0, 0.1]]),
    rule=with_noise,
    transforms=False,
)

NARROW = (jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)
# Halfway cases, subnormal numbers, overflows.
ROUNDED = A([1 / 3, 1.0625, 1.1875, 3e-3, 2e-6, 1.3e-7, 460.0, 7e4, -1e6, INF, NAN, -0.7])


def straight_through(value):
    """The value with the derivative of the identity."""
    return lambda x: jax.lax.stop_gradient(value(x) - x) + x


def cast_and_back(dtype, x):
    return jax.lax.optimization_barrier(x.astype(dtype)).astype(x.dtype)


backward_op(
    "cast_gradient",
    lambda x: eqg.cast_gradient(x, "bfloat16"),
    X,
    rule=straight_through(ft.partial(cast_and_back, "bfloat16")),
)
with np.errstate(over="ignore", invalid="ignore"):
    entry(
        "cast_gradient: to each dtype",
        lambda ct: [
            jax.vjp(lambda x: eqg.cast_gradient(x, dtype), ct)[1](ct)[0] for dtype in NARROW
        ],
        X,
        plain=lambda ct: [cast_and_back(dtype, ct) for dtype in NARROW],
        smooth=lambda ct: [ct] * 4,
        orders=("value", "vjp"),
        transforms=False,
        nasty=[
            Nasty(
                ROUNDED,
                value=[ROUNDED.astype(d).astype(float) for d in NARROW],
                cts=[np.full(12, 4)],
            ),
            Nasty(
                Z,
                value=[
                    Z.real.astype(d).astype(float) + 1j * Z.imag.astype(d).astype(float)
                    for d in NARROW
                ],
                cts=[np.full(3, 4 + 0j)],
            ),
        ],
    )


# ---------------------------------------------------------------- other functions


def half_of_tanh(ct, s):
    """Of one part; that of the other is zero."""
    return {"a": jnp.tanh(s * ct["a"]), "b": jnp.zeros_like(ct["b"])}


backward_op(
    "on_backward",
    lambda x, s: eqg.on_backward(
        x, lambda ct: {"a": jnp.tanh(s * ct["a"]), "b": None if "b" in ct else 1}
    ),
    TREE,
    A(0.8),
    rule=half_of_tanh,
)
entry(
    "on_forward",
    lambda x: eqg.on_forward(x, lambda x: {"a": jnp.round(x["a"]), "b": 3 * x["b"]}),
    TREE,
    plain=lambda x: {"a": jnp.rint(x["a"]), "b": x["b"] + 2 * x["b"]},
    smooth=lambda x: x,
    complex_args=({"a": Z, "b": Z * 1j},),
)
entry(
    "probe",
    lambda x, slot: eqg.probe((x, x["a"]), ({"a": slot, "b": None}, None)),
    TREE,
    np.full((2, 3), 0.3),  # the value of a slot is ignored
    plain=lambda x, slot: (x, x["a"]),
    smooth=lambda x, slot: (x | {"a": x["a"] + slot}, x["a"]),
    complex_args=({"a": Z, "b": Z * 1j}, Z * 3),
)


def statistics(ct):
    """Over two steps of a scan, whose probes are passed one half and three halves of `ct`."""

    def steps(slot, x):
        step = lambda x, s: (jax.tree.map(lambda leaf: s * leaf, eqg.probe(x, slot)), None)
        return jax.lax.scan(step, x, jnp.asarray([3, 0.5], ct["b"].dtype))[0]

    slot = eqx.filter_vjp(steps, eqg.GradientStatistics(), ct)[1](ct)[0]
    return slot.norm, slot.max, slot.nonfinite, slot.steps, slot.mean_norm, slot.mean_max


def statistics_plain(ct):
    leaves = jnp.concatenate([jnp.ravel(c) for c in jax.tree.leaves(ct)])
    norm, largest = jnp.sqrt(jnp.sum(leaves**2)), jnp.max(jnp.abs(leaves))
    zero = jnp.zeros_like(norm)
    return 2 * norm, 2 * largest, zero, zero + 2, norm, largest


entry(
    "probe: statistics",
    statistics,
    TREE,
    plain=statistics_plain,
    orders=("value", "jvp", "vjp"),
    transforms=False,
    nasty=[
        Nasty(
            {"a": A([3.0, NAN, -4.0, INF]), "b": A([-INF])},
            value=[10, 8, 6, 2, 5, 4],
            cts=[A([1.8, 0, -5.4, 0]), np.zeros(1)],
        )
    ],
)


def ignore(*_):
    pass


entry(
    "tap_gradient",
    lambda x: eqg.tap_gradient(x, ignore, 3),
    TREE,
    plain=lambda x: x,
    complex_args=(Z,),
)
entry(
    "watch_gradient",
    lambda x: eqg.watch_gradient(x, "x", step=3),
    TREE,
    plain=lambda x: x,
    complex_args=(Z,),
)
entry(
    "nondifferentiable",
    lambda x, y: x * eqg.nondifferentiable(jax.lax.stop_gradient(y)),
    X,
    X + 0.3,
    plain=lambda x, y: x * jax.lax.stop_gradient(y),
)


# ---------------------------------------------------------------- selections


def selections(x, y):
    """Of branches that are infinite or NaN where they are not taken."""
    root = jnp.where(x > 0, jnp.sqrt(x) * y, y**2)
    log = jnp.maximum(jnp.where(x == 0, 0, x * jnp.log(jnp.abs(x))), -3)
    return root, log, jnp.stack([y / x, jnp.exp(1000 * jnp.abs(x))])[0, 1:]


def selections_plain(x, y):
    up = np.array([0, 0, 0, 1], bool)
    root = jnp.where(up, jnp.sqrt(jnp.where(up, x, 1)) * y, y**2)
    log = jnp.where(x == 0, 0, x * jnp.log(jnp.abs(jnp.where(x == 0, 1, x))))
    return root, log, y[1:] / x[1:]


def in_loops(x, y):
    """Also of `cond`, which is a `select` under `vmap`."""
    step = lambda c, xy: (c + jnp.where(xy[0] > 0, xy[1] / xy[0], xy[1]), c * xy[1])
    root = lambda x, y: jax.lax.cond(x > 0, lambda: jnp.sqrt(x) * y, lambda: y)
    total, sums = jax.lax.scan(step, jnp.zeros((), x.dtype), (x, y))
    return total, sums, jax.vmap(root)(x, y)


def in_loops_plain(x, y):
    up = np.array([0, 0, 0, 1], bool)
    taken = jnp.where(up, x, 1)
    before = jnp.cumsum(y / taken) - y / taken
    return jnp.sum(y / taken), before * y, jnp.sqrt(taken) * y


ZERO = A([0.0, -1.2, -0.8, 0.9])

entry(
    "zero_safe",
    eqg.zero_safe(selections),
    A([-0.5, -1.2, -0.8, 0.9]),
    Y := A([1.3, -0.6, 0.9, 0.4]),
    plain=selections_plain,
    tolerance32=1e-3,
    nasty=[Nasty(ZERO, Y)],
    costs=False,
)
entry(
    "zero_safe: in loops",
    eqg.zero_safe(in_loops),
    ZERO - A([0.5, 0, 0, 0]),
    Y,
    plain=in_loops_plain,
    orders=("value", "jvp", "vjp"),
    transforms=False,
    nasty=[Nasty(ZERO, Y)],
    costs=False,
)
entry(
    "zero_safe: an exact zero wins",
    eqg.zero_safe(lambda x: jnp.sqrt(x) ** 2 * jnp.array([2, 1, 1], x.dtype), policy="zero"),
    A([0.5, 1.2, 2.0]),
    plain=lambda x: x * A([2, 1, 1]).astype(x.dtype),
    transforms=False,
    nasty=[Nasty(A([0.0, 4.0, 1.0]), cts=[A([0.0, 1.0, 1.0])])],
)


def after_a_bounce(height, gravity, restitution):
    """The state at a second, of a ball that was dropped."""

    t = jnp.sqrt(2 * height / gravity)
    y = {"height": jnp.zeros_like(t), "velocity": -jnp.sqrt(2 * height * gravity)}

    def reset(t, y):
        return {"height": y["height"], "velocity": -restitution * y["velocity"] + 0.1 * t}

    def field(t, y):
        return {"height": y["velocity"], "velocity": -gravity}

    time, y = eqg.jump(reset, y, field, t)
    rest = 1 - time
    return (
        y["height"] + y["velocity"] * rest - gravity * rest**2 / 2,
        y["velocity"] - gravity * rest,
    )


def after_a_bounce_closed_form(height, gravity, restitution):
    t = jnp.sqrt(2 * height / gravity)
    velocity = restitution * jnp.sqrt(2 * height * gravity) + 0.1 * t
    rest = 1 - t
    return velocity * rest - gravity * rest**2 / 2, velocity - gravity * rest


entry(
    "jump",
    after_a_bounce,
    A(3.0),
    A(9.8),
    A(0.8),
    plain=after_a_bounce_closed_form,
)


def new_field(position, speed):
    """A particle that is faster beyond one, with no reset; one part of the state is fixed."""
    t = (1 - position) / speed
    time, y = eqg.jump(
        None, (jnp.ones_like(t), position), lambda t, y: (2 * t * speed, None), t
    )
    return y[0] + speed * (4 - time**2), y[1]


entry(
    "jump: no reset",
    new_field,
    A(0.3),
    A(0.5),
    plain=lambda p, speed: (1 + speed * (4 - ((1 - p) / speed) ** 2), p),
    transforms=False,
)
