"""The decorators of JAX and Equinox, and rules of other systems: what the library's do too, and
what fails with theirs. More programs with both are in `tests/guard/test_core.py`."""

import functools as ft
import math
import warnings

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero

from .helpers import assert_close, checking_leaks


pytestmark = [pytest.mark.versions, pytest.mark.x64]

X, Y = jnp.array([0.3, -1.2, 2.0]), jnp.array([1.5, 0.4, -0.7])
N, FLOAT0 = jnp.array(2), jax.dtypes.float0


# ---------------------------------------------------------------- as with JAX


def attention(custom_jvp, custom_vjp):
    """As attention kernels do: `fwd` calls the function with another static argument, which
    then returns the residuals, too. Segments are an optional tree of integers."""

    def scores(q, k, segments, scale):
        s = scale * q @ k.T
        if segments is None:
            return s
        return jnp.where(segments["q"][:, None] == segments["k"][None], s, -1e9)

    @ft.partial(custom_vjp, nondiff_argnums=range(4, 6))
    def attend(q, k, v, segments, saves, scale):
        s = scores(q, k, segments, scale)
        weights = jnp.exp(s - jax.nn.logsumexp(s, axis=-1, keepdims=True))
        return (weights @ v, weights) if saves else weights @ v

    def attend_fwd(q, k, v, segments, saves, scale):
        assert not saves
        out, weights = attend(q, k, v, segments, True, scale)
        return out, (q, k, v, weights)

    def attend_bwd(saves, scale, residuals, ct):
        q, k, v, weights = residuals
        ct_weights = ct @ v.T
        ct_s = weights * (ct_weights - jnp.sum(weights * ct_weights, -1, keepdims=True))
        return scale * ct_s @ k, scale * ct_s.T @ q, weights.T @ ct, None

    attend.defvjp(attend_fwd, attend_bwd)
    q, k, v = (jnp.sin(i + jnp.arange(6.0)).reshape(3, 2) for i in range(3))
    found = []
    for segments in (None, {"q": jnp.array([0, 0, 1]), "k": jnp.array([0, 1, 1])}):
        loss = lambda q, k, v, s=segments: jnp.sum(attend(q, k, v, s, False, 0.5) ** 2)
        grad = jax.grad(loss, (0, 1, 2))
        over_keys = jax.vmap(grad, in_axes=(None, 0, None))
        found += [grad(q, k, v), jax.jit(grad)(q, k, v), over_keys(q, k[None], v)]
    return found


def partials_and_defaults(custom_jvp, custom_vjp):
    f = custom_jvp(ft.partial(lambda scale, x, y=1.0: scale * x * y, 2.0))
    # As many primals as the caller gave.
    f.defjvp(lambda primals, tangents: (f(*primals), 10 * tangents[0] * len(primals)))
    return jax.grad(f)(3.0), jax.grad(f)(3.0, 4.0)


def decorated_twice(custom_jvp, custom_vjp):
    f = custom_vjp(lambda x: x**2)
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (5 * x * ct,))
    g = custom_jvp(f)
    g.defjvp(lambda primals, tangents: (g(*primals), jax.grad(f)(*primals) * tangents[0]))
    h = jax.custom_batching.custom_vmap(custom_jvp(lambda x: 2 * x))
    h.defjvp(lambda primals, tangents: (2 * primals[0], 3 * tangents[0]))
    h.def_vmap(lambda n, batched, xs: (20 * xs, True))
    return jax.grad(f)(2.0), jax.jvp(g, (2.0,), (1.0,)), jax.vmap(h)(X)


def reverse_rules_that_look_at_values(custom_jvp, custom_vjp):
    """Where a function or rule is traced for a check, the exception of JAX is not an error."""
    sliced = custom_vjp(lambda x, n: x[:n])
    pad = lambda x, ct: jnp.zeros_like(x).at[: ct.size].set(ct)
    sliced.defvjp(lambda x, n: (x[:n], x), lambda x, ct: (pad(x, ct), None))
    placed = custom_vjp(lambda x, y: (2 * x, 3 * y))
    bwd = lambda _, ct: (jax.device_put(2 * ct[0], ct[0].device), 3 * ct[1])
    placed.defvjp(lambda x, y: ((2 * x, 3 * y), None), bwd)
    by_numpy = custom_vjp(jnp.sin)
    by_numpy.defvjp(lambda x: (jnp.sin(x), np.cos(np.asarray(x))), lambda cos, ct: (cos * ct,))
    return (
        jax.grad(lambda x: jnp.sum(sliced(x, N)))(X),
        jax.grad(lambda x: jnp.sum(placed(x, X)[0]))(X),
        jax.grad(lambda x: jnp.sum(by_numpy(x)))(np.ones(2, np.float32)),
    )


