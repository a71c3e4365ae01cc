"""Losses in chunks against Optax, and against autodiff, on all logits at once."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from eqx_grads.losses import chunked, linear_cross_entropy
from jax.sharding import AxisType, PartitionSpec as Spec

from .helpers import assert_close, temp_bytes


LABELS = jnp.array([[0, 3, -100], [1, 2, 6]])


def sample(getkey, dtype=None):
    """`x`, the weight and the bias of six tokens and a vocabulary of seven."""
    shapes = (2, 3, 4), (7, 4), (7,)
    return tuple(jr.normal(getkey(), shape, dtype or jnp.zeros(()).dtype) for shape in shapes)


def ours(x, weight, bias, labels=LABELS, **options):
    return linear_cross_entropy(x, weight, labels, bias=bias, **{"chunk": 2, **options})


def plain(
    x,
    weight,
    bias,
    labels=LABELS,
    label_smoothing=0.0,
    z_loss=0.0,
    reduction="mean",
    chunk=None,
):
    """Optax on all logits."""
    del chunk
    logits = jnp.einsum("...d,vd->...v", x, weight) + bias[(None,) * (x.ndim - 1)]
    targets = optax.losses.smooth_labels(
        jax.nn.one_hot(labels, len(weight), dtype=logits.dtype), label_smoothing
    )
    losses = optax.losses.softmax_cross_entropy(logits, targets)
    losses = losses + z_loss * jax.nn.logsumexp(logits, -1) ** 2
    losses = jnp.where(labels >= 0, losses, 0)
    if reduction == "none":
        return losses
    total = jnp.sum(losses)
    return total if reduction == "sum" else total / jnp.sum(labels >= 0, dtype=total.dtype)


def test_vmap_of_labels(getkey):
    """Also in a batch of batches, of which the inner one has the same `x`."""
    x, weight, bias = sample(getkey)
    labels = jr.randint(getkey(), (2, 3, 2, 3), 0, 7)

    def loss(fn, x, weight):
        of_labels = lambda x, labels: fn(x, weight, bias, labels)
        of_batch = jax.vmap(jax.vmap(of_labels, (None, 0)))
        return jnp.sum(jnp.sin(of_batch(jnp.stack([x, -x]), labels)))

    got, expected = [
        jax.jit(jax.grad(ft.partial(loss, fn), (0, 1)))(x, weight) for fn in (ours, plain)
    ]
    assert_close(got, expected)


@pytest.mark.slow
def test_a_sum_in_half_precision_does_not_overflow():
    """The gradient of the weight is summed in single precision, the loss too."""
    x, weight = jnp.ones((4096, 2), jnp.float16), jnp.zeros((2, 2), jnp.float16)
    labels = jnp.zeros(4096, int)
    fn = lambda w: linear_cross_entropy(64 * x, w, labels, chunk=16, reduction="mean")
    assert_close(jax.grad(fn)(weight), jnp.array([[-32.0] * 2, [32.0] * 2], jnp.float16))
    total = linear_cross_entropy(x, weight, labels, chunk=16, reduction="sum")
    assert_close(total / 4096, jnp.log(jnp.float32(2)))


@pytest.mark.slow
def test_mixed_dtypes(getkey):
    x, weight, bias = sample(getkey, jnp.bfloat16)
    master = weight.astype(jnp.float32)
    grads = jax.grad(ours, (0, 1, 2))(x, master, bias)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32, jnp.bfloat16]
    expected = jax.grad(plain, 1)(x.astype(jnp.float32), master, bias.astype(jnp.float32))
    assert_close(grads[1], expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_token_counts(reduction, getkey):
    args = sample(getkey)
    fn = lambda *a: jnp.sum(ours(*a, jnp.full((2, 3), -100), reduction=reduction))
    assert_close(jax.value_and_grad(fn, (0, 1, 2))(*args), (0.0, tuple(0 * a for a in args)))


@pytest.mark.thorough
def test_which_labels_are_ignored(getkey):
    args = sample(getkey)
    labels = jr.randint(getkey(), (2, 3), 0, 7).at[0, 0].set(4)
    kept = jnp.where(labels == 4, -1, labels)
    assert_close(ours(*args, labels, ignore_index=4), plain(*args, kept))
    expected = plain(*args, labels)
    assert_close(ours(*args, labels, ignore_index=None), expected)
    for dtype in (jnp.uint8, jnp.int8, jnp.uint32):
        assert_close(ours(*args, labels.astype(dtype)), expected)


@pytest.mark.parametrize("label", [7, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_label_out_of_range_gives_nan(label, reduction, getkey):
    x, weight, bias = sample(getkey)
    labels = LABELS.at[0, 0].set(label)
    losses = ours(x, weight, bias, labels, reduction="none")
    assert jnp.array_equal(jnp.isnan(losses), jnp.zeros((2, 3), bool).at[0, 0].set(True))
    fn = lambda *args: jnp.sum(ours(*args, labels, reduction=reduction))
    value, (ct_x, ct_weight, _) = jax.value_and_grad(fn, (0, 1, 2))(x, weight, bias)
    assert jnp.isnan(value)
    assert jnp.all(jnp.isnan(ct_weight))
    assert jnp.all(jnp.isnan(ct_x[0, 0]))
    assert jnp.all(jnp.isfinite(ct_x[1]))


def test_debug_nans_stops_at_a_label_out_of_range(getkey):
    args = sample(getkey)
    with jax.debug_nans(True):
        ours(*args)
        with pytest.raises(FloatingPointError, match="nan"):
            ours(*args, LABELS + 1)


def test_ignore_index_none_has_no_default():
    """-100 is out of range then, as any other negative label."""
    fn = ft.partial(linear_cross_entropy, jnp.ones(2), jnp.ones((3, 2)), jnp.array(-100))
    assert jnp.isnan(fn(ignore_index=None))
    assert fn() == 0


def test_a_small_loss_is_exact():
    """Of a token that is predicted with near certainty, to the last digits."""
    weight = jnp.array([[0.0], [1.0]])
    for x in (5.0, 12.0, 30.0, 80.0):
        loss, grad = jax.value_and_grad(linear_cross_entropy)(
            jnp.array([x]), weight, jnp.array(1)
        )
        expected = np.log1p(np.exp(-x))
        # What is left of `1 + exp(-x)` in the dtype.
        assert abs(float(loss) - expected) <= 2 * float(jnp.finfo(loss.dtype).eps)
        assert abs(float(grad[0]) + 1 / (1 + np.exp(x))) <= float(jnp.finfo(loss.dtype).eps)
        assert loss >= 0


@pytest.mark.thorough
def test_masked_vocabulary(getkey):
    """A bias of minus infinity removes an entry, and large logits do not overflow."""
    x, weight, bias = sample(getkey)
    labels = jnp.where(LABELS == 6, 5, LABELS)
    masked = bias.at[6].set(-jnp.inf)
    got = jax.value_and_grad(ours, (0, 1, 2))(x, weight, masked, labels)
    expected = jax.value_and_grad(plain, (0, 1, 2))(x, weight[:6], bias[:6], labels)
    assert_close(jax.tree.map(lambda g: g[:6], got[1][1:]), expected[1][1:])
    assert_close((got[0], got[1][0]), (expected[0], expected[1][0]))
    assert not jnp.any(got[1][1][6])
    large = jax.value_and_grad(ours, (0, 1, 2))(1e30 * x, weight, bias)
    assert jax.tree.all(jax.tree.map(lambda g: jnp.all(jnp.isfinite(g)), large))


@pytest.mark.slow
def test_numpy_arrays_and_plain_labels(getkey):
    x, weight, bias = map(np.asarray, sample(getkey))
    assert_close(ours(x, weight, bias, np.asarray(LABELS)), plain(x, weight, bias))
    assert_close(
        linear_cross_entropy(x[0, 0], weight, 3, bias=bias),
        plain(jnp.asarray(x[0, 0]), weight, bias, jnp.array(3)),
    )


X, W, Y = jnp.ones((3, 2)), jnp.ones((4, 2)), jnp.zeros(3, int)


@pytest.mark.parametrize(
    ("args", "options", "match"),
    [
        ((X, W.T, Y), {}, r"do not fit together(?s:.*)`weight` is float..\[2,4\]"),
        ((X, W, Y[:2]), {}, "`labels` is int..\\[2\\]"),
        ((X, W, Y), {"bias": jnp.ones(2)}, r"`bias` is float..\[2\]"),
        ((X, W[:0], Y), {}, "do not fit together"),
        ((jnp.ones(()), W, jnp.array(0)), {}, "do not fit together"),
        (
            (X, W, Y.astype(float)),
            {},
            "do not fit together(?s:.*)or probabilities",
        ),
        ((Y, W, Y), {}, "`x` is int"),
        ((X, W.astype(complex), Y), {}, "complex numbers(?s:.*)`weight`"),
        ((X, W, Y), {"chunk": 0}, "`chunk` of(?s:.*)is not an integer of at least 1"),
        ((X, W, Y), {"ignore_index": True}, "`ignore_index` of(?s:.*)is not an integer"),
        ((X, W, Y), {"label_smoothing": 1.5}, "`label_smoothing`(?s:.*)from zero to one"),
        ((X, W, Y), {"label_smoothing": jnp.nan}, "`label_smoothing`"),
        ((X, W, Y), {"z_loss": -1.0}, "`z_loss`"),
        ((X, W, Y), {"reduction": "average"}, "`reduction`(?s:.*)'mean', 'sum', 'none'"),
    ],
)
def test_errors(args, options, match):
    with pytest.raises(eqg.RuleError, match=match):
        linear_cross_entropy(*args, **options)


# Over several devices.


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_shard_map(reduction, check_vma, getkey):
    """Each device has a part of the batch, and all have the weights."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    x, weight, bias = jr.normal(getkey(), (16, 4)), *sample(getkey)[1:]
    labels = jr.randint(getkey(), (16,), 0, 7)

    def local(x, weight, bias, labels):
        return jnp.sum(ours(x, weight, bias, labels, reduction=reduction))[None]

    def loss(*args):
        specs = (Spec("i"), Spec(), Spec(), Spec("i"))
        sharded = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=Spec("i"), check_vma=check_vma
        )
        return jnp.sum(sharded(*args))

    expected = jax.grad(ft.partial(plain, reduction="sum"), (0, 1, 2))(x, weight, bias, labels)
    got = jax.jit(jax.grad(loss, (0, 1, 2)))(x, weight, bias, labels)
    assert_close(got, expected)


