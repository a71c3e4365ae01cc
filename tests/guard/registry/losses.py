"""Losses in chunks, against the formulas for all at once."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry, Nasty


A = np.array
NAN = np.nan
rng = np.random.default_rng(1)
loss_of = eqg.losses.linear_cross_entropy
FEATURES, VOCABULARY = 3, 5


def normal(*shape):
    return rng.normal(size=shape)


def cross_entropy(x, weight, labels, bias=None, ignore=-100, smoothing=0.0, z=0.0):
    """Of each token, with all logits."""
    counted = labels != ignore
    label = jnp.where(counted, labels, 0)
    x = jnp.where(counted[..., None], x, 0)
    logits = jnp.einsum("...d,vd->...v", x, weight, precision="highest")
    if bias is not None:
        logits = logits + bias[(None,) * (logits.ndim - 1)]
    lse = jnp.log(jnp.sum(jnp.exp(logits), -1))
    is_label = label[..., None] == np.arange(len(weight))[(None,) * label.ndim]
    target = (1 - smoothing) * is_label.astype(x.dtype) + smoothing / len(weight)
    loss = lse - jnp.sum(target * logits, -1) + z * lse**2
    return jnp.where(counted, loss, 0)


def mean_over(labels, losses, ignore=-100):
    return jnp.sum(losses) / jnp.sum(labels != ignore).astype(losses.dtype)


# Eleven tokens, in chunks of three; three do not count.
LABELS = A([0, 3, -100, 1, 2, 4, -100, 2, 0, 1, -100])
COUNTED = LABELS >= 0
TOKENS = normal(11, FEATURES), normal(VOCABULARY, FEATURES), normal(VOCABULARY)
GARBAGE = np.where(COUNTED[:, None], TOKENS[0], NAN), *TOKENS[1:]
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.02, "chunk": 3}
HALF = normal(700, 2), normal(7, 2), normal(7)
LONG_LABELS = np.where(rng.random(700) < 0.1, -100, rng.integers(0, 7, 700))


def smoothed(x, w, b):
    labels = LABELS if len(x) == 11 else LONG_LABELS
    return cross_entropy(x, w, labels, b, smoothing=0.1, z=0.02)


def labels_of(x):
    return LABELS if len(x) == 11 else LONG_LABELS


entry(
    "losses.linear_cross_entropy",
    lambda x, w, b: loss_of(x, w, labels_of(x), bias=b, **OPTIONS),
    *TOKENS,
    plain=lambda x, w, b: mean_over(labels_of(x), smoothed(x, w, b)),
    garbage=GARBAGE,
    half=HALF,
)
entry(
    "losses.linear_cross_entropy: of each token",
    lambda x, w, b: loss_of(x, w, labels_of(x), bias=b, reduction="none", **OPTIONS),
    *TOKENS,
    plain=smoothed,
    garbage=GARBAGE,
    counts=lambda out: COUNTED,
    half=HALF,
)
# Fifteen tokens in two dimensions, in chunks of four, with labels of eight bits.
SMALL = A([[0, 3, 250, 1, 2], [4, 250, 2, 0, 1], [2, 3, 3, 4, 250]], np.uint8)
TWO_D = normal(3, 5, FEATURES), normal(VOCABULARY, FEATURES)
for _reduction, _chunk in (("sum", 4), ("none", 4), ("mean", None)):
    _name = f"losses.linear_cross_entropy: {_reduction}, without bias, in two dimensions"
    _reduce = {"sum": jnp.sum, "none": lambda x: x, "mean": lambda x: jnp.sum(x) / 12}
    entry(
        _name,
        lambda x, w, r=_reduction, c=_chunk: loss_of(
            x, w, SMALL, ignore_index=250, reduction=r, chunk=c
        ),
        *TWO_D,
        plain=lambda x, w, reduce=_reduce[_reduction]: reduce(
            cross_entropy(x, w, SMALL.astype(int), ignore=250)
        ),
        orders=("value", "jvp", "vjp", "FR"),
        transforms=_reduction != "mean",
    )
entry(
    "losses.linear_cross_entropy: of a batch of weights, and without labels that count",
    lambda x, w: jax.vmap(
        lambda x, w, y: loss_of(x, w, y, chunk=2, ignore_index=4, z_loss=0.1)
    )(x, w, A([[0, 3, 2, 1, 2], [4, 4, 4, 4, 4], [4, 4, 3, 3, 0]])),
    normal(3, 5, FEATURES),
    normal(3, VOCABULARY, FEATURES),
    plain=lambda x, w: jnp.stack(
        [
            jnp.sum(cross_entropy(x[i], w[i], y, ignore=4, z=0.1)) / n
            for i, (y, n) in enumerate(
                ((A([0, 3, 2, 1, 2]), 5), (A([4] * 5), 1), (A([4, 4, 3, 3, 0]), 3))
            )
        ]
    ),
    orders=("value", "vjp"),
    transforms=False,
    costs=False,
)
entry(
    "losses.linear_cross_entropy: labels out of range, large logits",
    lambda x, w: [
        loss_of(x, w, A(y), ignore_index=None, chunk=2, reduction="none")
        for y in ([0, 3, 2], [0, 5, -100])
    ],
    normal(3, FEATURES),
    normal(VOCABULARY, FEATURES),
    plain=lambda x, w: [
        cross_entropy(x, w, A([0, 3, 2])),
        cross_entropy(x, w, A([0, 3, 2])) + A([0, NAN, NAN]).astype(x.dtype),
    ],
    orders=("value",),
    transforms=False,
    nasty=[
        Nasty(  # the logits are 1000 times the columns of the weight
            1000 * np.eye(3),
            A([[1, -1.0, 0.5], [2, 0.0, 0.5], [0, 2.0, 0.5], [-1, 1.0, 0.5], [1, 1, 0.5]]),
            value=[A([1000.0, 1000.0, np.log(5)]), A([1000.0, NAN, NAN])],
        )
    ],
)


def on_two_devices(x, w, b):
    """Two devices with three of the six rows of the weight each."""
    mesh = jax.make_mesh((2,), ("v",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    options = {"axis_name": "v", "chunk": 3, "label_smoothing": 0.1, "z_loss": 0.02}

    def fn(x, w, b):
        labels = jnp.asarray(SHARDED)
        return [loss_of(x, w, labels, bias=b, reduction=r, **options) for r in ("mean", "none")]

    args = spec(), spec("v"), spec("v")
    return jax.shard_map(fn, mesh=mesh, in_specs=args, out_specs=spec())(x, w, b)


SHARDED = A([0, 5, -100, 3, 2, 4, 1])
entry(
    "losses.linear_cross_entropy: a sharded vocabulary",
    on_two_devices,
    normal(7, FEATURES),
    normal(6, FEATURES),
    normal(6),
    plain=lambda x, w, b: [
        jnp.sum(losses := cross_entropy(x, w, SHARDED, b, smoothing=0.1, z=0.02)) / 6,
        losses,
    ],
    orders=("value", "jvp", "vjp"),
    transforms=False,
    batches=False,
    costs=False,
    precisions=("float32",),  # without the leak checker, which finds leaks of `shard_map`
)

# ---------------------------------------------------------------- any loss


class Model(eqx.Module):
    """With a function, a number and an integer, and weights."""

    weight: jax.Array
    bias: jax.Array
    activation: object = jnp.tanh
    power: int = 2

    def __call__(self, x):
        return self.activation(self.weight @ x) + self.bias


def squares(model, xs, ys, scale=1.0):
    out = jax.vmap(model)(xs)
    return scale * jnp.sum((out - ys) ** model.power)


def squares_plain(weight, bias, xs, ys, scale=1.0):
    return scale * jnp.sum((jnp.tanh(xs @ weight.T) + bias[None] - ys) ** 2)


MODEL = normal(2, 3), normal(2)

entry(
    "losses.chunked",
    lambda xs, ys, w, b: eqg.losses.chunked(squares, axis=0, chunk=3)(Model(w, b), xs, ys),
    normal(11, 3),
    normal(11, 2),
    *MODEL,
    plain=lambda xs, ys, w, b: squares_plain(w, b, xs, ys),
    # The sum over all chunks is not zero beside the terms.
    half=(normal(700, 3), 2 + np.abs(normal(700, 2)), *MODEL),
)


def in_a_closure(xs, ys, w, b):
    """A mean, over the last axis of one argument; a key and weights that are not split, and
    a closed-over bias."""

    def loss(xs, extra, ys):
        noise = jr.normal(extra["key"], (2,), xs.dtype)
        out = jnp.tanh(xs.T @ extra["w"].T) + b[None] + noise[None]
        return jnp.mean(extra["scale"] * jnp.sum((out - ys["y"]) ** 2, 1))

    axis = 1, None, {"y": 0, "n": None}
    fn = eqg.losses.chunked(loss, axis=axis, chunk=2, reduction="mean")
    extra = {"w": w, "key": jr.key(2), "scale": 0.6}
    return fn(xs, extra, {"y": ys, "n": 7})


def in_a_closure_plain(xs, ys, w, b):
    noise = jr.normal(jr.key(2), (2,), ys.dtype)
    return squares_plain(w, b + noise, xs.T, ys, 0.6) / len(ys)


entry(
    "losses.chunked: a mean, with a closure",
    in_a_closure,
    normal(3, 7),
    normal(7, 2),
    *MODEL,
    plain=in_a_closure_plain,
    orders=("value", "jvp", "vjp", "FR"),
)
entry(
    "losses.chunked: of a batch of models",
    lambda w, b, xs, ys: jax.vmap(
        lambda w, b: eqg.losses.chunked(squares, (None, 0, 0), 2)(Model(w, b), xs, ys, scale=3)
    )(w, b),
    normal(3, 2, 3),
    normal(3, 2),
    normal(5, 3),
    normal(5, 2),
    plain=lambda w, b, xs, ys: jnp.stack(
        [squares_plain(w[i], b[i], xs, ys, 3) for i in range(3)]
    ),
    orders=("value", "vjp"),
    transforms=False,
)


def moduli(xs, w):
    """Of complex data, with a real weight."""
    return jnp.sum(jnp.abs(jnp.tanh(xs @ w.astype(xs.dtype))) ** 2)


entry(
    "losses.chunked: of complex data",
    lambda xs, w: eqg.losses.chunked(moduli, chunk=2, axis=(0, None))(xs, w),
    normal(5, 2) + 1j * normal(5, 2),
    normal(2),
    plain=moduli,
    orders=("value", "jvp", "vjp"),
    transforms=False,
)
