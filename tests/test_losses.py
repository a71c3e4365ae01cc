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


pytestmark = pytest.mark.x64


LABELS = jnp.array([[0, 3, -100], [1, 2, 6]])


def sample(getkey, dtype=None):
    """`x`, the weight and the bias of six tokens and a vocabulary of seven."""
    shapes = (2, 3, 4), (7, 4), (7,)
    return tuple(jr.normal(getkey(), shape, dtype or jnp.zeros(()).dtype) for shape in shapes)


def ours(x, weight, bias, labels=LABELS, **options):
    return linear_cross_entropy(x, weight, labels, bias=bias, **{"chunk": 2, **options})


def plain(x, weight, bias, labels):
    """The sum, by Optax on all logits."""
    logits = x @ weight.T + bias[None]
    return jnp.sum(optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels))


@pytest.mark.slow
def test_a_sum_in_half_precision_does_not_overflow():
    """The gradient of the weight is summed in single precision, the loss too."""
    x, weight = jnp.ones((4096, 2), jnp.float16), jnp.zeros((2, 2), jnp.float16)
    labels = jnp.zeros(4096, int)
    fn = lambda w: linear_cross_entropy(64 * x, w, labels, chunk=16, reduction="mean")
    assert_close(jax.grad(fn)(weight), jnp.array([[-32.0] * 2, [32.0] * 2], jnp.float16))
    total = linear_cross_entropy(x, weight, labels, chunk=16, reduction="sum")
    assert_close(total / 4096, jnp.log(jnp.float32(2)))


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


def test_a_small_loss_is_exact():
    """The loss of a token that is predicted with near certainty is right to the last digits."""
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


X, W, Y = jnp.ones((3, 2)), jnp.ones((4, 2)), jnp.zeros(3, int)
ERRORS = [
    (lambda: linear_cross_entropy(X, W.T, Y), r"do not fit(?s:.)*`weight` is float..\[2,4\]"),
    (lambda: linear_cross_entropy(X, W[:0], Y), "do not fit together"),
    (lambda: linear_cross_entropy(X, W, Y.astype(float)), "(?s)do not fit.*or probabilities"),
    (lambda: linear_cross_entropy(Y, W, Y), r"`x` is int(?s:.)*pass `jnp.asarray\(x, float\)`"),
    (
        lambda: linear_cross_entropy(X, W, Y, class_weight=[1.0, 2.0, 3.0, 4.0]),
        r"`class_weight` is list(?s:.)*pass `jnp.asarray\(class_weight, float\)`",
    ),
    (
        lambda: linear_cross_entropy(X, W, Y, ignore_index=True),
        "`ignore_index` of(?s:.)*is not",
    ),
    (lambda: linear_cross_entropy(X, W, Y, label_smoothing=jnp.nan), "(?s)from zero to one"),
    (lambda: linear_cross_entropy(X, W, Y, z_loss=-1.0), "`z_loss`"),
    (lambda: chunked(squares, axis="0"), "`axis` of `losses.chunked` is not an int"),
    (lambda: chunked(squares, axis=2)(1.0, X, Y), "an axis that an argument does not have"),
    (lambda: chunked(squares)(1.0, X, 2.0), r"args\[2\] is float \(2.0\), its axis is 0"),
    (lambda: chunked(jnp.sum)(X), "no array has an axis(?s:.)*give `\\(axis,\\)`"),
    (lambda: chunked(lambda _, x: x)(0.0, X), "`<lambda>`(?s:.)*return a real scalar"),
]


@pytest.mark.usefixtures("without_type_checks")
def test_errors():
    for call, match in ERRORS:
        with pytest.raises(eqg.RuleError, match=match):
            call()


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

    expected = jax.grad(plain, (0, 1, 2))(x, weight, bias, labels)
    got = jax.jit(jax.grad(loss, (0, 1, 2)))(x, weight, bias, labels)
    assert_close(got, expected)


# Any loss that is a sum over an axis.


def squares(model, xs, ys):
    weight, bias = model
    return jnp.sum(jnp.tanh(xs @ weight + bias - ys) ** 2)


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