# Any loss that is a sum over an axis.


def squares(model, xs, ys):
    weight, bias = model
    return jnp.sum(jnp.tanh(xs @ weight + bias - ys) ** 2)


def regression(getkey, n=7):
    model = jr.normal(getkey(), (3,)), jr.normal(getkey())
    return model, jr.normal(getkey(), (n, 3)), jr.normal(getkey(), (n,))


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked(chunk, getkey):
    args, tangents = regression(getkey), regression(getkey)
    fns = chunked(squares, chunk=chunk), squares

    def everything(fn, args, tangents):
        grad = jax.grad(fn, (0, 1, 2))
        norm = lambda *args: sum(jnp.sum(g**2) for g in jax.tree.leaves(grad(*args)))
        return (
            jax.jvp(fn, args, tangents),
            grad(*args),
            jax.jvp(grad, args, tangents)[1],
            jax.grad(norm, (0, 1, 2))(*args),
        )

    got, expected = jax.jit(lambda *a: [everything(fn, *a) for fn in fns])(args, tangents)
    assert_close(got, expected, eps=200)


@pytest.mark.slow
def test_chunked_mean_and_other_axes(getkey):
    """Trees of axes, an argument that is not split, integers, keys, `None` and a keyword."""
    xs, weight = jr.normal(getkey(), (3, 7)), jr.normal(getkey(), (3,))
    labels = jnp.arange(7)

    def loss(data, weight, scale, none, *, power):
        assert none is None
        noise = jax.vmap(lambda key: jr.normal(key, ()))(data["keys"])
        return jnp.mean(
            scale * (weight @ data["xs"] + data["labels"].astype(noise.dtype) + noise) ** power
        )

    axis = ({"xs": -1, "labels": 0, "keys": 0}, None, None, None)
    data = {"xs": xs, "labels": labels, "keys": jr.split(jr.key(0), 7)}
    fn = chunked(loss, axis, chunk=2, reduction="mean")
    grad = lambda fn: eqx.filter_value_and_grad(
        lambda args: fn({**data, "xs": args[0]}, args[1], 2.0, None, power=2)
    )((xs, weight))
    assert_close(grad(fn), grad(loss), eps=100)
    of_power = lambda fn: jax.grad(lambda p: fn(data, weight, 2.0, None, power=p))(2.0)
    square = lambda d, w, s, n, *, power: loss(d, w, s, n, power=2) * power
    assert_close(of_power(chunked(square, axis, 2, reduction="mean")), of_power(square), eps=50)


