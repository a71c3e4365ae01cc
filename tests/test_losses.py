"""Losses in chunks: labels, cost, and arguments that are distributed over devices."""

import functools as ft
import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from eqx_grads.losses import chunked, linear_cross_entropy
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec

from .helpers import assert_close, quick_only, temp_bytes


LABELS = jnp.array([[0, 3, -100], [1, 2, 6]])


def sample(getkey):
    """`x`, the weight and the bias of six tokens and a vocabulary of seven."""
    return tuple(jr.normal(getkey(), shape) for shape in ((2, 3, 4), (7, 4), (7,)))


def ours(x, weight, bias, labels=LABELS, **options):
    return linear_cross_entropy(x, weight, labels, bias=bias, **{"chunk": 2, **options})


@pytest.mark.x64
@pytest.mark.parametrize("label", [7, -1, -(2**31)])
def test_a_label_out_of_range_gives_nan(label, getkey):
    args, labels = sample(getkey), LABELS.at[0, 0].set(label)
    losses = ours(*args, labels, reduction="none")
    assert jnp.array_equal(jnp.isnan(losses), jnp.zeros((2, 3), bool).at[0, 0].set(True))
    fn = lambda *args: jnp.sum(ours(*args, labels, reduction="none"))
    ct_x, ct_weight, _ = jax.grad(fn, (0, 1, 2))(*args)
    assert jnp.isnan(ct_weight).all()
    assert jnp.array_equal(jnp.isnan(ct_x[..., 0]), jnp.isnan(losses))
    with jax.debug_nans(True):
        ours(*args)
        with pytest.raises(FloatingPointError, match="nan"):
            ours(*args, labels)


def test_a_small_probability_in_half_precision():
    loss = lambda weight: linear_cross_entropy(jnp.float16([[1e3]]), weight, jnp.array([0]))
    gradient = jax.grad(loss)(jnp.float16([[0.0], [-0.018]]))
    assert abs(float(gradient[1, 0]) / (1e3 * np.exp(-18)) - 1) < 0.05


@pytest.mark.x64
def test_a_small_loss_is_exact():
    """The loss of a token that is predicted with near certainty is right to the last digits."""
    weight = jnp.array([[0.0], [1.0]])
    for x in (5.0, 12.0, 30.0, 80.0):
        of_weight = jax.value_and_grad(linear_cross_entropy, 1)
        loss, grad = of_weight(jnp.array([x], "bfloat16"), weight, jnp.array(1))
        # What is left of `1 + exp(-x)` in the dtype.
        eps = float(jnp.finfo(loss.dtype).eps)
        assert abs(float(loss) - np.log1p(np.exp(-x))) <= 2 * eps
        assert abs(float(grad[0, 0]) - x / (1 + np.exp(x))) <= x * eps
        assert loss >= 0


X, W, Y = jnp.ones((3, 2)), jnp.ones((4, 2)), jnp.zeros(3, int)
ERRORS = [
    (lambda: linear_cross_entropy(X, W, Y.astype(float)), "(?s)do not fit.*or probabilities"),
    (lambda: linear_cross_entropy(Y, W, Y), r"it is int(?s:.)*`jnp.asarray\(x, float\)`"),
    (
        lambda: linear_cross_entropy(X, W, Y, class_weight=[1.0, 2.0, 3.0, 4.0]),
        r"The `class_weight` of(?s:.)*it is \[(?s:.)*pass `jnp.asarray\(class_weight, float\)`",
    ),
    (lambda: chunked(jnp.sum)(1.0, X, 2.0), r"args\[2\] is float \(2.0\), its axis is 0"),
    (lambda: chunked(jnp.sum)(X), "no array has an axis(?s:.)*give `\\(axis,\\)`"),
]


@pytest.mark.usefixtures("without_type_checks")
def test_errors():
    for call, match in ERRORS:
        with pytest.raises(eqg.RuleError, match=match):
            call()


