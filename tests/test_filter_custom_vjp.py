"""`eqg.filter_custom_vjp`: what works with Equinox's works, and what fails there does too.

A test that takes `filter_custom_vjp` runs with both decorators. The others are of what
Equinox's does not have.
"""

import copy
import math
import pickle

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from .helpers import assert_close, checking_leaks


X, Y = jnp.array([0.3, -1.2, 2.0]), jnp.array([1.5, 0.4, -0.7])


@pytest.fixture(params=[eqx, eqg], ids=["equinox", "eqx_grads"])
def filter_custom_vjp(request):
    has_new = getattr(jax.config, "jax_custom_vjp3", False) and jax.__version_info__ < (0, 11)
    if request.param is eqx and has_new:
        pytest.skip("Equinox's can't be called with `jax_custom_vjp3` (JAX 0.10, see peers)")
    return request.param.filter_custom_vjp


def with_rules(decorator, fn, fwd, bwd):
    decorated = decorator(fn)
    decorated.def_fwd(fwd)
    decorated.def_bwd(bwd)
    return decorated


def _product(xy):
    x, y = xy
    return jnp.sin(x) * y


def _product_fwd(perturbed, xy):
    x, _y = xy
    return _product(xy), (jnp.cos(x) if perturbed[0] else None, jnp.sin(x))


def _product_bwd(residuals, ct, perturbed, xy):
    cos, sin = residuals
    ct_x = ct * cos * xy[1] if perturbed[0] else None
    return ct_x, ct * sin if perturbed[1] else None


@pytest.mark.thorough
def test_reverse_mode_and_second_order_agree_with_autodiff(filter_custom_vjp):
    f = with_rules(filter_custom_vjp, _product, _product_fwd, _product_bwd)
    check_grads(f, ((X, Y),), order=1, modes=("rev",), rtol=2e-2)
    total = lambda f: lambda x, y: jnp.sum(f((x, y)) ** 2)
    second = lambda f: jax.jacrev(jax.grad(total(f)))(X, Y)
    assert_close(second(f), second(_product))


@pytest.mark.thorough
def test_transformations_in_each_other(filter_custom_vjp):
    f = with_rules(filter_custom_vjp, _product, _product_fwd, _product_bwd)

    def loss(f, x, y):
        step = lambda x, y: (jax.checkpoint(lambda *xy: f(xy))(x, y), None)
        return jnp.sum(jax.vmap(lambda x: jax.lax.scan(step, x, y)[0])(x))

    grad = lambda f: jax.jit(jax.grad(lambda *args: loss(f, *args), (0, 1)))(X, Y)
    assert_close(grad(f), grad(_product))
    outside = jax.grad(jax.jit(lambda *args: loss(f, *args)), (0, 1))(X, Y)
    assert_close(outside, grad(_product))


def test_what_the_rules_are_called_with(filter_custom_vjp):
    """`perturbed` has the structure of the first argument, `grad_out` that of the output."""

    @filter_custom_vjp
    def f(vjp_arg, n, *, foo):
        x, y, fn, _name = vjp_arg
        return {"a": fn(x) * y * n, "b": x, "c": y, "n": n, "foo": foo}

    @f.def_fwd
    def f_fwd(perturbed, vjp_arg, n, *, foo):
        assert perturbed == (True, False, False, False)
        assert all(type(p) is bool for p in perturbed)
        return f(vjp_arg, n, foo=foo), {"residual": object(), "n": n}

    @f.def_bwd
    def f_bwd(residuals, grad_out, perturbed, vjp_arg, n, *, foo):
        assert residuals["n"] == n == 3
        assert foo == "foo"
        assert perturbed == (True, False, False, False)
        _x, y, fn, name = vjp_arg
        assert fn is jnp.sin
        assert name == "name"
        assert [k for k, ct in grad_out.items() if ct is not None] == ["a", "b"]
        return grad_out["a"] * n * y * 10 + grad_out["b"], None, None, None

    def loss(x):
        out = f((x, jnp.array(2.0), jnp.sin, "name"), 3, foo="foo")
        assert out["n"] == 3
        assert type(out["n"]) is int
        assert out["foo"] == "foo"
        return out["a"] + out["b"]

    assert jax.grad(loss)(jnp.array(0.0)) == 61.0
    assert jax.jit(jax.grad(loss))(0.0) == 61.0


