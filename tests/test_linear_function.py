"""`linear_function`, against autodiff of the same maps as matrices."""

import functools as ft
import pickle

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError
from jax.experimental import pallas as pl  # noqa: TID251  a kernel
from jax.sharding import AxisType, PartitionSpec as Spec

from .helpers import assert_close


MATRIX = np.array([[0.5, -1.0, 0.3], [0.2, 0.7, -0.4]])


def product(matrix, x):
    """`matrix @ x`, in a loop that JAX can't transpose."""
    matrix = jnp.asarray(matrix, x.dtype)
    add_column = lambda s: (s[0] + 1, s[1] + matrix[:, s[0]] * x[s[0]])
    start = (0, 0 * matrix[:, 0] * x[0])
    return jax.lax.while_loop(lambda s: s[0] < matrix.shape[1], add_column, start)[1]


@eqg.linear_function
def linear(x, scale=1.0):
    return scale * (jnp.asarray(MATRIX, x.dtype) @ x)


@linear.def_rmatvec
def linear_rmatvec(y, scale=1.0):
    return scale * (jnp.asarray(MATRIX.T, y.dtype) @ y)


def witness(x, scale=1.0):
    return scale * (jnp.asarray(MATRIX, x.dtype) @ x)


X = jnp.array([1.0, -0.5, 2.0])


def loss(f):
    return lambda x, scale: jnp.sum(jnp.sin(f(x, scale)) * x[0])


ORDERS = {
    "grad": jax.grad,
    "forward": jax.jacfwd,
    "hessian": jax.hessian,
    "reverse over reverse": lambda f, n: jax.jacrev(jax.grad(f, n), n),
    "reverse over forward": lambda f, n: jax.jacrev(jax.jacfwd(f, n), n),
    "third": lambda f, n: jax.jacrev(jax.hessian(f, n), n),
}


@pytest.mark.parametrize(
    "order",
    [pytest.param(o, marks=pytest.mark.thorough) if o == "third" else o for o in ORDERS],
)
def test_every_order_in_the_argument_and_the_parameter(order):
    derivative = ORDERS[order]
    expected = derivative(loss(witness), (0, 1))(X, 2.0)
    assert_close(derivative(loss(linear), (0, 1))(X, 2.0), expected, eps=200)
    assert_close(jax.jit(derivative(loss(linear), (0, 1)))(X, 2.0), expected, eps=200)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_a_map_that_jax_cannot_transpose(order):
    f = eqg.linear_function(ft.partial(product, MATRIX), ft.partial(product, MATRIX.T))
    of = lambda f: lambda x: jnp.sum(jnp.sin(f(x)) * x[0])
    got = jax.jit(ORDERS[order](of(f), 0))(X)
    assert_close(got, ORDERS[order](of(witness), 0)(X), eps=200)


def test_it_is_linear_for_jax():
    y = jnp.array([1.0, 2.0])
    (back,) = jax.linear_transpose(linear, X)(y)
    assert_close(back, jnp.asarray(MATRIX.T, y.dtype) @ y)
    twice = jax.linear_transpose(lambda y: jax.linear_transpose(linear, X)(y)[0], y)
    assert_close(twice(X)[0], witness(X))


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_vmap(in_axes):
    xs = jnp.stack([X, 2 * X, -X]) if in_axes[0] == 0 else X
    scales = jnp.array([1.0, -2.0, 0.5]) if in_axes[1] == 0 else jnp.array(0.7)
    of = lambda f: lambda *args: jnp.sum(jax.vmap(f, in_axes)(*args) ** 3)
    for derivative in (jax.grad, jax.hessian):
        got = jax.jit(derivative(of(linear), (0, 1)))(xs, scales)
        assert_close(got, derivative(of(witness), (0, 1))(xs, scales), eps=1000)


SCANS = {
    "scan": jax.lax.scan,
    "replay": ft.partial(eqg.filter_scan, checkpoint="replay"),
    "sqrt": ft.partial(eqg.filter_scan, checkpoint="sqrt"),
}


@pytest.mark.parametrize("scan", SCANS)
def test_inside_a_scan(scan):
    def of(f, scan):
        def run(x, scale):
            step = lambda c, t: (jnp.tanh(c + t * jax.checkpoint(f)(x * c[0], scale)), None)
            return jnp.sum(scan(step, jnp.ones(2), jnp.array([0.3, 0.5, 0.4]))[0])

        return run

    for derivative in (jax.grad, jax.hessian):
        got = jax.jit(derivative(of(linear, SCANS[scan]), (0, 1)))(X, 0.7)
        expected = derivative(of(witness, jax.lax.scan), (0, 1))(X, 0.7)
        assert_close(got, expected, eps=100)


