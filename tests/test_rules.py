"""Rules of calls and shorthands: what is batched, counted, copied and said of them. The numbers
are in `tests/guard/registry/rules.py`."""

import abc
import copy
import functools as ft
import pickle
import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import ste
from jax.experimental import pallas as pl  # noqa: TID251  a kernel

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.x64]

X, Y = jnp.array([0.5, -1.2, 2.0]), jnp.array([1.5, 0.3, -0.7])


# ---------------------------------------------------------------- batches


def test_arguments_without_the_batch():
    """The value of one argument, the derivative of another. Eagerly, an argument without the
    batch is an array, at which the function may look."""
    out = jax.vmap(eqg.replace_gradient, (None, 0))
    loss = lambda s: jnp.sum(jnp.sin(out(X, s)))
    for gradient in (jax.grad(loss), jax.grad(jax.jit(loss))):
        assert_close(gradient(jnp.stack([X, Y])), jnp.stack([jnp.cos(X), jnp.cos(X)]))
    f = eqg.custom_jvp(lambda x, n: x * 2 if n > 1 else x)
    f.def_jvp(lambda p, t: (f(*p), t[0]))
    assert_close(jax.vmap(f, (0, None))(X, 2.0), 2 * X)
    both = lambda x, y: eqg.nondifferentiable((x, y))
    assert jax.jit(lambda x, y: both(x, y)[0])(1.0, 2.0) == 1.0
    assert_close(jax.vmap(both, (0, None))(X, 2.0), (X, jnp.full(3, 2.0)))


def half_batched(w, x):
    return 2 * w, w * x, jnp.ones_like(w), jnp.argmax(w)


half_batched_vjp = eqg.custom_vjp(half_batched)
half_batched_vjp.def_fwd(lambda w, x: (half_batched_vjp(w, x), (w, x)))
half_batched_vjp.def_bwd(lambda r, cts: (2 * cts[0] + r[1] * cts[1], r[0] * cts[1]))
LOOPS = {
    "jit": lambda f, i, w, x: jax.jit(f)(w, x),
    "switch": lambda f, i, w, x: jax.lax.switch(i, [f, f], w, x),
    "fori": lambda f, i, w, x: jax.lax.fori_loop(0, 2, lambda _, c: f(c[0], x), f(w, x)),
    "while": lambda f, i, w, x: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1][0], x)), (0, f(w, x))
    )[1],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_an_output_that_is_not_batched(loop):
    """Its tangent comes from the same call as the others, and is batched with them."""

    def loss(f):
        vmapped = jax.vmap(lambda i, w, x: LOOPS[loop](f, i, w, x), (0, None, 0))
        outs = lambda w, xs: vmapped(jnp.arange(3) % 2, w, xs)[:3]
        return lambda w, xs: sum(jnp.sum(jnp.sin(o)) for o in outs(w, xs))

    args = (jnp.array([0.5, 0.7]), jnp.arange(6.0).reshape(3, 2))
    got, want = loss(half_batched_vjp), loss(half_batched)
    assert_close(jax.jvp(got, args, args), jax.jvp(want, args, args), eps=100)
    if loop != "while":
        assert_close(jax.grad(got, (0, 1))(*args), jax.grad(want, (0, 1))(*args), eps=100)


def _rounded(kind):
    f = getattr(eqg, kind)(lambda w: jnp.round(w))
    if kind == "custom_jvp":
        f.def_jvp(lambda primals, tangents: (f(*primals), tangents[0]))
    else:
        f.def_fwd(lambda w: (f(w), None))
        f.def_bwd(lambda _, ct: (ct,))
    return f