def test_python_numbers_are_static_under_jit(filter_custom_vjp):
    """T5, for both kinds of argument, and for outputs."""

    @filter_custom_vjp
    def f(vjp_arg, p, *, scale):
        x, q = vjp_arg
        assert type(p) is float
        assert type(q) is float
        assert type(scale) is float
        return (x * math.floor(p) * q if p == 2.5 else x), p + q

    @f.def_fwd
    def f_fwd(perturbed, vjp_arg, p, *, scale):
        assert perturbed == (True, False)
        return f(vjp_arg, p, scale=scale), None

    @f.def_bwd
    def f_bwd(residuals, grad_out, perturbed, vjp_arg, p, *, scale):
        assert grad_out[1] is None
        assert type(p) is float
        assert type(vjp_arg[1]) is float
        return grad_out[0] * math.floor(p) * scale, None

    def call(x):
        y, number = f((x, 3.0), 2.5, scale=7.0)
        assert type(number) is float
        assert number == 5.5
        return y

    x = jnp.array(1.0)
    assert jax.jit(call)(x) == 6.0
    assert jax.jit(jax.value_and_grad(call))(x) == (6.0, 14.0)
    assert jax.grad(jax.jit(call))(x) == 14.0
    scan = lambda x: jax.lax.scan(lambda c, _: (call(c), None), x, length=2)[0]
    assert jax.grad(scan)(x) == 196.0
    assert type(f((1.0, 3.0), 2.5, scale=7.0)[0]) is float


def test_numpy_arrays_are_arrays(filter_custom_vjp):
    @filter_custom_vjp
    def f(x, table, *, index):
        return x * table[index]

    @f.def_fwd
    def f_fwd(perturbed, x, table, *, index):
        return f(x, table, index=index), None

    @f.def_bwd
    def f_bwd(residuals, ct, perturbed, x, table, *, index):
        return ct * jnp.asarray(table)[index]

    table = np.arange(3.0, dtype=np.float32)
    grad = jax.jit(lambda x, index: jax.grad(lambda x: f(x, table, index=index))(x))
    assert grad(jnp.array(3.0), np.array(2)) == 2.0


def test_rules_are_traced_once_for_two_gradients_of_a_jitted_function(filter_custom_vjp):
    n_traces = 0

    def bwd(residuals, ct, perturbed, x):
        nonlocal n_traces
        n_traces += 1
        return ct + 2

    f = with_rules(filter_custom_vjp, lambda x: x, lambda perturbed, x: (x, None), bwd)
    for jit in (jax.jit, eqx.filter_jit):
        jitted, n_traces = jit(f), 0
        assert eqx.filter_grad(jitted)(X[0]) == eqx.filter_grad(jitted)(X[0]) == 3.0
        assert n_traces == 1


def test_a_rule_may_be_nonlinear(filter_custom_vjp):
    fwd = lambda perturbed, x, limit: (x, None)
    bwd = lambda residuals, ct, perturbed, x, limit: jnp.clip(ct, -limit, limit)
    clip = with_rules(filter_custom_vjp, lambda x, limit: x, fwd, bwd)
    assert jax.grad(lambda x: 10 * clip(x, 1.0))(X[0]) == 1.0
    limits = jax.vmap(jax.grad(lambda x, limit: 10 * clip(x, limit)), (None, 0))(X[0], X + 1.2)
    assert_close(limits, X + 1.2)


def test_residuals_may_depend_on_perturbed_in_scan(filter_custom_vjp):
    """jax#16614"""
    fwd = lambda perturbed, xy: (xy[0] + xy[1], None if perturbed[1] else [])
    f = with_rules(filter_custom_vjp, lambda xy: xy[0] + xy[1], fwd, lambda r, ct, *_: (ct, ct))
    step = lambda xy, _: ((f(xy), xy[0]), None)
    grad = jax.grad(lambda x: jax.lax.scan(step, (x, jnp.array(1.0)), length=3)[0][0])
    assert grad(jnp.array(1.0)) == 3.0


def test_defvjp_is_deprecated_and_gets_arrays(filter_custom_vjp):
    f = filter_custom_vjp(lambda x, n: (x[0] + n, x[1] * 2, x[1] * 3))

    def bwd(residuals, grad_out, x, n):
        a, b, c = grad_out
        assert n == 2
        return a + residuals, 10 * b + c

    with pytest.warns(UserWarning, match="deprecated"):
        f.defvjp(lambda x, n: (f(x, n), jnp.array(7.0)), bwd)
    one = jnp.array(1.0)
    grads = jax.grad(lambda x: f(x, 2)[0] + f(x, 2)[2])((one, one))
    assert grads == (15.0, 1.0)