def forward_rules_that_look_at_values(custom_jvp, custom_vjp):
    repeated = custom_jvp(lambda x, n: x * jnp.ones(n))
    repeated.defjvp(lambda p, t: (repeated(*p), t[0] * jnp.ones(p[1])))
    by_math = custom_jvp(lambda x, y: math.sin(x))
    by_math.defjvp(lambda p, t: (math.sin(p[0]), math.cos(p[0]) * float(p[1]) * t[0]))

    def compiled(x):
        with jax.ensure_compile_time_eval():
            return x * by_math(0.3, 2.5)

    constant = custom_jvp(lambda x, n: x)
    constant.defjvp(lambda p, t: (p[0], t[0] * int(p[1])))
    return (
        jax.vmap(lambda x: repeated(x, N))(X),
        jax.grad(by_math)(0.3, 2.5),
        jax.jit(compiled)(2.0),
        jax.jit(jax.grad(lambda x: constant(x, np.array(2))))(0.3),
    )


def beside_arrays_that_have_no_tangent(custom_jvp, custom_vjp):
    """JAX's zero for such an array is of no number, and the zero of `y` is known to be one."""
    f = custom_jvp(lambda x, n, y: jnp.sin(x) * y)
    slope = lambda p, t: jnp.cos(p[0]) * p[2] * t[0] + jnp.sin(p[0]) * t[2]
    f.defjvp(lambda p, t: (f(*p), slope(p, t)))
    grad = jax.grad(f)
    keys = np.arange(3), jax.random.split(jax.random.key(0), 3)
    return [g(0.5, n, 2.0) for g in (grad, jax.jit(grad), jax.grad(grad)) for n in keys]


def cotangents_of_what_is_not_used(custom_jvp, custom_vjp):
    """Of three outputs, one is not used, and one is of integers."""

    def seen(symbolic_zeros):
        outs, zeros = (lambda x: (x, 2 * x, jnp.arange(2))), []

        def bwd(_, cts):
            zeros.extend((isinstance(ct, SymbolicZero), ct.dtype == FLOAT0) for ct in cts)
            return (3 * cts[0],)

        f = custom_vjp(outs)
        fwd = lambda x: (outs(x.value if symbolic_zeros else x), None)
        f.defvjp(fwd, bwd, symbolic_zeros=symbolic_zeros)
        return jax.grad(lambda x: f(x)[0])(1.0), jnp.array(zeros, float)

    return seen(False), seen(True)


def values_that_change(custom_jvp, custom_vjp):
    """As in AQT, whose forward pass fills in its settings: both get a copy."""
    f, settings = custom_vjp(lambda x, y: x * y.pop("scale")), {"scale": 2.0}
    fwd = lambda x, y: (x * y["scale"], y.pop("scale"))
    f.defvjp(fwd, lambda scale, ct: (scale * ct, None))
    return f(3.0, settings), jax.grad(f)(3.0, settings), settings