@pytest.mark.parametrize(
    "rounded",
    [_rounded("custom_jvp"), _rounded("custom_vjp"), ste.round],
    ids=["f", "r", "ste"],
)
def test_a_call_without_the_batch_stays_one_call_under_a_named_axis(rounded):
    """In a gradient, with the name of an axis that the function does not use, it was computed
    for each example, and so was all that used its result: a convolution of weights that are
    quantized was a grouped one, and took several hundred times as long."""
    w, xs = jnp.ones((5, 3)), jnp.ones((64, 3))
    mapped = jax.vmap(lambda w, x: rounded(w) @ x, (None, 0), axis_name="i")
    loss = lambda mapped: lambda w, xs: jnp.sum(mapped(w, xs))
    for gradient in (jax.grad(loss(mapped)), jax.grad(loss(jax.jit(mapped)))):
        assert_close(gradient(w, xs), jnp.full((5, 3), 64.0))
        assert "[64,5,3]" not in str(jax.make_jaxpr(gradient)(w, xs))
    # `out_axes=None` accepts such an output.
    step = lambda x, w: (x * rounded(w), rounded(w))
    mapped = jax.vmap(step, (0, None), out_axes=(0, None), axis_name="i")
    for fn in (mapped, jax.jit(mapped)):
        assert_close(fn(jnp.arange(4.0), 1.6), (2 * jnp.arange(4.0), jnp.array(2.0)))
        assert jax.grad(lambda w, fn=fn: jnp.sum(fn(jnp.arange(4.0), w)[0]))(1.6) == 6.0


def test_rules_that_use_the_axis_if_some_arguments_are_perturbed():
    """A rule is traced with all arguments perturbed to see whether it uses the axis. JAX runs
    this one after the `vmap`, where the axis has no name."""
    index = lambda: jax.lax.axis_index("i").astype(float)
    f = eqg.custom_vjp(lambda a, b: a * b)

    @f.def_fwd
    def fwd(a, b, *, perturbed):
        factor = 1 + index() if perturbed == (True, False) else jnp.ones(())
        return f(a, b), (a, b, factor)

    f.def_bwd(lambda r, ct: (ct * r[1] * r[2], ct * r[0]))
    xs = jnp.array([1.0, 2.0, 3.0])
    mapped = jax.vmap(lambda a, b, x: f(a, b) * x, (None, None, 0), axis_name="i")
    for transform in (lambda f: f, jax.jit, jax.checkpoint):
        with pytest.raises(NameError, match="unbound axis name") as info:
            jax.grad(lambda a, t=transform: jnp.sum(t(mapped)(a, 3.0, xs)))(2.0)
        assert "Give an argument the batch dimension" in info.value.__notes__[0]
    # What the note says: with the batch dimension, it is as if each example had the rule.
    one = lambda a, b, x: f(a + 0 * index(), b) * x
    batch = jax.vmap(one, (None, None, 0), axis_name="i")
    assert jax.grad(lambda a: jnp.sum(batch(a, 3.0, xs)))(2.0) == 42.0


@pytest.mark.parametrize("use", ["forward", "backward", "sum"])
def test_only_the_rules_use_the_axis(use):
    index = lambda: 1.0 + jax.lax.axis_index("i").astype(float)
    f = eqg.custom_vjp(lambda w: w * 1.0)
    f.def_fwd(lambda w: (f(w), index() if use == "forward" else None))
    of_example = {"forward": lambda r, ct: r * ct, "backward": lambda r, ct: index() * ct}
    bwd = of_example.get(use, lambda _, ct: jax.lax.psum(ct, "i"))
    f.def_bwd(lambda r, ct: (bwd(r, ct),))
    xs = jnp.array([1.0, 2.0, 3.0])
    mapped = jax.vmap(lambda w, x: f(w) * x, (None, 0), axis_name="i")
    for transform in (lambda f: f, jax.jit):
        gradient = jax.grad(lambda w, t=transform: jnp.sum(t(mapped)(w, xs)))(2.0)
        assert gradient == (18.0 if use == "sum" else 14.0)


