"""Rules, scans and solvers inside `shard_map`, and over explicit axes of a mesh: each cotangent
has the sharding of its primal, as JAX's own would have."""

import functools as ft

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec

from .helpers import assert_close
from .ops import sin_times, sin_times_elementwise, sin_times_jvp, sin_times_vjp


pytestmark = pytest.mark.versions

REPLICATED = (Spec(), Spec("i"))
WEIGHT = jnp.linspace(0.0, 1.0, 6).reshape(2, 3)
X = jnp.linspace(-1.0, 1.0, 16).reshape(8, 2)
MESH = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Explicit,))
shard = ft.partial(jax.shard_map, mesh=MESH)
total = lambda fn: lambda *args: jnp.sum(jnp.sin(fn(*args)))

# The weight is the same on every device, and the rule has the local part of its cotangent: it
# need not know.
product = eqg.custom_vjp(lambda weight, x: x @ weight)
product.def_fwd(lambda weight, x: (product(weight, x), (weight, x)))
product.def_bwd(lambda r, ct: (r[1].T @ ct, ct @ r[0].T))


# ---------------------------------------------------------------- shard_map


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_weight(check_vma):
    fn = shard(product, in_specs=REPLICATED, out_specs=Spec("i"), check_vma=check_vma)
    plain = jax.grad(total(lambda weight, x: x @ weight), (0, 1))(WEIGHT, X)
    for jit in (lambda f: f, jax.jit):
        assert_close(jit(jax.grad(total(fn), (0, 1)))(WEIGHT, X), plain)


def test_the_gradient_of_a_replicated_weight_is_summed_once():
    loss = lambda weight, x: jnp.sum((x @ eqg.psum_gradient(weight, "i")) ** 2)
    inside = jax.jit(shard(jax.grad(loss), in_specs=REPLICATED, out_specs=Spec()))
    assert_close(inside(WEIGHT, X), 2 * X.T @ X @ WEIGHT)


on_host = eqg.host_function(lambda weight, x: weight * x, out=lambda weight, x: x)
on_host.def_jvp(lambda p, t: (p[0] * p[1], t[0] * p[1] + p[0] * t[1]))


def test_chunked_loss_of_a_replicated_weight():
    """The rule differentiates the loss with respect to the weight, and the sum over the devices
    was taken there, and once more outside. And the same of a host function."""
    loss = lambda weight, x: jnp.sum(jnp.tanh(x @ weight) ** 2)
    rows = lambda fn: lambda weight, x: jnp.sum(jnp.sin(fn(weight[:, 0], x[0])))

    def derivatives(fn):
        local = lambda w, x: jax.lax.psum(fn(w, x), "i")
        whole = shard(local, in_specs=REPLICATED, out_specs=Spec())
        return jax.grad(whole, (0, 1))(WEIGHT, X), jax.jvp(whole, (WEIGHT, X), (WEIGHT, X))[1]

    pairs = (eqg.losses.chunked(loss, chunk=1), loss), (rows(on_host), rows(jnp.multiply))
    run = jax.jit(lambda: [[*map(derivatives, fns)] for fns in zip(*pairs, strict=True)])
    assert_close(*run())


ROOT = lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0)
TWICE = lambda x: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)


def steps_from_the_same_numbers(root, weight, x):
    step = lambda c, v: ((jnp.tanh(c[0] * weight + root(v)), c[1] + weight), c[0][:1] + c[1])
    start = jax.lax.pcast(jnp.zeros(2), ("i",), to="varying"), jnp.ones(2)
    return jax.lax.scan(step, start, x)[1]


LOCAL = [
    lambda root, weight, x: root(x * weight)[jnp.array([1, 0])],
    lambda root, weight, x: jnp.convolve(root(x * weight[0]), weight),
    lambda root, weight, x: jnp.sort(root(x * weight))[:1],
    steps_from_the_same_numbers,
]


def test_a_root_that_is_not_taken():
    """`zero_safe` against the double `where`: its masks differ between devices too."""
    args = jnp.array([0.5, 2.0]), jnp.linspace(-1.0, 2.0, 8)

    def derivatives(root, wrap):
        for local in LOCAL:
            one = lambda *args, f=local: jax.lax.psum(jnp.sum(f(root, *args)), "i")
            loss = shard(wrap(one), in_specs=REPLICATED, out_specs=Spec())
            yield jax.grad(loss, (0, 1))(*args), jax.jvp(loss, args, args)[1]

    pairs = (ROOT, eqg.zero_safe), (TWICE, lambda f: f)
    assert_close(*jax.jit(lambda: [list(derivatives(*pair)) for pair in pairs])())


OPTIONS = [{"checkpoint": "replay"}, {"truncate": 2, "checkpoint": "replay"}]
XS = jnp.linspace(-1.0, 1.0, 6 * 8 * 3).reshape(6, 8, 3)
SQUARE = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)
# NumPy's: a constant, which becomes a tracer where it is made an array of JAX.
SCALE = np.linspace(0.5, 1.5, 3, dtype=jnp.result_type(float))


