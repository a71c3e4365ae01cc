"""`linear_cross_entropy` with its vocabulary, its tokens, or both distributed over devices."""

import functools as ft
import re

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads.losses import linear_cross_entropy
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec

from .helpers import assert_close


pytestmark = pytest.mark.versions


# The length of the vocabulary is that of no other axis, nor the product of some.
TOKENS, FEATURES, VOCABULARY = 64, 8, 1096
OPTIONS = {"chunk": 16, "label_smoothing": 0.1, "z_loss": 1e-2}
BOTH = ("i", "j")
# The axes of the tokens, and of the vocabulary.
DISTRIBUTED = {"eight ways": (None, BOTH), "with the batch": ("i", "j"), "batch": (BOTH, None)}


def sample():
    x, weight = jr.normal(jr.key(0), (TOKENS, FEATURES)), jr.normal(jr.key(1), (1096, FEATURES))
    labels = jr.randint(jr.key(3), (TOKENS,), 0, VOCABULARY).at[3].set(-100)
    return x, weight, jr.normal(jr.key(2), (VOCABULARY,)), labels


def loss(x, weight, bias, labels, reduction="mean", **options):
    options = {**OPTIONS, "reduction": reduction, **options}
    losses = linear_cross_entropy(x, weight, labels, bias=bias, **options)
    return jnp.sum(jnp.sin(losses))


@ft.cache
def expected(reduction):
    return jax.jit(jax.value_and_grad(ft.partial(loss, reduction=reduction), (0, 1, 2)))(
        *sample()
    )


def specs_of(tokens, vocabulary):
    return Spec(tokens), Spec(vocabulary), Spec(vocabulary), Spec(tokens)


def check(program, got, reduction, tokens, vocabulary):
    assert_close(jax.tree.map(np.asarray, got), expected(reduction), eps=200)
    text = re.sub(r"metadata=\{[^}]*\}", "", program.as_text())
    shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", text)]
    if vocabulary is not None:
        # No device has a row of the logits, nor all rows of the weight.
        assert not [shape for shape in shapes if VOCABULARY in shape]
        assert "all-gather" not in text


@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_under_jit(name, kind, reduction):
    tokens, vocabulary = DISTRIBUTED[name]
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(kind,) * 2)
    specs = specs_of(tokens, vocabulary)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(sample(), specs, strict=True)
    ]
    fn = jax.value_and_grad(ft.partial(loss, reduction=reduction), (0, 1, 2))
    with jax.set_mesh(mesh):
        program = jax.jit(fn).lower(*placed).compile()
        got = program(*placed)
    check(program, got, reduction, tokens, vocabulary)
    for grad, x in zip(got[1], placed, strict=False):
        assert grad.sharding.is_equivalent_to(x.sharding, x.ndim)
    if kind == AxisType.Explicit:
        # The gradient of the weight is summed over the devices once, and not for each chunk.
        rows = VOCABULARY // (4 if vocabulary == "j" else 1)
        programs = re.split(r"\n(?=\S.*\{\n)", program.as_text())
        loops = [part for part in programs if not part.startswith("ENTRY")]
        lines = [line for part in loops for line in part.splitlines() if " all-reduce(" in line]
        assert not [line for line in lines if re.search(rf"\[{rows}\D", line)]


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction", ["sum", pytest.param("none", marks=pytest.mark.slow)])
def test_axis_name(reduction, check_vma):
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(AxisType.Auto,) * 2)
    specs = specs_of("i", "j")

    def whole(x, weight, bias, labels):
        def local(x, weight, bias, labels):
            options = {**OPTIONS, "reduction": reduction, "axis_name": "j"}
            losses = linear_cross_entropy(x, weight, labels, bias=bias, **options)
            return jax.lax.psum(
                jnp.sum(jnp.sin(losses) if reduction == "none" else losses), "i"
            )

        fn = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=Spec(), check_vma=check_vma
        )
        value = fn(x, weight, bias, labels)
        # The mean over all tokens is that of the sums of the devices.
        return value if reduction == "none" else jnp.sin(value / (TOKENS - 1))

    program = jax.jit(jax.value_and_grad(whole, (0, 1, 2))).lower(*sample()).compile()
    plain = "none" if reduction == "none" else "mean"
    placed = [
        jax.device_put(x, sharding)
        for x, sharding in zip(sample(), program.input_shardings[0], strict=True)
    ]
    got = program(*placed)
    assert_close(jax.tree.map(np.asarray, got), expected(plain), eps=200)
    x, weight, bias, labels = sample()
    for fn in (whole, ft.partial(loss, reduction=plain)):
        of_x = lambda x, fn=fn: fn(x, weight, bias, labels)
        tangent = jax.jit(lambda x, of_x=of_x: jax.jvp(of_x, (x,), (x,)))(x)
        second = jax.jit(jax.grad(lambda x, of_x=of_x: jnp.sum(jax.grad(of_x)(x) ** 2)))(x)
        if fn is whole:
            got = tangent, second
    assert_close(got, (tangent, second), eps=500)


@pytest.mark.cost
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_eighth_of_the_bytes(kind):
    """The bytes of each device, for a vocabulary that is distributed over eight."""
    shapes = ((2048, 64), jnp.float32), ((16384, 64), jnp.float32), ((2048,), jnp.int32)
    mesh = jax.make_mesh((8,), ("v",), axis_types=(kind,))

    def temp_bytes(shardings):
        args = [
            jax.ShapeDtypeStruct(*shape, sharding=s)
            for shape, s in zip(shapes, shardings, strict=True)
        ]
        fn = ft.partial(linear_cross_entropy, chunk=128)
        grad = jax.value_and_grad(fn, (0, 1))
        return jax.jit(grad).lower(*args).compile().memory_analysis().temp_size_in_bytes

    alone = temp_bytes([None] * 3)
    with jax.set_mesh(mesh):
        specs = Spec(), Spec("v"), Spec()
        each = temp_bytes([NamedSharding(mesh, spec) for spec in specs])
    # The cotangent of `x` and the tokens are whole on each device.
    assert each <= alone / 8 + 3 * 2048 * 64 * 4
