"""Rules inside `shard_map`, eager and jitted, with replicated and with sharded arguments."""

import functools as ft

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as Spec

from .helpers import assert_close


pytestmark = pytest.mark.versions


SHARDED, REPLICATED = (Spec("i"), Spec("i")), (Spec(), Spec("i"))
WEIGHT = jnp.linspace(0.0, 1.0, 6).reshape(2, 3)
X = jnp.linspace(-1.0, 1.0, 16).reshape(8, 2)
MESH = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))


@eqg.custom_vjp
def product(weight, x):
    return x @ weight


@product.def_fwd
def _product_fwd(weight, x):
    return product(weight, x), (weight, x)


@product.def_bwd
def _product_bwd(residuals, ct):
    weight, x = residuals
    # The weight is the same on every device, and this is the local part of its cotangent:
    # the rule need not know.
    return x.T @ ct, ct @ weight.T


def loss_of(f, check_vma, in_specs=SHARDED):
    sharded = jax.shard_map(
        f, mesh=MESH, in_specs=in_specs, out_specs=Spec("i"), check_vma=check_vma
    )
    return lambda *args: jnp.sum(jnp.sin(sharded(*args)))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_replicated_weight(jit, check_vma):
    weight, x = WEIGHT, X
    loss = loss_of(product, check_vma, REPLICATED)
    grad = jax.grad(loss, (0, 1))
    grad = jax.jit(grad) if jit else grad
    plain = jax.grad(lambda weight, x: jnp.sum(jnp.sin(x @ weight)), (0, 1))
    assert_close(grad(weight, x), plain(weight, x))


@eqg.custom_vjp
def both(x, y):
    return jnp.sin(x), x * y


def test_chunked_loss_of_a_replicated_weight():
    """The rule differentiates the loss with respect to the weight, and the sum over the devices
    was taken there, and once more outside."""
    loss = lambda weight, x: jnp.sum(jnp.tanh(x @ weight) ** 2)
    chunked = eqg.losses.chunked(loss, chunk=1)

    def derivatives(fn):
        local = lambda w, x: jax.lax.psum(fn(w, x), "i")
        whole = jax.shard_map(local, mesh=MESH, in_specs=REPLICATED, out_specs=Spec())
        return jax.grad(whole, (0, 1))(WEIGHT, X), jax.jvp(whole, (WEIGHT, X), (WEIGHT, X))[1]

    got, expected = jax.jit(lambda: [derivatives(chunked), derivatives(loss)])()
    assert_close(got, expected)


def steps_from_the_same_numbers(root, weight, x):
    step = lambda c, v: ((jnp.tanh(c[0] * weight + root(v)), c[1] + weight), c[0][:1] + c[1])
    start = jax.lax.pcast(jnp.zeros(2), ("i",), to="varying"), jnp.ones(2)
    return jax.lax.scan(step, start, x)[1]


@pytest.mark.parametrize(
    "local",
    [
        lambda root, weight, x: root(x * weight)[jnp.array([1, 0])],
        lambda root, weight, x: jnp.pad(root(x * weight), 1) ** 2,
        lambda root, weight, x: jnp.convolve(root(x * weight[0]), weight),
        lambda root, weight, x: jnp.sort(root(x * weight))[:1],
        steps_from_the_same_numbers,
    ],
    ids=["look-up", "pad", "convolution", "sort", "scan"],
)
def test_a_root_that_is_not_taken(local):
    """`zero_safe` against the double `where`: its masks differ between devices too."""
    root = lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0)
    plain = lambda x: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)
    args = jnp.array([0.5, 2.0]), jnp.linspace(-1.0, 2.0, 8)

    def derivatives(root, wrap):
        total = lambda *args: jax.lax.psum(jnp.sum(local(root, *args)), "i")
        loss = jax.shard_map(wrap(total), mesh=MESH, in_specs=REPLICATED, out_specs=Spec())
        return jax.grad(loss, (0, 1))(*args), jax.jvp(loss, args, args)[1]

    safe, twice = jax.jit(
        lambda: (derivatives(root, eqg.zero_safe), derivatives(plain, lambda f: f))
    )()
    assert_close(safe, twice)


OPTIONS = ({}, {"checkpoint": 2}, {"checkpoint": "replay"}, {"checkpoint": "auto"})
OPTIONS = (*OPTIONS, {"truncate": 3}, {"truncate": 2, "checkpoint": "replay"})
XS = jnp.linspace(-1.0, 1.0, 6 * 8 * 3).reshape(6, 8, 3)
SQUARE = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)


# NumPy's: a constant, which becomes a tracer where it is made an array of JAX.
SCALE = np.linspace(0.5, 1.5, 3, dtype=jnp.result_type(float))


