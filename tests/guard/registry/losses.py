"""Losses in chunks, against the formulas for all at once."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry, Nasty, ORDERS


# A line has as many arguments as there is room for.
# fmt: off
A, NAN = np.array, np.nan
rng = np.random.default_rng(1)
normal = lambda *shape: rng.normal(size=shape)
loss_of, chunked = eqg.losses.linear_cross_entropy, eqg.losses.chunked
CE = "losses.linear_cross_entropy"
VJP, FIRST, SHORT = ("value", "vjp"), ("value", "jvp", "vjp"), ("value", "jvp", "vjp", "FR")
ONLY = {"transforms": False, "costs": False}


def cross_entropy(
    x, weight, labels, bias=None, ignore=-100, smoothing=0.0, z=0.0, of_class=None, cap=None
):
    """The loss of each token, with all logits."""
    if labels.ndim == x.ndim:  # probabilities
        counted, target = np.ones(x.shape[:-1], bool), labels.astype(x.dtype)
    else:
        counted = labels != ignore
        target = labels[..., None] == np.arange(len(weight))[(None,) * labels.ndim]
    x = jnp.where(counted[..., None], x, 0)
    logits = jnp.einsum("...d,vd->...v", x, weight, precision="highest")
    if bias is not None:
        logits = logits + bias[(None,) * (logits.ndim - 1)]
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    lse = jnp.log(jnp.sum(jnp.exp(logits), -1))
    target = (1 - smoothing) * jnp.asarray(target, x.dtype) + smoothing / len(weight)
    if of_class is not None:
        target = target * of_class.astype(x.dtype)[(None,) * (target.ndim - 1)]
    loss = jnp.sum(target * (lse[..., None] - logits), -1) + z * lse**2
    return jnp.where(counted, loss, 0)


# Eleven tokens, in chunks of three; three do not count. And 700, whose sums are long.
LABELS = A([0, 3, -100, 1, 2, 4, -100, 2, 0, 1, -100])
LONG_LABELS = np.where(rng.random(700) < 0.1, -100, rng.integers(0, 7, 700))
TOKENS = normal(11, 3), normal(5, 3), normal(5)
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.02, "chunk": 3}
labels_of = lambda x: LABELS if len(x) == 11 else LONG_LABELS
smoothed = lambda x, w, b: cross_entropy(x, w, labels_of(x), b, smoothing=0.1, z=0.02)


for _reduction, _plain in (
    ("mean", lambda x, w, b: jnp.sum(smoothed(x, w, b)) / int(np.sum(labels_of(x) >= 0))),
    ("none", smoothed),
):
    entry(
        CE if _reduction == "mean" else f"{CE}: of each token",
        lambda x, w, b, r=_reduction: loss_of(
            x, w, labels_of(x), bias=b, reduction=r, **OPTIONS
        ),
        *TOKENS,
        plain=_plain,
        garbage=(np.where(LABELS[:, None] < 0, NAN, TOKENS[0]), *TOKENS[1:]),
        counts=(lambda out: LABELS >= 0) if _reduction == "none" else None,
        half=(normal(700, 2), normal(7, 2), normal(7)),
        orders=ORDERS if _reduction == "mean" else SHORT,
        costs=_reduction == "mean",
        half_as_plain=False,  # a loss is in single precision
    )
# Fifteen tokens in two dimensions, in chunks of four, with labels of eight bits.
SMALL = A([[0, 3, 250, 1, 2], [4, 250, 2, 0, 1], [2, 3, 3, 4, 250]], np.uint8)
of_small = ft.partial(cross_entropy, labels=SMALL.astype(int), ignore=250)
for _reduction, _chunk, _rows, _reduce in (
    ("sum", 4, 5, jnp.sum),
    ("none", 4, 5, lambda x: x),
    # Eight bits can't hold every index of the vocabulary.
    ("mean", None, 300, lambda x: jnp.sum(x) / 12),
):
    _options = {"ignore_index": 250, "reduction": _reduction, "chunk": _chunk}
    entry(f"{CE}: {_reduction}, without bias, in two dimensions",
        lambda x, w, options=_options: loss_of(x, w, SMALL, **options),
        *(normal(3, 5, 3), normal(_rows, 3)),
        plain=lambda x, w, reduce=_reduce: reduce(of_small(x, w)), orders=SHORT,
        transforms=_reduction != "mean")
BATCH = A([[0, 3, 2, 1, 2], [4, 4, 4, 4, 4], [4, 4, 3, 3, 0]])
of_rows = lambda x, w, b, y: loss_of(x, w, y, bias=b, chunk=2, ignore_index=4, z_loss=0.1)
of_rows_plain = lambda x, w, b, y: jnp.sum(cross_entropy(x, w, y, b, ignore=4, z=0.1))
for _of, _axes, _shapes in (
    ("weights", (0, 0, None, 0), ((3, 5, 3), (3, 5, 3), (5,))),
    ("biases", (0, None, 0, 0), ((3, 5, 3), (5, 3), (3, 5))),
):
    entry(f"{CE}: of a batch of {_of}, and without labels that count",
        lambda x, w, b, axes=_axes: jax.vmap(of_rows, axes)(x, w, b, BATCH),
        *(normal(*shape) for shape in _shapes), plain=lambda x, w, b, axes=_axes: (
            jax.vmap(of_rows_plain, axes)(x, w, b, BATCH) / A([5, 1, 3]).astype(x.dtype)
        ), orders=VJP, **ONLY)
# The logits are 1000 times the columns of the weight, and two labels are out of range.
WEIGHT = A([[1, -1.0, 0.5], [2, 0.0, 0.5], [0, 2.0, 0.5], [-1, 1.0, 0.5], [1, 1, 0.5]])
for _labels, _losses in (
    ([0, 3, 2], [1000.0, 1000.0, np.log(5)]), ([0, 5, -100], [1000.0, NAN, NAN]),
):
    wrong = np.where(A(_losses) < np.inf, 0, NAN)
    args = {"labels": A(_labels), "ignore": None}
    entry(f"{CE}: large logits, and labels {_labels}", lambda x, w, y=args["labels"]: loss_of(
            x, w, y, ignore_index=None, chunk=2, reduction="none"
        ), *(normal(3, 3), normal(5, 3)), plain=lambda x, w, args=args, wrong=wrong: (
            cross_entropy(x, w, **args) + wrong.astype(x.dtype)
        ), orders=("value",), nasty=[Nasty(1000 * np.eye(3), WEIGHT, value=[A(_losses)])],
        **ONLY)
# As in PyTorch and Liger: a mean is divided by the class weights of the labels, the z-loss by
# the number of tokens.
OF_CLASS, SOFT = A([0.3, 1.7, 0.6, 0.0, 1.1]), rng.dirichlet(np.ones(5), 11)
for _name, _labels, _total in (
    ("class weights and a soft cap", LABELS, float(OF_CLASS[LABELS[LABELS >= 0]].sum())),
    ("probabilities", SOFT, 11),
):
    _counted = int(np.sum(LABELS >= 0)) if _labels is LABELS else 11

    def _all_terms(x, w, b, y=_labels, total=_total, n=_counted):
        of_class = cross_entropy(x, w, y, b, smoothing=0.1, of_class=OF_CLASS, cap=1.5)
        z = cross_entropy(x, w, y, b, z=0.02, of_class=0 * OF_CLASS, cap=1.5)
        z = jnp.sum(z) / n
        return jnp.sum(of_class) / total + z, jax.lax.stop_gradient(z)

    entry(f"{CE}: {_name}", lambda x, w, b, y=_labels: loss_of(
            x, w, y, bias=b, class_weight=OF_CLASS, soft_cap=1.5, return_z_loss=True, **OPTIONS
        ), *TOKENS, plain=_all_terms, orders=SHORT, costs=False)
SHARDED = A([0, 5, -100, 3, 2, 4, 1])


def on_two_devices(x, w, b):
    """Each of two devices has three of the six rows of the weight."""
    mesh = jax.make_mesh((2,), ("v",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def fn(x, w, b):
        fn = ft.partial(loss_of, x, w, jnp.asarray(SHARDED), bias=b, axis_name="v", **OPTIONS)
        return fn(), fn(reduction="none")

    in_specs = spec(), spec("v"), spec("v")
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=spec())(x, w, b)


def sharded_plain(x, w, b):
    losses = cross_entropy(x, w, SHARDED, b, smoothing=0.1, z=0.02)
    return jnp.sum(losses) / 6, losses


entry(
    f"{CE}: a sharded vocabulary",
    *(jax.jit(on_two_devices), normal(7, 3), normal(6, 3), normal(6)),
    plain=sharded_plain,
    orders=FIRST,
    precisions=("float32",),  # without the leak checker, which finds leaks of `shard_map`
    **ONLY,
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
    return scale * jnp.sum((jax.vmap(model)(xs) - ys) ** model.power)


def squares_plain(weight, bias, xs, ys, scale=1.0):
    return scale * jnp.sum((jnp.tanh(xs @ weight.T) + bias[None] - ys) ** 2)


MODEL = normal(2, 3), normal(2)
entry(
    "losses.chunked",
    lambda xs, ys, w, b: chunked(squares, axis=0, chunk=3)(Model(w, b), xs, ys),
    *(normal(11, 3), normal(11, 2), *MODEL),
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

    fn = chunked(loss, axis=(1, None, {"y": 0, "n": None}), chunk=2, reduction="mean")
    return fn(xs, {"w": w, "key": jr.key(2), "scale": 0.6}, {"y": ys, "n": 7})


def in_a_closure_plain(xs, ys, w, b):
    noise = jr.normal(jr.key(2), (2,), ys.dtype)
    return squares_plain(w, b + noise, xs.T, ys, 0.6) / len(ys)


entry("losses.chunked: a mean, with a closure",
    *(in_a_closure, normal(3, 7), normal(7, 2), *MODEL), plain=in_a_closure_plain, orders=SHORT,
    draws=True, costs=False)