def test_inside_a_rule():
    """Also in an argument in which it happens to be linear as well."""

    def squared(f):
        g = eqg.custom_jvp(lambda x, s: f(x, s) ** 2)

        @g.def_jvp
        def rule(primals, tangents):
            (x, s), (t_x, t_s) = primals, tangents
            return g(x, s), 2 * f(x, s) * (f(t_x, s) + f(x, t_s))

        return lambda x, s: jnp.sum(jnp.cos(g(x, s)))

    for derivative in (jax.grad, jax.hessian, ORDERS["reverse over reverse"]):
        got = jax.jit(derivative(squared(linear), (0, 1)))(X, 0.7)
        assert_close(got, derivative(squared(witness), (0, 1))(X, 0.7), eps=500)


def test_what_it_closes_over_is_differentiated():
    def of(make):
        return lambda theta, x: jnp.sum(jnp.sin(make(theta)(x)))

    def make(theta):
        return eqg.linear_function(
            lambda x: theta[0] ** 2 * linear(x), lambda y: theta[0] ** 2 * linear_rmatvec(y)
        )

    plain = lambda theta: lambda x: theta[0] ** 2 * witness(x)
    theta = jnp.array([0.7, 1.0])
    for derivative in (jax.grad, jax.hessian, ORDERS["reverse over reverse"]):
        expected = derivative(of(plain), (0, 1))(theta, X)
        assert_close(derivative(of(make), (0, 1))(theta, X), expected, eps=100)
        assert_close(jax.jit(derivative(of(make), (0, 1)))(theta, X), expected, eps=100)
    thetas = jnp.stack([theta, 2 * theta])
    batched = lambda make: jax.vmap(jax.grad(of(make)), (0, None))(thetas, X)
    assert_close(batched(make), batched(plain), eps=100)


class Operator(eqx.Module):
    matrix: jax.Array
    name: str = "operator"

    @eqg.linear_function(argnum=1)
    def __call__(self, x, *, scale):
        return {"y": scale * (self.matrix @ x["a"]), "sum": jnp.sum(x["b"])}

    @__call__.def_rmatvec
    def _adjoint(self, y, *, scale):
        b = jnp.broadcast_to(y["sum"], 2)
        return {"a": scale * (self.matrix.T @ y["y"]), "b": b, "none": None}


def test_a_method_with_trees():
    def of(f):
        def run(matrix, x, scale):
            out = f(Operator(matrix), x, scale)
            return jnp.sum(out["y"] ** 3) * out["sum"]

        return run

    plain = lambda op, x, scale: {"y": scale * (op.matrix @ x["a"]), "sum": jnp.sum(x["b"])}
    x = {"a": X, "b": jnp.array([0.5, 1.5]), "none": None}
    args = (jnp.asarray(MATRIX, X.dtype), x, jnp.array(0.7))
    for derivative in (jax.grad, jax.hessian):
        got = jax.jit(derivative(of(lambda op, x, s: op(x, scale=s)), (0, 1, 2)))(*args)
        assert_close(got, derivative(of(plain), (0, 1, 2))(*args), eps=1000)
    by_keyword = jax.grad(lambda x: Operator(args[0])(x=x, scale=1.0)["sum"])(x)
    assert_close(by_keyword["b"], jnp.ones(2))


def test_in_a_linear_solver():
    """Which transposes the operator, for the backward pass."""
    matrix, b = jnp.array([[2.0, 0.3], [-0.5, 1.0]]), jnp.array([0.3, 0.7])
    f = eqg.linear_function(ft.partial(product, matrix), ft.partial(product, matrix.T))
    solve = lambda b: jax.scipy.sparse.linalg.gmres(f, b)[0]
    assert_close(jax.jacrev(solve)(b), jnp.linalg.inv(matrix), eps=100)