def test_a_label_out_of_range_is_no_fault_of_other_tokens():
    """Labels of eight bits can't hold every index of this vocabulary."""
    x, weight, labels = jnp.ones((2, 3)), jnp.ones((260, 3)), jnp.array([-1, 0], "int8")
    loss, ct = jax.value_and_grad(linear_cross_entropy)(x, weight, labels)
    assert jnp.isnan(loss)
    np.testing.assert_allclose(ct[:, 0], [np.nan, 0], atol=1e-5)


def test_an_entry_that_a_bias_removes_has_no_weight():
    labels, bias = jnp.array([[0.5, 0.5, 0.0]]), jnp.array([0.0, 0.0, -jnp.inf])
    loss = linear_cross_entropy(jnp.ones((1, 2)), jnp.ones((3, 2)), labels, bias=bias)
    assert_close(loss, jnp.log(2.0))


def test_chunks_of_one_length():
    """Of at most eight tokens: five of six, as devices would gather unequal parts."""
    head = ft.partial(linear_cross_entropy, jnp.ones((30, 2)), jnp.ones((3, 2)), chunk=8)
    program = str(jax.make_jaxpr(head)(jnp.zeros(30, int)))
    assert "length=5" in program
    assert " pad[" not in program


# ---------------------------------------------------------------- cost
# The flops of a loop are counted once for all its steps, so that there is one chunk where they
# are counted.


def abstract(n=2048, d=256, v=16384):
    shapes = ((n, d), jnp.float32), ((v, d), jnp.float32), ((n,), jnp.int32)
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
    fn = ft.partial(linear_cross_entropy, chunk=n)
    if argnums == "jvp":
        program = lambda x, w, y: jax.jvp(lambda x, w: fn(x, w, y), (x, w), (x, w))
    else:
        program = jax.value_and_grad(fn, argnums) if argnums else fn
    flops = jax.jit(program).lower(*abstract(n, d, v)).compile().cost_analysis()["flops"]
    assert flops <= products * 2 * n * d * v * 1.05


@pytest.mark.cost
def test_chunked_keeps_one_chunk(getkey):
    mlp = eqx.nn.MLP(16, 16, 256, 2, key=getkey())
    arrays, static = eqx.partition(mlp, eqx.is_array)
    loss = lambda arrays, xs: jnp.sum(jax.vmap(eqx.combine(arrays, static))(xs) ** 2)
    xs = jnp.zeros((8192, 16))
    plain = temp_bytes(jax.grad(loss), arrays, xs)
    assert temp_bytes(jax.grad(chunked(loss, chunk=256)), arrays, xs) <= plain / 8


# ---------------------------------------------------------------- over several devices

# The length of the vocabulary is that of no other axis, nor the product of some.
TOKENS, FEATURES, VOCABULARY = 64, 8, 1096
OPTIONS = {"chunk": 16, "label_smoothing": 0.1, "z_loss": 1e-2}
BOTH = ("i", "j")
# The axes of the tokens, and of the vocabulary.
DISTRIBUTED = {"eight ways": (None, BOTH), "with the batch": ("i", "j"), "batch": (BOTH, None)}
PLACES = [("eight ways", AxisType.Auto), ("with the batch", AxisType.Explicit)]
PLACES += [("batch", AxisType.Auto)]


def tokens():
    x, weight = jr.normal(jr.key(0), (TOKENS, FEATURES)), jr.normal(jr.key(1), (1096, FEATURES))
    labels = jr.randint(jr.key(3), (TOKENS,), 0, VOCABULARY).at[3].set(-100)
    return x, weight, jr.normal(jr.key(2), (VOCABULARY,)), labels


def loss(x, weight, bias, labels, reduction="mean", **options):
    options = {**OPTIONS, "reduction": reduction, **options}
    losses = linear_cross_entropy(x, weight, labels, bias=bias, **options)
    return jnp.sum(jnp.sin(losses))


@ft.cache
def expected(reduction):
    of_reduction = ft.partial(loss, reduction=reduction)
    return jax.jit(jax.value_and_grad(of_reduction, (0, 1, 2)))(*tokens())


def specs_of(tokens, vocabulary):
    return Spec(tokens), Spec(vocabulary), Spec(vocabulary), Spec(tokens)