def test_a_collective_or_a_constant_of_a_value_without_the_batch():
    """A sum over the axis has no batch dimension: a test of JAX's own."""
    f = eqg.custom_vjp(lambda w: jax.lax.psum(w, "i"))
    f.def_fwd(lambda w: (f(w), None))
    f.def_bwd(lambda _, ct: (2 * ct,))
    for fn in (f, jax.jit(f)):
        mapped = jax.vmap(lambda _, w, fn=fn: fn(w), (0, None), out_axes=None, axis_name="i")
        for run in (mapped, jax.jit(mapped)):
            assert jax.value_and_grad(run, 1)(jnp.arange(4.0), 2.0) == (8.0, 2.0)
    g = eqg.custom_jvp(lambda a: (a * 1.0, jnp.ones((), int)))
    g.def_jvp(lambda primals, tangents: (g(*primals), (tangents[0], None)))
    added = jax.vmap(lambda x: g(2.0)[1].at[()].add(1), axis_name="i", out_axes=None)
    assert added(jnp.ones(3)) == 2  # an array, and no literal of a program


# ---------------------------------------------------------------- rules for batches


def test_one_weight_gradient_for_the_batch():
    """The purpose: no product per example is left, and no sum over their results."""
    shapes = []
    for batching in (False, True):
        f = eqg.custom_vjp(lambda w, x: x @ w)
        f.def_fwd(lambda w, x, f=f: (f(w, x), (w, x)))
        f.def_bwd(lambda r, ct: (r[1].T @ ct, ct @ r[0].T))
        rule = lambda size, batched, w, x, f=f: (
            f(w, x.reshape(-1, 3)).reshape(size, 2, 4),
            True,
        )
        if batching:
            f.def_vmap(rule)
        total = lambda w, xs, f=f: jnp.sum(jnp.sin(jax.vmap(f, (None, 0))(w, xs)))
        shapes.append(
            str(jax.make_jaxpr(jax.grad(total))(jnp.ones((3, 4)), jnp.ones((5, 2, 3))))
        )
    # One gradient of the weight for each of five examples.
    assert ["[5,3,4]" in text for text in shapes] == [True, False]


def test_of_a_function_that_can_not_be_traced():
    f = eqg.custom_jvp(lambda x: np.sin(x))
    f.def_jvp(lambda p, t: (np.sin(p[0]), np.cos(p[0]) * t[0]))
    f.def_vmap(lambda axis_size, batched, x: (np.sin(x), batched[0]))
    assert_close(jax.vmap(f)(X), jnp.sin(X))


def test_batched_configuration_and_closures():
    """The rule knows of positional arguments only; others are batched as without it."""

    def never(axis_size, batched, *args, **kwargs):
        raise AssertionError("called though no positional argument is batched")

    f = eqg.custom_jvp(lambda x, *, scale: scale * x)
    f.def_jvp(lambda p, t, *, scale: (f(*p, scale=scale), scale * t[0]))
    f.def_vmap(never)

    def closing(scale):
        g = eqg.custom_jvp(lambda x: scale * x)
        g.def_jvp(lambda p, t: (g(*p), scale * t[0]))
        g.def_vmap(never)
        return jax.grad(g)(2.0)

    scales = jnp.arange(3.0)
    for slope in (lambda s: jax.grad(lambda x: f(x, scale=s))(2.0), closing, jax.jit(closing)):
        assert jnp.array_equal(jax.vmap(slope)(scales), scales)


# ---------------------------------------------------------------- a decorated function


def test_effects_happen_once(capfd):
    f = eqg.custom_jvp(lambda x: (jax.debug.print("seen {}", x), jnp.sin(x))[1])
    f.def_jvp(lambda p, t: (f(*p), jnp.cos(p[0]) * t[0]))
    for run in (jax.jit(f), jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f))):
        run(0.5)
        jax.effects_barrier()
        assert capfd.readouterr().out.count("seen 0.5") == 1