@pytest.mark.slow
def test_chunked_module_closure_and_method(getkey):
    model, xs, ys = regression(getkey)

    class Squares(eqx.Module):
        model: tuple

        def __call__(self, xs, ys):
            return squares(self.model, xs, ys)

        @ft.partial(chunked, axis=(None, 0, 0), chunk=2)
        def method(self, xs, ys):
            return self(xs, ys)

    expected = jax.value_and_grad(squares)(model, xs, ys)
    loss = Squares(model)
    got = eqx.filter_value_and_grad(lambda loss: chunked(loss, (0, 0), 2)(xs, ys))(loss)
    assert_close((got[0], got[1].model), expected)
    got = eqx.filter_value_and_grad(lambda loss: loss.method(xs, ys))(loss)
    assert_close((got[0], got[1].model), expected)
    closed_over = lambda model: chunked(lambda xs, ys: squares(model, xs, ys), (0, 0), 2)(
        xs, ys
    )
    for fn in (closed_over, jax.jit(closed_over)):
        assert_close(jax.value_and_grad(fn)(model), expected)
    fn = chunked(squares, chunk=2)
    assert fn.__name__ == "squares"
    assert_close(eqx.filter_jit(lambda fn, *args: fn(*args))(fn, model, xs, ys), expected[0])