def scan_loss(options, n, weight, xs):
    step = lambda h, x: (jnp.tanh(h @ weight * SCALE[None] + x), h)
    last, hs = eqg.filter_scan(step, jnp.zeros((n, 3)), xs, **options)
    return jnp.sum(jnp.sin(hs)) + jnp.sum(last)


def plain_scan_loss(options):
    return ft.partial(scan_loss, {"truncate": options.get("truncate")}, 8)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scan_from_zeros(options):
    """The first carry is the same everywhere, and no later one is."""
    local = lambda *args: jax.lax.psum(scan_loss(options, 2, *args), "i")
    whole = shard(local, in_specs=(Spec(), Spec(None, "i")), out_specs=Spec())
    both = whole, plain_scan_loss(options)
    got, expected = jax.jit(lambda *a: [jax.grad(f, (0, 1))(*a) for f in both])(SQUARE, XS)
    assert_close(got, expected, eps=500)
    if options == {"checkpoint": "replay"}:  # one sum over the devices, after the loop
        program = str(jax.make_jaxpr(jax.grad(whole))(SQUARE, XS))
        assert program.count("psum_invariant") <= 2  # and of the loss


def test_a_bounded_while_loop_of_each_device():
    """With sums over the devices in the backward pass, although the lengths differ."""
    lengths, x, weight = jnp.array([5, 3, 0, 9]), jnp.array([0.5, 1.0, 2.0, 0.3]), 1.2

    def local(x, n, weight):
        step = lambda c: (c[0] + 1, jnp.sin(c[1] * weight) + 0.3)
        more = lambda c: jnp.sum(c[0]) < n[0]
        return eqg.filter_while_loop(more, step, (0, x), max_steps=20)[1]

    def written_out(x, weight, n):
        for _ in range(n):
            x = jnp.sin(x * weight) + 0.3
        return x**2

    whole = shard(local, in_specs=(Spec("i"), Spec("i"), Spec()), out_specs=Spec("i"))
    got = jax.jit(jax.grad(lambda x, w: jnp.sum(whole(x, lengths, w) ** 2), (0, 1)))(x, weight)
    grad = jax.grad(written_out, (0, 1))
    each = [grad(y, weight, n) for y, n in zip(x, lengths.tolist(), strict=True)]
    assert_close(got, (jnp.stack([g for g, _ in each]), sum(g for _, g in each)), eps=50)


def test_errors_of_solvers():
    whole = lambda f: shard(f, in_specs=Spec("i"), out_specs=Spec("i"))
    grow = lambda x: eqg.fixed_point(lambda y, x: 2 * y + x, x, x, max_steps=20).value
    with pytest.raises(Exception, match="The fixed point of `<lambda>` was not found"):
        jax.block_until_ready(jax.jit(whole(grow))(jnp.ones(8)))

    def root(x):
        return jnp.sqrt(x)

    solve = eqg.implicit(lambda y, x: y**2 - x)(root)
    # At zero, the matrix is zero.
    grad = jax.jit(jax.grad(lambda x: jnp.sum(whole(solve)(x))))
    with pytest.raises(Exception, match="linear solve for the derivative of `root` failed"):
        jax.block_until_ready(grad(jnp.zeros(8)))
    # `jax.effects_barrier` raises once more what the last new program with a callback on each
    # device raised, also in another test.
    same = lambda x: jax.pure_callback(lambda x: x, x, x)
    jax.block_until_ready(jax.jit(lambda x: whole(same)(x))(jnp.ones(8)))
    jax.effects_barrier()
    # Also if one of the unknowns is the same on all devices.
    gmres = eqg.implicit(lambda y, x: (y[0] ** 2 - x, y[1]), solver=lx.GMRES(1e-5, 1e-5))
    by_gmres = lambda x: gmres(lambda x: (root(x), 0.0))(x)[0]
    with pytest.raises(eqg.RuleError, match=r"`check_vma=False`(?s:.*)leave the solver out"):
        jax.jit(jax.grad(lambda x: jnp.sum(whole(by_gmres)(x))))(jnp.ones(8))


def test_the_mesh_axis_of_a_batch():
    """`spmd_axis_name` reaches the function of a rule."""
    pinned = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(MESH, Spec()))
    mapped = jax.vmap(eqg.elementwise(pinned, lambda _, x: 1.0), spmd_axis_name="i")
    assert jax.jit(mapped)(jnp.ones(8)).sharding.spec == Spec("i")


# ---------------------------------------------------------------- explicit axes


def check(fn, plain, specs, *args, eps=20.0):
    """The gradients in all arguments, and where they are."""
    argnums = tuple(range(len(args)))
    expected = jax.grad(plain, argnums)(*args)
    with jax.set_mesh(EXPLICIT):
        put = lambda x, spec: jax.device_put(x, NamedSharding(EXPLICIT, spec))
        placed = list(map(put, args, specs))
        got = jax.jit(jax.grad(fn, argnums))(*placed)
    assert_close([np.asarray(x) for x in got], [np.asarray(x) for x in expected], eps=eps)
    for grad, x in zip(got, placed, strict=True):
        assert grad.sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize("rule", [sin_times_jvp, sin_times_vjp, sin_times_elementwise])