def test_other_arguments_are_not_differentiated(filter_custom_vjp):
    fwd = lambda perturbed, x, *args, **kwargs: (x, None)
    bwd = lambda residuals, ct, *args, **kwargs: ct
    f = with_rules(filter_custom_vjp, lambda x, *args, **kwargs: x, fwd, bwd)
    with pytest.raises(RuntimeError, match=r"[Dd]ifferentiated"):
        jax.grad(lambda x: f(x, x))(1.0)
    with pytest.raises(RuntimeError, match=r"[Dd]ifferentiated"):
        jax.grad(lambda x: f(x, y=x))(1.0)
    assert jax.grad(lambda x: f(x, jax.lax.stop_gradient(x), y=X))(X[0]) == 1.0


def test_structure_of_the_cotangent(filter_custom_vjp):
    f = with_rules(
        filter_custom_vjp, _product, _product_fwd, lambda residuals, ct, perturbed, xy: ct
    )
    with pytest.raises(RuntimeError, match="structure"):
        jax.grad(lambda x: jnp.sum(f((x, Y))))(X)


def test_no_rules(filter_custom_vjp):
    f = filter_custom_vjp(_product)
    f.def_fwd(_product_fwd)
    with pytest.raises(RuntimeError, match="def_bwd"):
        f((X, Y))


def test_the_first_argument_is_given_by_position(filter_custom_vjp):
    f = with_rules(filter_custom_vjp, _product, _product_fwd, _product_bwd)
    with pytest.raises(TypeError, match="position"):
        f(xy=(X, Y))


# What does not work with Equinox's.


def twice_the_gradient():
    """The identity, with twice its derivative."""
    fwd = lambda perturbed, tree: (tree, None)
    bwd = lambda residuals, ct, perturbed, tree: jax.tree.map(lambda t: 2 * t, ct)
    return with_rules(eqg.filter_custom_vjp, lambda tree: tree, fwd, bwd)


def test_forward_mode_is_that_of_the_function():
    f = with_rules(eqg.filter_custom_vjp, _product, _product_fwd, _product_bwd)
    check_grads(lambda *xy: f(xy), (X, Y), order=1, modes=("fwd",), rtol=2e-2)
    total = lambda f: lambda x, y: jnp.sum(f((x, y)) ** 2)
    assert_close(jax.hessian(total(f))(X, Y), jax.hessian(total(_product))(X, Y))
    t_out = jax.jit(lambda t: jax.jvp(lambda x: f((x, Y)), (X,), (t,))[1])(Y)
    assert_close(t_out, jnp.cos(X) * Y * Y)


def test_a_python_number_beside_one_has_a_gradient():
    """With Equinox it is zero: the output is a Python float there, and so static."""
    f = with_rules(
        eqg.filter_custom_vjp,
        lambda x, y: x * y,
        lambda perturbed, x, y: (x * y, None),
        lambda residuals, ct, perturbed, x, y: ct * y,
    )
    assert jax.grad(lambda x: f(x, 3.0))(2.0) == 3.0
    assert jax.value_and_grad(lambda x: f(x, 3.0))(2.0) == (6.0, 3.0)


def test_integers_and_keys_that_come_out_go_in_again():
    """With Equinox, an AssertionError without a message."""
    f = twice_the_gradient()
    key = jax.random.key(0)

    def loss(x, i, key):
        tree = f(f({"x": x, "i": i, "key": key, "name": "a"}))
        assert tree["name"] == "a"
        return tree["x"]

    assert jax.grad(loss)(1.0, jnp.array(3), key) == 4.0

    def scanned(x):
        step = lambda carry, _: (f(carry), carry[1])
        carry, _indices = jax.lax.scan(step, (x, jnp.array(0), key), length=3)
        return carry[0]

    assert jax.grad(scanned)(1.0) == 8.0
    assert jax.jit(jax.grad(scanned))(1.0) == 8.0


def test_closures_over_tracers_in_scan_and_jit():
    def run(x, k):
        def step(x, y):
            f = with_rules(
                eqg.filter_custom_vjp,
                lambda x: k * y * x,
                lambda perturbed, x: (k * y * x, None),
                lambda residuals, ct, perturbed, x: 2 * k * y * ct,
            )
            return f(x), None

        return jax.lax.scan(step, x, Y)[0]

    x, k = jnp.array(2.0), jnp.array(3.0)
    slope = jnp.prod(2 * 3 * Y)
    with checking_leaks():
        assert_close(jax.jit(jax.grad(run))(x, k), slope)
        assert_close(jax.grad(jax.jit(run))(x, k), slope)
    with pytest.raises(eqg.RuleError, match=r"closes over.\n.*`k`"):
        jax.grad(run, 1)(x, k)