@pytest.mark.thorough
def test_chunked_numbers_are_static(getkey):
    """Also those in a Module: an `equinox.nn.Dropout` asks for the type of its probability."""

    class Scaled(eqx.Module):
        weight: jax.Array
        scale: float
        power: int

        def __call__(self, x):
            assert type(self.scale) is float
            assert type(self.power) is int
            return self.scale * (self.weight * x) ** self.power if self.scale > 0 else x

    def loss(model, xs, shift, *, dropout, factor):
        assert type(shift) is float
        assert type(dropout.p) is float
        assert factor is True
        return jnp.sum(dropout(jax.vmap(model)(xs)) + shift)

    model, xs = Scaled(jr.normal(getkey(), (3,)), 0.5, 2), jr.normal(getkey(), (5, 3))
    options = {"dropout": eqx.nn.Dropout(0.0), "factor": True}
    expected = eqx.filter_grad(loss)(model, xs, 0.1, **options)
    split = chunked(loss, (None, 0, None), 2)
    for grad in (eqx.filter_grad(split), eqx.filter_jit(eqx.filter_grad(split))):
        assert_close(grad(model, xs, 0.1, **options).weight, expected.weight)
    got = jax.vmap(jax.grad(lambda w: split(Scaled(w, 0.5, 2), xs, 0.1, **options)))(xs)
    plain = jax.vmap(jax.grad(lambda w: loss(Scaled(w, 0.5, 2), xs, 0.1, **options)))(xs)
    assert_close(got, plain)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: chunked(squares, chunk=0), "`chunk` of `losses.chunked` is not an integer"),
        (lambda: chunked(squares, reduction="none"), '`reduction` of(?s:.*)"mean"'),
        (lambda: chunked(squares, axis="0"), "`axis` of `losses.chunked` is not an int"),
        (lambda: chunked(squares, (None, 0))(1.0, X, Y), "`axis` that does not fit"),
        (lambda: chunked(squares)(1.0, X, Y[:2]), r"`squares`(?s:.*)args\[2\] is int..\[2\]"),
        (lambda: chunked(squares, axis=2)(1.0, X, Y), "an axis that an argument does not have"),
        (lambda: chunked(squares)(1.0, X, 2.0), r"args\[2\] is float \(2.0\), its axis is 0"),
        (lambda: chunked(jnp.sum)(X), "no array has an axis(?s:.*)give `\\(axis,\\)`"),
        (lambda: chunked(lambda _, x: x)(0.0, X), "`<lambda>`(?s:.*)return a real scalar"),
        (
            lambda: chunked(lambda _, x: jnp.sum(x).astype(complex))(0.0, X),
            "return a real scalar",
        ),
    ],
)
def test_chunked_errors(make, match):
    with pytest.raises(eqg.RuleError, match=match):
        make()