def test_rules_over_an_explicit_axis(rule):
    args = (jnp.linspace(0.0, 1.0, 8), jnp.linspace(1.0, 3.0, 8))
    check(total(rule), total(sin_times), (Spec("i"), Spec("i")), *args)


def test_replicated_weight_over_an_explicit_axis():
    """Each example has the weight: the sum over the batch is one over the devices."""
    loss = lambda fn: total(jax.vmap(fn, (None, 0)))
    check(loss(product), loss(lambda w, x: x @ w), REPLICATED, WEIGHT, X[:, None])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_scan_over_an_explicit_axis(options):
    fn, plain = ft.partial(scan_loss, options, 8), plain_scan_loss(options)
    check(fn, plain, (Spec(), Spec(None, "i")), SQUARE, XS, eps=500)


def scan_of_roots(root, weight, x):
    step = lambda c, v: (jnp.tanh(c * weight + root(v * weight)), c)
    return jax.lax.scan(step, x, jnp.stack([x, 2 * x]))[1]


OF_ROOTS = [
    lambda root, w, x: jax.lax.cond(w[0, 0] > 0, lambda x: root(w * x), lambda x: x * w, x),
    lambda root, w, x: jnp.pad(root(x * w), ((1, 1), (0, 0))),
    lambda root, w, x: jnp.concatenate([root(x * w), x, x * w]),
    lambda root, w, x: w.T @ jnp.cumsum(root(x * w), 0),
    scan_of_roots,
]


def test_a_root_that_is_not_taken_over_an_explicit_axis():
    """`zero_safe` against the double `where`."""
    loss = lambda root: lambda w, x: sum(jnp.sum(jnp.sin(f(root, w, x))) for f in OF_ROOTS)
    weight, x = jnp.array([[0.5], [2.0]]), jnp.linspace(-1.0, 2.0, 16).reshape(2, 8)
    specs = (Spec(), Spec(None, "i"))
    check(eqg.zero_safe(loss(ROOT)), loss(TWICE), specs, weight, x, eps=200)


def newton(a, b):
    step = lambda y, _: (y - (y**2 + 0.1 * jnp.mean(y) - a * b) / (2 * y), None)
    return jax.lax.scan(step, a, length=16)[0]


product_root = lambda a, b: jnp.sqrt(a * b)
# The first has more unknowns than a dense matrix may have.
SOLUTIONS = [
    (lambda y, a, b: y**2 - a * b, product_root, 320),
    (lambda y, a, b: y**2 + 0.1 * jnp.mean(y) - a * b, newton, 8),
]


@pytest.mark.parametrize(("residual", "fn", "n"), SOLUTIONS)
def test_solution_that_is_sharded(residual, fn, n):
    """Each unknown is on one device, and the equation may have them all."""
    args = jnp.linspace(1.0, 2.0, n), jnp.array(1.5)
    solve = total(eqg.implicit(residual)(fn))
    check(solve, total(fn), (Spec("i"), Spec()), *args, eps=2000)


def test_large_coupled_equation_that_is_sharded():
    coupled = lambda y, a: (y[0] + jnp.mean(y[0]) - a, y[1] - 1.0)
    solve = eqg.implicit(coupled, tolerance=None)(lambda a: (a, 1.0))
    with jax.set_mesh(EXPLICIT):
        a = jax.device_put(jnp.linspace(1.0, 2.0, 320), NamedSharding(EXPLICIT, Spec("i")))
        with pytest.raises(eqg.RuleError, match=r"use `jax\.sharding\.auto_axes` for explicit"):
            jax.grad(lambda a: jnp.sum(solve(a)[0]))(a)


def test_cotangents_that_are_sharded_otherwise_than_their_values():
    """And zeros of a distributed array, a `reshard` of zero, are no term without a tangent."""
    f = eqg.custom_jvp(lambda x: (jnp.sin(x), jnp.sign(x)))

    @f.def_jvp
    def f_jvp(primals, tangents):
        zero = jnp.zeros_like(primals[0])
        return f(*primals), (zero + jnp.cos(primals[0]) * tangents[0], zero)

    x = jax.device_put(jnp.array(2.0), NamedSharding(MESH, Spec()))
    assert_close(jax.jit(jax.grad(lambda x: sum(f(x))))(x), jnp.cos(2.0))
    matvec = eqg.custom_vjp(lambda w, x: w @ x)
    matvec.def_fwd(lambda w, x: (matvec(w, x), (w, x)))
    matvec.def_bwd(lambda r, ct: (jnp.outer(ct, r[1]), ct @ r[0]))
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(matvec(w, x) ** 2), (0, 1)))
    w, x = jnp.linspace(-1.0, 2.0, 24).reshape(3, 8), jnp.linspace(0.5, 1.5, 8)
    expected = jax.grad(lambda w, x: jnp.sum((w @ x) ** 2), (0, 1))(w, x)
    with jax.set_mesh(EXPLICIT):
        got = gradient(w, jax.device_put(x, NamedSharding(EXPLICIT, Spec("i"))))
    assert_close([*map(np.asarray, got)], [*map(np.asarray, expected)], eps=100)