def test_keyword_arguments_that_are_functions_of_tracers():
    f = with_rules(
        eqg.filter_custom_vjp,
        lambda x, *, fn: fn(x),
        lambda perturbed, x, *, fn: (fn(x), None),
        lambda residuals, ct, perturbed, x, *, fn: 5 * fn(ct),
    )
    run = jax.jit(lambda x, k: f(x, fn=lambda z: k * z))
    assert jax.grad(run)(jnp.array(2.0), jnp.array(3.0)) == 15.0


class Line(eqx.Module):
    slope: jax.Array
    name: str = "line"

    @eqg.filter_custom_vjp
    def __call__(self, x):
        return self.slope * x

    @__call__.def_fwd
    def _call_fwd(perturbed, self, x):
        assert perturbed.slope
        assert not perturbed.name
        return self.slope * x, None

    @__call__.def_bwd
    def _call_bwd(residuals, ct, perturbed, self, x):
        return eqg.tangents.of(self, slope=10 * ct * x)


def test_methods():
    line = Line(jnp.array(3.0))
    assert eqx.filter_grad(lambda line: line(2.0))(line).slope == 20.0
    assert eqx.filter_jit(eqx.filter_grad(lambda line: line(2.0)))(line).slope == 20.0
    message = r"other than its first.\n.*`x`\n.*Line.__call__"
    with pytest.raises(eqg.RuleError, match=message):
        jax.grad(line)(2.0)


def test_a_cotangent_may_be_none_for_a_whole_subtree_and_is_broadcast_and_cast():
    f = with_rules(
        eqg.filter_custom_vjp,
        lambda tree: tree["a"] * 2,
        lambda perturbed, tree: (tree["a"] * 2, None),
        lambda residuals, ct, perturbed, tree: {"a": jnp.full((2, 3), 1.0), "b": None},
    )
    tree = {"a": X.astype(jnp.bfloat16), "b": [X, {"c": Y}]}
    grads = jax.grad(lambda tree: jnp.sum(f(tree)).astype(jnp.float32))(tree)
    assert grads["a"].dtype == jnp.bfloat16
    assert_close(grads["a"], jnp.full(3, 2.0, jnp.bfloat16))
    assert_close(grads["b"], [jnp.zeros(3), {"c": jnp.zeros(3)}])


@eqg.filter_custom_vjp
def doubled(x):
    """Twice `x`."""
    return 2 * x


@doubled.def_fwd
def doubled_fwd(perturbed, x):
    return doubled(x), None


@doubled.def_bwd
def doubled_bwd(residuals, ct, perturbed, x):
    return 2 * ct


def test_a_decorated_function_is_a_good_citizen():
    assert doubled.__name__ == "doubled"
    assert doubled.__doc__ == "Twice `x`."
    assert repr(doubled) == "<eqx_grads.filter_custom_vjp of doubled>"
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert jax.grad(copy.deepcopy(doubled))(1.0) == 2.0
    assert callable(doubled_fwd)
    assert callable(doubled_bwd)


def test_a_compiled_function_and_compiled_rules():
    """`eqx.filter_jit` below each decorator, as programs of Equinox's users have it."""

    def build(decorator):
        @decorator
        @eqx.filter_jit
        def objective(model, scale=None):
            return jnp.sum(model.weight**2) * (1.0 if scale is None else scale["s"])

        @objective.def_fwd
        @eqx.filter_jit
        def objective_fwd(_, model, scale=None):
            return objective(model, scale), {"model": model, "name": "kept"}

        @objective.def_bwd
        @eqx.filter_jit
        def objective_bwd(residuals, grad_out, _, model, scale=None):
            zeros = jax.tree.map(lambda _: None, eqx.filter(model, eqx.is_inexact_array))
            ct = 3.0 * grad_out * residuals["model"].weight
            return eqx.tree_at(lambda m: m.weight, zeros, ct, is_leaf=lambda x: x is None)

        return objective

    model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    ours, theirs = build(eqg.filter_custom_vjp), build(eqx.filter_custom_vjp)
    for arguments in ((), ({"s": jnp.array(2.0), "name": "static"},)):
        for jit in (lambda f: f, eqx.filter_jit):
            grads = [jit(eqx.filter_grad(f))(model, *arguments).weight for f in (ours, theirs)]
            assert jnp.array_equal(grads[0], 3.0 * model.weight)
            assert jnp.array_equal(grads[0], grads[1])