def test_d9_abstract_methods():
    class Abstract(eqx.Module):
        apply = eqg.custom_jvp(abc.abstractmethod(lambda self, x: x))

    with pytest.raises(TypeError, match="abstract"):
        Abstract()

    class Concrete(Abstract):
        @eqg.custom_jvp
        def apply(self, x):
            return x

        apply.def_jvp(lambda p, t: (p[1], 2 * t[1]))

    assert jax.grad(Concrete().apply)(1.0) == 2.0


def test_def_with_and_without_options():
    f, g, rule = eqg.custom_jvp(lambda x: x), eqg.custom_vjp(lambda x: x), lambda *args: args
    assert f.def_jvp(rule) is f.def_jvp(symbolic_zeros=True)(rule) is rule
    assert g.def_fwd(rule) is g.def_bwd(rule) is g.def_bwd(symbolic_zeros=True)(rule) is rule
    assert g.def_jvp(symbolic_zeros=False)(rule) is g.def_vmap(rule) is rule


def _local(scale):
    f = eqg.custom_jvp(lambda x: scale * x)
    f.def_jvp(lambda p, t: (f(*p), 7 * t[0]))
    return f


def test_a_forward_pass_may_leave_a_call_to_jax():
    @eqg.custom_vjp
    def f(x, y):
        return jnp.sin(x) * y, jnp.argmax(x), "static"

    @f.def_fwd
    def _(x, y, *, perturbed):
        if perturbed[1]:
            return NotImplemented
        return f(x, y), y

    f.def_bwd(lambda y, ct: (10 * y * ct[0], None))
    loss, plain = (lambda *args, g=g: jnp.sum(g(*args)[0]) for g in (f, f.__wrapped__))
    for transform in (lambda g: g, jax.jit):
        assert_close(transform(jax.grad(loss))(X, Y), 10 * Y)
        got = transform(jax.grad(loss, (0, 1)))(X, Y)
        assert_close(got, jax.grad(plain, (0, 1))(X, Y))
    both = lambda loss: jax.hessian(lambda xy: loss(*xy))((X, Y))
    assert_close(both(loss), both(plain))
    xs = jnp.stack([X, 2 * X])
    of_batch = lambda loss: jax.grad(lambda y: jnp.sum(jax.vmap(loss, (0, None))(xs, y)))
    assert_close(of_batch(loss)(Y), of_batch(plain)(Y))


def test_a_local_function_is_a_tree_and_is_copied():
    f = _local(2.0)
    leaves, treedef = jax.tree.flatten(f)
    for other in (copy.deepcopy(f), jax.tree.unflatten(treedef, leaves)):
        assert (jax.grad(other)(1.0), other.__name__) == (7.0, f.__name__)
    assert eqx.filter_jit(lambda g, x: jax.grad(g)(x))(f, 1.0) == 7.0
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"local object|lambda"):
        pickle.dumps(f)