def test_an_argument_of_a_class_that_computes():
    """JAX unflattens arrays, tracers, `None` and `object()` only."""

    @jax.tree_util.register_pytree_node_class
    class Points:
        def __init__(self, a):
            self.a = a if type(a) is object or a is None else jnp.asarray(a)

        def tree_flatten(self):
            return (self.a,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    f = eqg.linear_function(
        lambda p: Points(linear(p.a)), lambda q: Points(linear_rmatvec(q.a))
    )
    got = jax.jit(jax.hessian(lambda x: jnp.sum(f(Points(x)).a ** 2)))(X)
    assert_close(got, jax.hessian(lambda x: jnp.sum(witness(x) ** 2))(X))


def test_a_kernel():
    """jax#26121. The interpreter of Pallas has no transpose."""

    def kernel(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...] + x_ref[...][::-1]

    def call(x):
        return pl.pallas_call(kernel, jax.typeof(x), interpret=True)(x)

    f = eqg.linear_function(call, call)  # symmetric
    plain = lambda x: 2 * x + x[::-1]
    of = lambda f: lambda x: jnp.sum(jnp.sin(f(x)))
    for derivative in (jax.grad, jax.hessian):
        assert_close(jax.jit(derivative(of(f)))(X), derivative(of(plain))(X))


def test_complex_maps_are_given_by_their_adjoint():
    with jax.enable_x64(True):
        matrix = jnp.asarray(MATRIX + 1j * MATRIX[::-1, ::-1])
        f = eqg.linear_function(lambda z: matrix @ z, lambda y: matrix.conj().T @ y)
        plain = lambda z: matrix @ z
        z, ct = jnp.array([1.0 + 2.0j, 0.3, -1.0j]), jnp.array([1.0 + 1.0j, 2.0 - 1.0j])
        assert_close(jax.vjp(f, z)[1](ct), jax.vjp(plain, z)[1](ct))
        norm = lambda f: lambda z: jnp.sum(jnp.abs(f(z)) ** 2)
        assert_close(jax.grad(norm(f))(z), jax.grad(norm(plain))(z))
        # <f(z), ct> = <z, rmatvec(ct)>, with the inner product of complex vectors.
        assert_close(jnp.vdot(f(z), ct), jnp.vdot(z, linear_adjoint_of(f, z)(ct)))


def linear_adjoint_of(f, z):
    transpose = jax.linear_transpose(f, z)
    return lambda ct: jnp.conj(transpose(jnp.conj(ct))[0])


def test_a_complex_value_of_a_real_argument():
    """A discrete Fourier transform: only the real part of the adjoint is a cotangent."""
    f = eqg.linear_function(jnp.fft.fft, lambda y: y.size * jnp.fft.ifft(y))
    power = lambda f: lambda x: jnp.sum(jnp.abs(f(x)) ** 4)
    for derivative in (jax.grad, jax.hessian):
        got = derivative(power(f))(X)
        assert got.dtype == X.dtype
        assert_close(got, derivative(power(jnp.fft.fft))(X), eps=2000)


def test_a_named_axis():
    """Whose transpose sums over it."""
    f = eqg.linear_function(
        lambda x: jax.lax.psum(2 * x, "i"), lambda y: jax.lax.psum(2 * y, "i")
    )
    plain = lambda x: jax.lax.psum(2 * x, "i")
    of = lambda f: lambda xs: jnp.sum(jnp.sin(jax.vmap(f, axis_name="i")(xs)))
    assert_close(jax.grad(of(f))(X), jax.grad(of(plain))(X))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))

    def of(f):
        specs = {"in_specs": (Spec("i"), Spec()), "out_specs": Spec("i")}
        local = lambda x, s: jax.vmap(f, (0, None))(x, s)
        sharded = jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)
        return lambda *args: jnp.sum(jnp.sin(sharded(*args)))

    args = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3), jnp.array(0.7)
    plain = lambda x, s: jnp.sum(jnp.sin(jax.vmap(witness, (0, None))(x, s)))
    assert_close(jax.jit(jax.grad(of(linear), (0, 1)))(*args), jax.grad(plain, (0, 1))(*args))


def test_it_may_be_passed_to_a_function():
    run = eqx.filter_jit(lambda f, x: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x))
    assert_close(run(linear, X), jax.grad(lambda x: jnp.sum(witness(x) ** 2))(X))

    @eqg.custom_vjp
    def apply(f, x):
        return f(x)

    apply.def_fwd(lambda f, x: (apply(f, x), f))
    apply.def_bwd(lambda f, ct: (None, jax.linear_transpose(f, X)(ct)[0]))

    def inside(theta, x):
        f = eqg.linear_function(lambda x: theta * x, lambda y: theta * y)
        return jnp.sum(apply(f, x) ** 2)

    got = jax.jit(jax.grad(inside, 1))(3.0, X)
    assert_close(got, 18.0 * X)