PROGRAMS = [
    values_that_change,
    cotangents_of_what_is_not_used,
    attention,
    partials_and_defaults,
    decorated_twice,
    reverse_rules_that_look_at_values,
    forward_rules_that_look_at_values,
    beside_arrays_that_have_no_tangent,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_same_as_jax(program):
    switches = ("jax_custom_jvp3", "jax_custom_vjp3")
    if "values" in program.__name__ and any(getattr(jax.config, s, False) for s in switches):
        pytest.skip("with these switches, JAX traces integers, and a function twice")
    expected = program(jax.custom_jvp, jax.custom_vjp)
    assert_close(program(eqg.jax_custom_jvp, eqg.jax_custom_vjp), expected)


def test_the_gradient_of_a_number_stays_weak():
    """An output is not used, so that zeros take the place of its cotangent."""
    for decorator in (jax.custom_vjp, eqg.jax_custom_vjp):
        f = decorator(lambda x, y: (x * y, x))
        bwd = lambda xy, ct: (ct[0] * xy[1] + ct[1], ct[0] * xy[0])
        f.defvjp(lambda x, y: ((x * y, x), (x, y)), bwd)
        grad = jax.grad(lambda x, f=f: f(x, 2.0)[0])(0.3)
        assert (grad * jnp.bfloat16(1)).dtype == jnp.bfloat16


# ---------------------------------------------------------------- more than with JAX


def _held(kind, scale, x):
    """The rule, the function and an argument of `nondiff_argnums` hold a tracer."""
    f = getattr(eqg, kind)(lambda fn, x: scale * fn(x), nondiff_argnums=(0,))
    if kind == "jax_custom_jvp":
        f.defjvp(lambda fn, ps, ts: (f(fn, *ps), scale * jax.jvp(fn, ps, ts)[1] + ts[0]))
    else:
        bwd = lambda fn, x, ct: (ct * (scale * jax.grad(fn)(x) + 1.0),)
        f.defvjp(lambda fn, x: (f(fn, x), x), bwd)
    return f(lambda x: jnp.sin(scale * x), x)


@pytest.mark.parametrize("kind", ["jax_custom_jvp", "jax_custom_vjp"])
def test_traced_values_anywhere(kind):
    f, slope = ft.partial(_held, kind), lambda scale: scale**2 * jnp.cos(scale * 0.2) + 1
    scanned = lambda scale, x: jax.lax.scan(lambda c, _: (f(scale, c), None), x, length=1)[0]
    for fn in (f, scanned):
        assert_close(jax.jit(jax.grad(fn, 1))(3.0, 0.2), slope(3.0))
    assert_close(jax.vmap(jax.grad(f, 1), (0, None))(X, 0.2), slope(X))
    match = r"an argument of `nondiff_argnums`|it closes over"
    with pytest.raises(eqg.RuleError, match=match):
        jax.grad(f)(3.0, 0.2)


def test_an_output_that_a_batch_shares():
    """JAX up to 0.11 counts the cotangent of the first output once for each example."""
    f = eqg.jax_custom_vjp(lambda x, y: (2 * y, x * y))
    bwd = lambda res, cts: (cts[1] * res[1], 2 * cts[0] + cts[1] * res[0])
    f.defvjp(lambda x, y: (f(x, y), (x, y)), bwd, generic_batching=True)

    def loss(f, xs, y):
        shared, out = jax.vmap(f, (0, None))(xs, y)
        return shared[0] + jnp.sum(out)

    expected = jax.grad(loss, (1, 2))(lambda x, y: (2 * y, x * y), X, 2.0)
    assert_close(jax.grad(loss, (1, 2))(f, X, 2.0), expected)


def test_a_method_is_not_bound():
    """As in JAX, where Python says that an argument is missing. The error says why."""

    class Layer:
        @ft.partial(eqg.jax_custom_vjp, nondiff_argnums=(0,))
        def scale(self, x):
            return 2 * x

        scale.defvjp(lambda self, x: (2 * x, None), lambda self, _, ct: (3 * ct,))

    layer = Layer()
    with pytest.raises(eqg.RuleError, match=r"missing a required argument(?s:.*)does not bind"):
        jax.grad(lambda x: layer.scale(x))(1.0)
    assert jax.grad(lambda x: Layer.scale(layer, x))(1.0) == 3.0
    for decorator in (eqg.jax_custom_jvp, eqg.jax_custom_vjp):  # as in JAX
        with pytest.raises(AttributeError, match="defined for custom_"):
            decorator(lambda x: x)(1.0)


# ---------------------------------------------------------------- as with Equinox


def _skip_if_equinox_fails(of):
    has_new = getattr(jax.config, "jax_custom_vjp3", False) and jax.__version_info__ < (0, 11)
    if of is eqx and has_new:
        pytest.skip("Equinox's can't be called with `jax_custom_vjp3` (JAX 0.10, see peers)")


both = pytest.mark.parametrize("of", [eqx, eqg], ids=["equinox", "eqx_grads"])


@both
def test_a_forward_rule_that_is_not_linear_is_let_through(of):
    """T6."""
    f = of.filter_custom_jvp(lambda x, y: x * y)
    f.def_jvp(lambda primals, tangents: (primals[0] * primals[1], tangents[0] ** 2 + 1))
    push = lambda x, t: jax.jvp(lambda x: f(x, Y), (x,), (t,))[1]
    assert_close(push(X, 3 * jnp.ones(3)), jnp.full(3, 10.0))
    assert_close(jax.jit(push)(X, X), X**2 + 1)


@both
def test_python_numbers_are_static(of):
    """T5: in both kinds of rule, in all kinds of argument, and in outputs."""
    _skip_if_equinox_fails(of)
    # `math.floor` is not for tracers.
    f = of.filter_custom_jvp(lambda x, p, *, s: x * math.floor(p["a"]) * math.floor(s))
    f.def_jvp(lambda ps, ts, *, s: (f(*ps, s=s), f(ts[0], ps[1], s=s) + len(ts[1:]) - 1))
    g = of.filter_custom_vjp(lambda xq, p: (xq[0] * math.floor(p) * xq[1], p + xq[1]))
    g.def_fwd(lambda perturbed, xq, p: (g(xq, p), perturbed))
    g.def_bwd(lambda seen, ct, perturbed, xq, p: (
        ct[0] * math.floor(p + sum(seen)), ct[1]
    ))  # fmt: skip

    def call(x):
        y, number = g((f(x, {"a": 2.5}, s=7.5), 3.0), 2.5)
        assert (type(number), number) == (float, 5.5)
        return y

    for run in (jax.jit(jax.value_and_grad(call)), jax.value_and_grad(jax.jit(call))):
        assert run(jnp.array(1.0)) == (84.0, 42.0)


@both
def test_residuals_may_depend_on_perturbed_in_scan(of):
    """jax#16614"""
    _skip_if_equinox_fails(of)
    f = of.filter_custom_vjp(lambda xy: xy[0] + xy[1])
    f.def_fwd(lambda perturbed, xy: (xy[0] + xy[1], None if perturbed[1] else []))
    f.def_bwd(lambda r, ct, *_: (ct, ct))
    step = lambda xy, _: ((f(xy), xy[0]), None)
    grad = jax.grad(lambda x: jax.lax.scan(step, (x, jnp.array(1.0)), length=3)[0][0])
    assert grad(jnp.array(1.0)) == 3.0


def test_a_compiled_function_and_compiled_rules():
    """`eqx.filter_jit` below each decorator, as programs of Equinox's users have it."""

    model, of = eqx.nn.Linear(2, 3, key=jax.random.key(0)), lambda model: model.weight**2
    for decorator in (eqg.filter_custom_vjp, eqx.filter_custom_vjp):
        f = decorator(eqx.filter_jit(lambda model, scale: jnp.sum(of(model)) * scale["s"]))

        @f.def_fwd
        @eqx.filter_jit
        def fwd(_, model, scale, f=f):
            return f(model, scale), {"model": model, "name": "kept"}

        @f.def_bwd
        @eqx.filter_jit
        def bwd(residuals, grad_out, _, model, scale):
            zeros = jax.tree.map(lambda _: None, eqx.filter(model, eqx.is_inexact_array))
            ct = 3.0 * grad_out * residuals["model"].weight
            return eqx.tree_at(lambda m: m.weight, zeros, ct, is_leaf=lambda x: x is None)

        for jit in (lambda f: f, eqx.filter_jit):
            grad = jit(eqx.filter_grad(f))(model, {"s": jnp.array(2.0), "name": "static"})
            assert jnp.array_equal(grad.weight, 3.0 * model.weight)


# ---------------------------------------------------------------- more than with Equinox


def test_python_numbers():
    """In reverse mode, Equinox's gradient is zero: the output is a Python float, and so
    static."""
    f = eqg.filter_custom_jvp(lambda x, p: x * p)
    f.def_jvp(lambda primals, tangents: (primals[0] * primals[1], 7 * tangents[0]))
    assert jax.jvp(lambda x: f(x, 3.0), (2.0,), (1.0,)) == (6.0, 7.0)
    g = eqg.filter_custom_vjp(lambda x, y: x * y)
    g.def_fwd(lambda perturbed, x, y: (x * y, None))
    g.def_bwd(lambda residuals, ct, perturbed, x, y: ct * y)
    assert jax.value_and_grad(lambda x: g(x, 3.0))(2.0) == (6.0, 3.0)


class Fun(eqx.Module):
    param: jax.Array

    def __call__(self, x):
        return self.param * jnp.sin(x)


def test_equinox_745_module_in_scan_under_jit():
    """https://github.com/patrick-kidger/equinox/issues/745, and with respect to the Module."""

    @eqg.filter_custom_jvp
    def f(x, y, *, fun):
        return fun(x) * y

    @f.def_jvp
    def f_jvp(primals, tangents, *, fun):
        (x, y), (t_x, t_y) = primals, tangents
        out, t_out = jax.jvp(lambda x: fun(x) * y, (x,), (t_x,))
        return out, t_out if t_y is None else t_out + fun(x) * t_y

    def loss(x, fun):
        step = lambda y, _: (f(x, y, fun=fun), None)
        return jax.lax.scan(step, jnp.ones_like(x), None, length=3)[0]

    x, fun = jnp.array(0.5), Fun(jnp.array(2.0))
    slope = 3 * fun(x) ** 2 * 2 * jnp.cos(x)
    with checking_leaks():
        assert_close(jax.grad(eqx.filter_jit(loss))(x, fun), slope)
        assert_close(eqx.filter_jit(jax.grad(loss))(x, fun), slope)
        # A closure over a tracer of `jit`, differentiated from outside.
        closing = lambda x, param: loss(x, lambda z: param * jnp.sin(z))
        assert_close(jax.grad(jax.jit(closing))(x, fun.param), slope)
    with pytest.raises(eqg.RuleError, match=r"passed by keyword.\n.*`fun.param`"):
        eqx.filter_grad(lambda fun: loss(x, fun))(fun)


def test_equinox_962_module_with_a_string_in_and_out():
    """https://github.com/patrick-kidger/equinox/issues/962"""

    class Named(eqx.Module):
        a: jax.Array
        b: jax.Array
        name: str

    call = eqg.filter_custom_jvp(lambda model: Named(model.a * 2, model.b * 3, model.name))
    call.def_jvp(lambda primals, tangents: (call(*primals), tangents[0]))
    model = Named(jnp.array(2.0), jnp.array(3.0), "name")
    assert jax.jit(lambda a: call(Named(a, model.b, "name")).a)(2.0) == 4.0
    out, t_out = eqx.filter_jvp(call, (model,), (eqx.filter(model, eqx.is_array),))
    grad = eqx.filter_grad(lambda model: call(model).a + call(model).b)(model)
    assert (out.a, out.b, out.name) == (4.0, 9.0, "name")
    assert (t_out.a, t_out.b, t_out.name) == (2.0, 3.0, None)
    assert (grad.a, grad.b, grad.name) == (1.0, 1.0, None)


# ---------------------------------------------------------------- rules of other systems
# `docs/coming-from/` shows both versions side by side.


def test_scalar_rule():
    """ChainRules: `@scalar_rule atan(y, x) @setup(u = x^2 + y^2) (x / u, -y / u)`."""
    called = set()
    d_y = lambda out, y, x, u: called.add("y") or x / u
    d_x = lambda out, y, x, u: called.add("x") or -y / u
    atan = eqg.elementwise(jnp.arctan2, (d_y, d_x), setup=lambda out, y, x: x**2 + y**2)
    y, x = jnp.array([1.0, 2.0, -1.0]), jnp.array(-2.0)
    assert_close(jax.grad(lambda y: jnp.sum(atan(y, x)))(y), x / (x**2 + y**2))
    assert called == {"y"}  # the partial that nobody asked for is not computed


def test_attributes_of_jax():
    f, rule = eqg.jax_custom_jvp(jnp.sin), lambda primals, tangents: (*primals, None)
    assert (f.defjvp(rule, symbolic_zeros=True), f.jvp, f.symbolic_zeros) == (rule, rule, True)
    f = eqg.jax_custom_vjp(jnp.sin)
    f.defvjp(rule, jnp.cos, symbolic_zeros=True)
    assert (f.fwd, f.bwd, f.symbolic_zeros) == (rule, jnp.cos, True)

    fun = lambda x: x
    # A decorated function has the attributes of the function, except where it has its own.
    for name in ("jvp", "fwd", "optimize_remat", "unset", "new_rules", "_has_rules"):
        setattr(fun, name, "of the user's")
    f, g = eqg.jax_custom_jvp(fun), eqg.jax_custom_vjp(fun)
    assert (f.jvp, g.fwd, g.bwd, g.optimize_remat) == (None, None, None, False)
    assert (f.unset, f._has_rules) == ("of the user's", False)


@pytest.mark.parametrize("kind", ["jax_custom_vjp", "filter_custom_vjp"])
def test_a_forward_pass_returns_a_pair(kind):
    """`NotImplemented` is for the rules of `custom_vjp`: JAX and Equinox have no such value."""
    f = getattr(eqg, kind)(jnp.sin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Equinox deprecated `defvjp`
        f.defvjp(lambda x: NotImplemented, lambda residuals, ct, *args: (ct,))
    with pytest.raises(eqg.RuleError, match=r"not return a pair.\n  it returned NotImpl"):
        jax.grad(f)(1.0)
