"""Rules inside `shard_map`, eager and jitted, with replicated and with sharded arguments."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from eqx_grads._jaxprs.varying import cast_carry
from jax.sharding import AxisType, PartitionSpec as Spec

from .helpers import assert_close
from .ops import sin_times, sin_times_elementwise, sin_times_jvp, sin_times_vjp


RULES = {"jvp": sin_times_jvp, "vjp": sin_times_vjp, "elementwise": sin_times_elementwise}
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
@pytest.mark.parametrize("jit", ["jit(grad)", "grad(jit)", "eager"])
@pytest.mark.parametrize("rule", RULES)
def test_sharded(rule, jit, check_vma):
    args = (jnp.linspace(0.0, 1.0, 8), jnp.linspace(1.0, 3.0, 8))
    loss = loss_of(RULES[rule], check_vma)
    if jit == "grad(jit)":
        loss = jax.jit(loss)
    grad = jax.grad(loss, (0, 1))
    if jit == "jit(grad)":
        grad = jax.jit(grad)
    plain = jax.grad(lambda x, y: jnp.sum(jnp.sin(sin_times(x, y))), (0, 1))
    assert_close(grad(*args), plain(*args))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_replicated_weight(jit, check_vma):
    weight, x = WEIGHT, X
    loss = loss_of(product, check_vma, REPLICATED)
    grad = jax.grad(loss, (0, 1))
    grad = jax.jit(grad) if jit else grad
    plain = jax.grad(lambda weight, x: jnp.sum(jnp.sin(x @ weight)), (0, 1))
    assert_close(grad(weight, x), plain(weight, x))


@pytest.mark.thorough
@pytest.mark.parametrize("jit", [True, False])
def test_grad_inside(jit):
    """The gradient is taken on each device, of a replicated weight."""

    def per_device(f):
        def loss(weight, x):
            return jax.lax.psum(jnp.sum(jnp.sin(f(weight, x))), "i")

        return jax.shard_map(jax.grad(loss), mesh=MESH, in_specs=REPLICATED, out_specs=Spec())

    weight, x = WEIGHT, X
    with_rule, plain = per_device(product), per_device(lambda weight, x: x @ weight)
    if jit:
        with_rule, plain = jax.jit(with_rule), jax.jit(plain)
    assert_close(with_rule(weight, x), plain(weight, x))


@pytest.mark.parametrize("check_vma", [True, False])
def test_forward_mode(check_vma):
    weight, x = WEIGHT, X
    loss = loss_of(product, check_vma, REPLICATED)
    plain = lambda weight, x: jnp.sum(jnp.sin(x @ weight))
    got = jax.jit(lambda *args: jax.jvp(loss, args, args))(weight, x)
    assert_close(got, jax.jvp(plain, (weight, x), (weight, x)))


def test_vmap_inside():
    weight, x = WEIGHT, X.reshape(8, 1, 2)
    loss = loss_of(jax.vmap(product, (None, 0)), True, REPLICATED)
    plain = lambda weight, x: jnp.sum(jnp.sin(x @ weight))
    assert_close(jax.jit(jax.grad(loss, (0, 1)))(weight, x), jax.grad(plain, (0, 1))(weight, x))


@eqg.custom_vjp
def both(x, y):
    return jnp.sin(x), x * y


both.def_fwd(lambda x, y: (both(x, y), (x, y)))


@both.def_bwd
def _both_bwd(residuals, cts):
    x, y = residuals
    return cts[0] * jnp.cos(x) + cts[1] * y, cts[1] * x


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_output_of_replicated_arguments_only(check_vma):
    """Its cotangent was counted once for each device."""

    def loss(fn):
        def local(x, y):
            a, b = fn(x, y)
            return jax.lax.psum(jnp.sum(b), "i") + 0.25 * jax.lax.psum(jnp.sum(a), "i")

        specs = {"in_specs": (Spec(), Spec("i")), "out_specs": Spec(), "check_vma": check_vma}
        return jax.grad(jax.shard_map(local, mesh=MESH, **specs), (0, 1))

    x, y = jnp.array([0.5, 1.0]), jnp.linspace(1.0, 2.0, 8)
    plain = lambda x, y: (jnp.sin(x), x * y)
    args = (x, y)
    got, expected = jax.jit(lambda *args: [loss(f)(*args) for f in (both, plain)])(*args)
    assert_close(got, expected)


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


def test_another_scale_on_each_device():
    scale = lambda x, s: eqg.scale_gradient(x, s[0])
    loss = loss_of(scale, True, REPLICATED)
    assert_close(
        jax.jit(jax.grad(loss))(jnp.ones(2), jnp.arange(4.0)), 6 * jnp.cos(jnp.ones(2))
    )


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


@pytest.mark.slow
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("options", [OPTIONS[3], OPTIONS[5]], ids=str)
def test_constants_of_a_scan_inside_two_derivatives(options, jit):
    """A body that was traced for a replicated constant got one that varies (the fuzz tests)."""

    def loss(x):
        step = lambda h, x: (jnp.sin(h * x * SCALE), h)
        return jnp.sum(eqg.filter_scan(step, x, jnp.array([0.5, 1.0, 1.5]), **options)[1])

    def derivatives(x):
        grads, linear = jax.linearize(jax.grad(loss), x)
        return grads + linear(jnp.ones_like(x))

    one = lambda x: derivatives(x[0])[None]
    whole = jax.shard_map(one, mesh=MESH, in_specs=Spec("i"), out_specs=Spec("i"))
    x = jnp.linspace(0.1, 0.9, 12).reshape(4, 3)
    assert_close(jit(whole)(x), jax.vmap(derivatives)(x), eps=50)


def test_a_first_carry_that_varies_already_needs_no_trace_of_the_step():
    def step_types(carry):
        raise AssertionError("the step was traced")

    def fn(x):
        (carry,) = cast_carry(step_types, [x])
        return carry

    run = jax.shard_map(fn, mesh=MESH, in_specs=Spec("i"), out_specs=Spec("i"))
    assert_close(run(X), X)


def test_one_sum_over_the_devices_for_a_replayed_scan():
    """Of the cotangent of the weight, after the loop."""
    local = ft.partial(scan_loss, {"checkpoint": "replay"}, 2, lambda x: jax.lax.psum(x, "i"))
    specs = {"in_specs": (Spec(), Spec(None, "i")), "out_specs": Spec()}
    whole = jax.shard_map(local, mesh=MESH, **specs)
    program = str(jax.make_jaxpr(jax.grad(whole))(SQUARE, XS))
    assert program.count("psum_invariant") <= 2  # and of the loss


@pytest.mark.thorough
def test_cond_and_while_loop():
    def local(x, y):
        out = eqg.filter_cond(jnp.sum(x) > 0, lambda: jnp.zeros(2), lambda: y)
        count, total = eqg.filter_while_loop(
            lambda state: state[0] < 3, lambda state: (state[0] + 1, state[1] + y), (0, out)
        )
        return jnp.zeros(2, y.dtype) + count.astype(y.dtype) + total

    whole = jax.shard_map(local, mesh=MESH, in_specs=REPLICATED, out_specs=Spec("i"))
    x, y = jnp.ones(3), jnp.arange(8.0)
    assert_close(jax.jit(whole)(x, y), 3 + 3 * y)
    t_out = jax.jvp(lambda y: whole(-x, y), (y,), (jnp.ones(8),))[1]
    assert_close(t_out, jnp.full(8, 4.0))


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


LAYERS = {
    "GRU": lambda key: eqg.nn.GRU(3, 4, key=key),
    "LSTM": lambda key: eqg.nn.LSTM(3, 4, key=key),
    "RNN": lambda key: eqg.nn.RNN(3, 4, key=key),
    "MinGRU": lambda key: eqg.nn.MinGRU(3, 4, key=key),
    "LRU": lambda key: eqg.nn.LRU(3, 4, 4, key=key),
    "GatedDeltaNet": lambda key: eqg.nn.GatedDeltaNet(3, 4, heads=2, key_size=2, key=key),
    "SelectiveSSM": lambda key: eqg.nn.SelectiveSSM(3, 4, 4, key=key),
    "Recurrent": lambda key: eqg.nn.Recurrent(
        eqx.nn.GRUCell(3, 4, key=key), checkpoint="replay"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n if n in ("GRU", "LRU") else pytest.param(n, marks=pytest.mark.slow) for n in LAYERS],
)
def test_recurrent_layers(name):
    """Each device has a part of the batch, and all have the weights."""
    params, static = eqx.partition(LAYERS[name](jr.key(0)), eqx.is_inexact_array)
    xs = jr.normal(jr.key(1), (8, 5, 3))

    def total(params, xs):
        return jnp.sum(jnp.sin(eqx.combine(params, static)(xs)[0]))

    in_parts = jax.shard_map(
        lambda params, xs: jax.lax.psum(total(params, xs), "i"),
        mesh=MESH,
        in_specs=(Spec(), Spec("i")),
        out_specs=Spec(),
    )
    got, expected = jax.jit(jax.grad(in_parts))(params, xs), jax.grad(total)(params, xs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-4)