def scan_loss(options, n, reduce, weight, xs):
    step = lambda h, x: (jnp.tanh(h @ weight * SCALE[None] + x), h)
    last, hs = eqg.filter_scan(step, jnp.zeros((n, 3)), xs, **options)
    return reduce(jnp.sum(jnp.sin(hs)) + jnp.sum(last))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_scan_from_zeros(options, check_vma):
    """The first carry is the same everywhere, and no later one is."""
    local = ft.partial(scan_loss, options, 2, lambda x: jax.lax.psum(x, "i"))
    specs = {"in_specs": (Spec(), Spec(None, "i")), "out_specs": Spec()}
    whole = jax.shard_map(local, mesh=MESH, check_vma=check_vma, **specs)
    window = {"truncate": options["truncate"]} if "truncate" in options else {}
    plain = ft.partial(scan_loss, window, 8, lambda x: x)
    args = (SQUARE, XS)
    got, expected = jax.jit(lambda *a: [jax.grad(f, (0, 1))(*a) for f in (whole, plain)])(*args)
    assert_close(got, expected, eps=500)


def test_one_sum_over_the_devices_for_a_replayed_scan():
    """The sum of the cotangent of the weight, after the loop."""
    local = ft.partial(scan_loss, {"checkpoint": "replay"}, 2, lambda x: jax.lax.psum(x, "i"))
    specs = {"in_specs": (Spec(), Spec(None, "i")), "out_specs": Spec()}
    whole = jax.shard_map(local, mesh=MESH, **specs)
    program = str(jax.make_jaxpr(jax.grad(whole))(SQUARE, XS))
    assert program.count("psum_invariant") <= 2  # and of the loss


def test_a_bounded_while_loop_of_each_device():
    """With sums over the devices in the backward pass, although the lengths differ."""
    lengths = jnp.array([5, 3, 0, 9])

    def local(x, n, weight):
        step = lambda c: (c[0] + 1, jnp.sin(c[1] * weight) + 0.3)
        more = lambda c: jnp.sum(c[0]) < n[0]
        return eqg.filter_while_loop(more, step, (0, x), max_steps=20)[1]

    def written_out(x, weight, n):
        for _ in range(n):
            x = jnp.sin(x * weight) + 0.3
        return x

    specs = {"in_specs": (Spec("i"), Spec("i"), Spec()), "out_specs": Spec("i")}
    whole = jax.shard_map(local, mesh=MESH, **specs)
    x, weight = jnp.array([0.5, 1.0, 2.0, 0.3]), 1.2
    got = jax.jit(jax.grad(lambda x, w: jnp.sum(whole(x, lengths, w) ** 2), (0, 1)))(x, weight)
    square = lambda x, weight, n: written_out(x, weight, n) ** 2
    each = [
        jax.grad(square, (0, 1))(y, weight, n) for y, n in zip(x, lengths.tolist(), strict=True)
    ]
    assert_close(got, (jnp.stack([g for g, _ in each]), sum(g for _, g in each)), eps=50)


def test_errors_of_solvers():
    whole = lambda f: jax.shard_map(f, mesh=MESH, in_specs=Spec("i"), out_specs=Spec("i"))
    grow = lambda x: eqg.fixed_point(lambda y, x: 2 * y + x, x, x, max_steps=20).value
    with pytest.raises(Exception, match="The fixed point of `<lambda>` was not found"):
        jax.block_until_ready(jax.jit(whole(grow))(jnp.ones(8)))

    @eqg.implicit(lambda y, x: y**2 - x)
    def root(x):
        return jnp.sqrt(x)

    # At zero, the matrix is zero.
    grad = jax.jit(jax.grad(lambda x: jnp.sum(whole(root)(x))))
    with pytest.raises(Exception, match="linear solve for the derivative of `root` failed"):
        jax.block_until_ready(grad(jnp.zeros(8)))
    # `jax.effects_barrier` raises once more what the last new program with a callback on each
    # device raised, also in another test.
    same = lambda x: jax.pure_callback(lambda x: x, x, x)
    jax.block_until_ready(jax.jit(lambda x: whole(same)(x))(jnp.ones(8)))
    jax.effects_barrier()

    @eqg.implicit(lambda y, x: y**2 - x, solver=lx.GMRES(1e-5, 1e-5))
    def by_gmres(x):
        return jnp.sqrt(x)

    with pytest.raises(eqg.RuleError, match=r"`check_vma=False`(?s:.*)leave the solver out"):
        jax.jit(jax.grad(lambda x: jnp.sum(whole(by_gmres)(x))))(jnp.ones(8))
