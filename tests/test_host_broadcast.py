"""The cotangents of a host function's arguments that the function broadcast."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from .helpers import assert_close


def _out(x, y):
    return jax.ShapeDtypeStruct(np.broadcast_shapes(x.shape, y.shape), x.dtype)


def _product(x, y):
    return x * y


def _product_bwd(residuals, ct):
    x, y = residuals
    return ct * y, ct * x


def _make(**options):
    function = eqg.host_function(_product, out=_out, **options)
    function.def_bwd(_product_bwd)
    return function


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "legacy_vectorized"])
@pytest.mark.parametrize(
    "shapes", [((5,), ()), ((2, 3), (3,)), ((2, 1), (1, 3))], ids=["scalar", "row", "ones"]
)
def test_cotangents_are_summed_over_broadcast_axes(shapes, method, getkey):
    x, y = (jr.normal(getkey(), shape) for shape in shapes)
    product = _make(vmap_method=method)
    gradients = lambda fn: jax.grad(lambda x, y: jnp.sum(jnp.sin(fn(x, y))), (0, 1))
    with jax.numpy_rank_promotion("allow"):
        expected = gradients(_product)(x, y)
        assert_close(gradients(product)(x, y), expected)
        assert_close(jax.jit(gradients(product))(x, y), expected)
        xs = jnp.stack([x, 2 * x])
        batched = lambda fn: jax.jit(jax.vmap(gradients(fn), (0, None)))(xs, y)
        # With an axis in front, a `y` without it has to broadcast as it does without `vmap`.
        if method == "sequential" or len(shapes[0]) > 1 or shapes[1] == ():
            assert_close(batched(product), batched(_product))


def test_the_sum_is_that_of_an_axis_and_not_of_a_batch(getkey):
    """Two examples, and an argument with an axis of two: nothing is summed."""
    xs = jr.normal(getkey(), (2, 2))
    y = jnp.array([1.0, -3.0])
    product = _make(vmap_method="expand_dims")
    per_example = jax.vmap(jax.grad(lambda x, y: jnp.sum(product(x, y)), 1), (0, None))
    assert_close(per_example(xs, y), xs)


def test_half_precision_is_summed_in_single():
    product = _make()
    x = jnp.ones(4096, jnp.float16)
    ct_y = jax.grad(lambda y: product(x, y)[:].sum().astype(jnp.float32))(jnp.float16(1))
    assert ct_y == 4096


def test_a_cotangent_that_no_broadcast_explains():
    function = eqg.host_function(_product, out=_out)
    function.def_bwd(lambda residuals, ct: (ct[:2], ct[0]))
    with pytest.raises(
        eqg.RuleError,
        match=r"(?s)at the cotangent of `x`: promised was float32\[3\], returned was "
        r"float32\[2\].*Return a cotangent of the shape of its argument",
    ):
        jax.grad(lambda x: jnp.sum(function(x, 2.0)))(jnp.ones(3, jnp.float32))


def test_none_among_the_cotangents_is_explained():
    @eqg.host_function(out=lambda x: (x, jax.ShapeDtypeStruct((), jnp.int32)))
    def count(x):
        return np.sin(x), np.int32(x.size)

    @count.def_bwd
    def _count_bwd(residuals, cts):
        ct, ct_size = cts
        return (ct * np.cos(residuals[0]) + ct_size * 1.0,)

    with pytest.raises(TypeError, match="NoneType") as caught:
        jax.grad(lambda x: count(x)[0])(1.0)
    assert any("`None` is the tangent or cotangent" in n for n in caught.value.__notes__)