def test_pickle_and_name():
    assert linear.__name__ == "linear"
    assert repr(linear) == "<eqx_grads.LinearFunction of linear>"
    assert jnp.array_equal(pickle.loads(pickle.dumps(linear))(X), linear(X))
    assert "Operator.__call__" in repr(Operator(X).__call__)
    assert jax.tree.leaves(linear) == []


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_check_rule_compares_the_adjoint_with_the_map(factor):
    f = eqg.linear_function(witness, lambda y: factor * (jnp.asarray(MATRIX.T, y.dtype) @ y))
    report = eqgt.check_rule(f, X, checks=("forward", "reverse"), raises=False)
    assert [failure.check for failure in report.failures] == ["reverse"] * (factor != 1)


def adjoint(y):
    return jnp.asarray(MATRIX.T, y.dtype) @ y


ERRORS = {
    "not floating": (
        lambda: linear(jnp.arange(3)),
        r"not floating or complex.\n  at `x`: int\d+",
    ),
    "affine": (
        lambda: jax.jit(eqg.linear_function(lambda x: witness(x) + 1, adjoint))(X),
        "not linear in `x`: it adds something that `x` does not multiply",
    ),
    "not linear": (
        lambda: jax.jit(eqg.linear_function(lambda x: witness(jnp.sin(x)), adjoint))(X),
        "not linear in `x`: it applies `sin` to `x`",
    ),
    "another adjoint": (
        lambda: jax.jit(eqg.linear_function(witness, lambda y: y))(X),
        r"adjoint `\S*` of `witness` returned what is not like `x`.\n  at x: the value is",
    ),
    "another tree": (
        lambda: jax.jit(eqg.linear_function(witness, lambda y: (adjoint(y),)))(X),
        r"not like `x`.\n  `x` is float\d+\[3\]\n  what was returned is \(float\d+\[3\],\)",
    ),
    "adjoint is affine": (
        lambda: jax.jit(eqg.linear_function(witness, lambda y: adjoint(y) + 1))(X),
        "is not linear in its argument: it adds something",
    ),
    "no adjoint": (lambda: eqg.linear_function(witness)(X), "`witness` has no adjoint"),
    "adjoint without the parameter": (
        lambda: jax.jit(eqg.linear_function(witness, adjoint))(X, 1.0),
        r"`adjoint` can't be called as rules are.*\n(.*\n)+`rmatvec` is called as `matvec` is",
    ),
    "argnum": (
        lambda: eqg.linear_function(witness, adjoint, argnum="x"),
        "The `argnum` of `linear_function` is not the position of an argument",
    ),
    "no such argument": (
        lambda: eqg.linear_function(witness, adjoint, argnum=1)(X),
        "without the argument in which it is linear",
    ),
    "an integer output": (
        lambda: jax.jit(eqg.linear_function(lambda x: (x, jnp.arange(2)), lambda y: y[0]))(X),
        r"output that is not floating or complex.\n  at out\[1\]: int\d+\[2\]",
    ),
    "not a function": (
        lambda: eqg.linear_function(witness, 3),
        "`rmatvec` of `linear_function`",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    fn, match = ERRORS[case]
    with pytest.raises(RuleError, match=match):
        fn()


def test_a_method_that_is_linear_in_self():
    """Which was not meant."""

    class Forgotten(eqx.Module):
        matrix: jax.Array

        @eqg.linear_function
        def __call__(self, x):
            return self.matrix @ x

        @__call__.def_rmatvec
        def adjoint(self, y):
            return self.matrix.T @ y

    with pytest.raises(AttributeError, match="matrix") as caught:
        jax.jit(lambda x: Forgotten(jnp.asarray(MATRIX, X.dtype))(x))(X)
    assert "or another by `argnum`" in caught.value.__notes__[0]


def test_a_parameter_without_a_derivative():
    def on_host(x, scale):
        call = lambda x, scale: np.asarray(scale) * np.asarray(x)
        return jax.pure_callback(call, x, x, scale, vmap_method="sequential")

    f = eqg.linear_function(on_host, on_host)
    assert_close(jax.grad(lambda x: jnp.sum(f(x, 2.0)))(X), 2 * jnp.ones(3))
    with pytest.raises(ValueError, match="do not support JVP") as caught:
        jax.grad(lambda scale: jnp.sum(f(X, scale)))(2.0)
    assert "is linear in `x`. With respect to all else" in caught.value.__notes__[0]