@pytest.mark.versions
@pytest.mark.parametrize("reduction", quick_only(("mean", "none"), ("mean",), pytest.mark.slow))
@pytest.mark.parametrize(("name", "kind"), PLACES)
def test_a_distributed_vocabulary(name, kind, reduction):
    of_tokens, vocabulary = DISTRIBUTED[name]
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(kind,) * 2)
    pairs = zip(tokens(), specs_of(of_tokens, vocabulary), strict=True)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
    fn = jax.value_and_grad(ft.partial(loss, reduction=reduction), (0, 1, 2))
    with jax.set_mesh(mesh):
        program = jax.jit(fn).lower(*placed).compile()
        got = program(*placed)
    assert_close(jax.tree.map(np.asarray, got), expected(reduction), eps=200)
    text = re.sub(r"metadata=\{[^}]*\}", "", program.as_text())
    shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", text)]
    if vocabulary is not None:
        # No device has a row of the logits, nor all rows of the weight.
        assert not [shape for shape in shapes if VOCABULARY in shape]
        assert "all-gather" not in text
    for grad, x in zip(got[1], placed, strict=False):
        assert grad.sharding.is_equivalent_to(x.sharding, x.ndim)
    if kind == AxisType.Explicit:
        # The gradient of the weight is summed over the devices once, and not for each chunk.
        rows = VOCABULARY // (4 if vocabulary == "j" else 1)
        programs = re.split(r"\n(?=\S.*\{\n)", program.as_text())
        loops = [part for part in programs if not part.startswith("ENTRY")]
        lines = [line for part in loops for line in part.splitlines() if " all-reduce(" in line]
        assert not [line for line in lines if re.search(rf"\[{rows}\D", line)]


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_axis_name(reduction, check_vma):
    """Tokens over one axis of the mesh, and the vocabulary over the other."""
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(AxisType.Auto,) * 2)
    is_sum, plain = reduction == "sum", "mean" if reduction == "sum" else "none"

    def whole(*args):
        def local(x, weight, bias, labels):
            options = {**OPTIONS, "reduction": reduction, "axis_name": "j"}
            losses = linear_cross_entropy(x, weight, labels, bias=bias, **options)
            return jax.lax.psum(jnp.sum(losses if is_sum else jnp.sin(losses)), "i")

        specs = {"in_specs": specs_of("i", "j"), "out_specs": Spec(), "check_vma": check_vma}
        value = jax.shard_map(local, mesh=mesh, **specs)(*args)
        # The mean over all tokens is that of the sums of the devices.
        return jnp.sin(value / (TOKENS - 1)) if is_sum else value

    got = jax.jit(jax.value_and_grad(whole, (0, 1, 2)))(*tokens())
    assert_close(jax.tree.map(np.asarray, got), expected(plain), eps=200)
    x, *rest = tokens()
    both = []
    for fn in (whole, ft.partial(loss, reduction=plain)):
        of_x = lambda x, fn=fn: fn(x, *rest)
        tangent = jax.jit(lambda x, of_x=of_x: jax.jvp(of_x, (x,), (x,)))(x)
        second = jax.jit(jax.grad(lambda x, of_x=of_x: jnp.sum(jax.grad(of_x)(x) ** 2)))(x)
        both.append((tangent, second))
    assert_close(*both, eps=500)


@pytest.mark.cost
@pytest.mark.versions
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_eighth_of_the_bytes(kind):
    """The bytes of each device, for a vocabulary that is distributed over eight."""
    mesh = jax.make_mesh((8,), ("v",), axis_types=(kind,))
    grad = jax.value_and_grad(ft.partial(linear_cross_entropy, chunk=128), (0, 1))

    def of(shardings):
        pairs = zip(abstract(2048, 64, 16384), shardings, strict=True)
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in pairs]
        return temp_bytes(grad, *placed)

    alone = of([None] * 3)
    with jax.set_mesh(mesh):
        each = of([NamedSharding(mesh, spec) for spec in (Spec(), Spec("v"), Spec())])
    # The cotangent of `x` and the tokens are whole on each device.
    assert each <= alone / 8 + 3 * 2048 * 64 * 4