@pytest.fixture(params=["jvp", "vjp"])
def linear(request):
    """A decorated Module with arrays, whose rules call it by name."""
    f = getattr(eqg, f"custom_{request.param}")(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    if request.param == "jvp":
        f.def_jvp(lambda p, t: (f(*p), 3 * t[0]))
    else:
        f.def_fwd(lambda x: (f(x), None))
        f.def_bwd(lambda r, ct: (3 * ct,))
    return f


def test_a_copy_of_a_decorated_module_has_its_own_arrays_in_its_rules(linear):
    moved = eqx.tree_at(lambda f: f.__wrapped__.bias, linear, linear.__wrapped__.bias + 100)
    x, value = jnp.array([1.0, 2.0]), lambda f, x: jax.vjp(f, x)[0]
    for run in (ft.partial(value, moved), jax.jit(ft.partial(value, moved))):
        assert_close(run(x), moved.__wrapped__(x))
    assert_close(value(linear, x), linear.__wrapped__(x))  # and the first one too
    assert any(leaf is linear.__wrapped__.bias for leaf in jax.tree.leaves(linear))
    both = jax.tree.map(lambda a: jnp.stack([a, a + 1]), eqx.filter(linear, eqx.is_array))
    both = eqx.combine(both, linear)
    run = lambda fn: eqx.filter_vmap(fn, in_axes=(eqx.if_array(0), None))(both, x)
    assert_close(run(value), run(lambda f, x: f.__wrapped__(x)))
    loop = lambda x, f: jnp.sum(jax.lax.scan(lambda h, _: (f(h), None), x, None, 2)[0])
    value, grad = eqx.filter_jit(jax.value_and_grad(loop))(x, moved)
    assert_close((value, grad), (loop(x, moved.__wrapped__), jnp.full(2, 9.0)), eps=1000)
    with pytest.raises(eqg.RuleError, match=r"closes over(?s:.)*decorate its method"):
        eqx.filter_grad(lambda f: jnp.sum(f(x)))(linear)


def test_a_compiled_function_in_a_rule_is_not_traced_for_a_copy():
    module = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    f = eqg.custom_jvp(module)
    inner = jax.jit(lambda x: f(x))  # it would keep the arrays of the copy
    f.def_jvp(lambda p, t: (inner(*p), 3 * t[0]))
    with pytest.raises(eqg.RuleError, match="runs for a copy that has other arrays"):
        jax.vjp(jax.tree.map(lambda x: x + 1, f), jnp.ones(2))
    assert_close(jax.vjp(f, jnp.ones(2))[0], module(jnp.ones(2)))


# ---------------------------------------------------------------- shorthands


def test_elementwise():
    """Numbers as partial derivatives, a keyword behind a default, and NumPy."""
    f = eqg.elementwise(lambda x, y=2.0, z=3.0: x * z, lambda out, x, y, z: (7, None, None))
    assert jax.value_and_grad(lambda x: f(x, z=5.0))(1.0) == (5.0, 7.0)
    f = eqg.elementwise(np.sin, lambda out, x: jnp.cos(x))  # eagerly, and in its derivative
    assert_close(jax.grad(f)(1.0), jnp.cos(1.0))


SHORTHANDS = [
    lambda k: eqg.custom_gradient(lambda x: (x * k, lambda ct: ct * k))(X).sum(),
    lambda k: eqg.elementwise(lambda x: x * k, lambda out, x: k)(X).sum(),
    lambda k: eqg.custom_gradient(lambda x, *, k: (x * k, lambda ct: ct))(X, k=k).sum(),
]


@pytest.mark.parametrize("loss", SHORTHANDS)
def test_errors_name_the_line_of_the_user(loss):
    """And never a file of this library."""
    for run in (jax.grad(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(eqg.RuleError, match="was differentiated with respect to") as caught:
            run(2.0)
        assert set(re.findall(r'file "(.*)"', str(caught.value))) == {__file__}


def test_with_gradient_of_methods():
    """A number in a Module is static, and the surrogate may branch on it, under `jit` too."""

    class Leaky(eqx.Module):
        weight: jax.Array
        slope: float = 0.1

        def hard(self, x):
            return jnp.round(self.weight * x)

        def smooth(self, x):
            return self.weight * x if self.slope > 0 else x

        __call__ = eqg.with_gradient_of(hard, smooth)
        apply = eqg.with_gradient_of(hard, smooth)

    leaky, x = Leaky(jnp.array(2.0)), jnp.array([0.3, 0.4])
    for loss in (lambda f, x: jnp.sum(f(x)), lambda f, x: jnp.sum(f.apply(x))):
        grad = eqx.filter_jit(eqx.filter_grad(loss))(leaky, x)
        assert_close(grad.weight, jnp.sum(x))
        assert jax.jit(loss, static_argnums=0)(Leaky(2.0), x) == 2.0


def test_a_setup_gets_the_options_that_it_has_parameters_for():
    setup = lambda out, x, *, n: n * out / x
    f = eqg.elementwise(lambda x, *, n: x**n, lambda out, x, r: r, setup=setup)
    assert jax.grad(lambda x: f(x, n=3))(2.0) == 12.0


LINEAR = eqx.nn.Linear(2, 3, key=jax.random.key(0))
TANGENTS = [
    (LINEAR, eqg.tangents.of(LINEAR, bias=jnp.ones(3))),
    ([jnp.ones(2), np.arange(2)], [jnp.ones(2), np.zeros(2, jax.dtypes.float0)]),
    ((jnp.ones(2), {"a": jnp.ones(3)}), (jnp.ones(2), None)),
]


@pytest.mark.parametrize(("primal", "t"), TANGENTS)
def test_a_tangent_and_its_value_in_the_wrong_order(primal, t):
    materialize = eqg.tangents.materialize
    assert jax.tree.leaves(materialize(primal, t))
    with pytest.raises(eqg.RuleError, match="A tangent does not fit its value"):
        materialize(t, primal)


# ---------------------------------------------------------------- linear functions

MATRIX = np.array([[0.5, -1.0, 0.3], [0.2, 0.7, -0.4]])


def _by_columns(matrix, x):
    """`matrix @ x`, in a loop that JAX can't transpose."""
    matrix = jnp.asarray(matrix, x.dtype)
    add_column = lambda s: (s[0] + 1, s[1] + matrix[:, s[0]] * x[s[0]])
    start = (0, 0 * matrix[:, 0] * x[0])
    return jax.lax.while_loop(lambda s: s[0] < matrix.shape[1], add_column, start)[1]


matvec = eqg.linear_function(ft.partial(_by_columns, MATRIX), ft.partial(_by_columns, MATRIX.T))
plain_matvec = lambda x: jnp.asarray(MATRIX, x.dtype) @ x
HIGHER = {"grad": jax.grad, "hessian": jax.hessian}
HIGHER["reverse over reverse"] = lambda f, n: jax.jacrev(jax.grad(f, n), n)
SCANS = {"scan": jax.lax.scan} | {
    method: ft.partial(eqg.filter_scan, checkpoint=method) for method in ("replay", "sqrt")
}


@pytest.mark.parametrize("scan", SCANS)
def test_a_linear_function_that_jax_cannot_transpose(scan):
    """In a scan."""

    def of(f, scan):
        def run(x, scale):
            step = lambda c, t: (jnp.tanh(c + t * scale * jax.checkpoint(f)(x * c[0])), None)
            return jnp.sum(scan(step, jnp.ones(2), jnp.array([0.3, 0.5, 0.4]))[0])

        return run

    for derivative in HIGHER.values():
        got = jax.jit(derivative(of(matvec, SCANS[scan]), (0, 1)))(X, 0.7)
        expected = derivative(of(plain_matvec, jax.lax.scan), (0, 1))(X, 0.7)
        assert_close(got, expected, eps=200)


def test_a_kernel():
    """jax#26121. The interpreter of Pallas has no transpose."""

    def kernel(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...] + x_ref[...][::-1]

    call = lambda x: pl.pallas_call(kernel, jax.typeof(x), interpret=True)(x)
    f = eqg.linear_function(call, call)  # symmetric
    of = lambda f: lambda x: jnp.sum(jnp.sin(f(x)))
    for derivative in (jax.grad, jax.hessian):
        expected = derivative(of(lambda x: 2 * x + x[::-1]))(X)
        assert_close(jax.jit(derivative(of(f)))(X), expected)


def test_a_complex_value_of_a_real_argument():
    """A discrete Fourier transform: only the real part of the adjoint is a cotangent."""
    f = eqg.linear_function(jnp.fft.fft, lambda y: y.size * jnp.fft.ifft(y))
    power = lambda f: lambda x: jnp.sum(jnp.abs(f(x)) ** 4)
    for derivative in (jax.grad, jax.hessian):
        got = derivative(power(f))(X)
        assert got.dtype == X.dtype
        assert_close(got, derivative(power(jnp.fft.fft))(X), eps=2000)