# What it costs. The flops of a loop are counted once for all its steps, so that there is one
# chunk where they are counted.


def abstract(n=2048, d=256, v=16384, dtype=jnp.float32):
    shapes = ((n, d), dtype), ((v, d), dtype), ((n,), jnp.int32)
    return [jax.ShapeDtypeStruct(*s) for s in shapes]


def optax_mean(x, weight, labels):
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(x @ weight.T, labels)
    return jnp.mean(losses)


@pytest.mark.cost
def test_a_sixth_of_the_bytes():
    args = abstract()
    plain = temp_bytes(jax.value_and_grad(optax_mean, (0, 1)), *args)
    for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1, "z_loss": 1e-4}):
        fn = lambda *args, o=options: jnp.mean(linear_cross_entropy(*args, **o))
        for argnums in (0, 1, (0, 1)):
            assert temp_bytes(jax.value_and_grad(fn, argnums), *args) <= plain / 6
    tangents = lambda x, w, y: jax.jvp(
        lambda x, w: linear_cross_entropy(x, w, y), (x, w), (x, w)
    )
    assert temp_bytes(tangents, *args) <= plain / 4


@pytest.mark.cost
def test_batch_of_examples_has_one_weight_gradient():
    x, weight, labels = abstract(64)
    batch = [jax.ShapeDtypeStruct((32, *a.shape), a.dtype) for a in (x, labels)]

    def loss(fn, x, weight, labels):
        return jnp.mean(jax.vmap(fn, (0, None, 0))(x, weight, labels))

    ours, plain = [
        temp_bytes(jax.grad(ft.partial(loss, fn), (0, 1)), batch[0], weight, batch[1])
        for fn in (linear_cross_entropy, optax_mean)
    ]
    assert ours <= plain / 6


@pytest.mark.cost
@pytest.mark.parametrize(
    ("argnums", "products"), [((), 1), ((0,), 2), ((1,), 2), ((0, 1), 3), ("jvp", 3)]
)
def test_no_dead_matrix_product(argnums, products):
    n, d, v = 64, 256, 4096
    args = abstract(n, d, v)
    fn = ft.partial(linear_cross_entropy, chunk=n)
    if argnums == "jvp":
        program = lambda x, w, y: jax.jvp(lambda x, w: fn(x, w, y), (x, w), (x, w))
    else:
        program = jax.value_and_grad(fn, argnums) if argnums else fn
    flops = jax.jit(program).lower(*args).compile().cost_analysis()["flops"]
    assert flops <= products * 2 * n * d * v * 1.05


@pytest.mark.cost
def test_chunked_keeps_one_chunk(getkey):
    mlp = eqx.nn.MLP(16, 16, 256, 2, key=getkey())
    arrays, static = eqx.partition(mlp, eqx.is_array)
    loss = lambda arrays, xs: jnp.sum(jax.vmap(eqx.combine(arrays, static))(xs) ** 2)
    xs = jnp.zeros((8192, 16))
    plain = temp_bytes(jax.grad(loss), arrays, xs)
    assert temp_bytes(jax.grad(chunked(loss, chunk=256)), arrays, xs) <= plain / 8
