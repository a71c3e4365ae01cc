"""`jax_custom_jvp` and `jax_custom_vjp`: what JAX's decorators do, and what they can't do.

The witness is JAX itself: `PROGRAMS` are run with its decorators and with ours.
"""

import copy
import functools as ft
import inspect
import math
import pickle

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from eqx_grads import RuleError
from jax.custom_derivatives import custom_vjp_primal_tree_values, CustomVJPPrimal, SymbolicZero

from .helpers import assert_close


# ---------------------------------------------------------------- the same as with JAX

PROGRAMS = {}


def program(fn):
    PROGRAMS[fn.__name__] = fn
    return fn


def values_and_derivatives(f, *args, forward=True):
    """Both modes, staged and batched, and the second order."""
    total = lambda *args: sum(jnp.sum(x) for x in jax.tree.leaves(f(*args)))
    grad = jax.grad(total)
    stack = lambda x: jnp.stack([x, x + 1])
    body = lambda x, _: (x + 0.1 * grad(x, *args[1:]), None)
    return [
        f(*args),
        grad(*args),
        jax.jit(grad)(*args),
        jax.grad(jax.jit(total))(*args),
        jax.vmap(grad, (0, *[None] * (len(args) - 1)))(jax.tree.map(stack, args[0]), *args[1:]),
        jax.lax.scan(body, args[0], length=2)[0],
        jax.grad(jax.checkpoint(total))(*args),
        jax.grad(lambda *args: jnp.sum(grad(*args) ** 2))(*args),
        jax.jvp(lambda x: f(x, *args[1:]), args[:1], args[:1]) if forward else None,
    ]


X = np.linspace(0.3, 1.1, 3)


@program
def a_rule_that_asks_for_other_outputs(custom_jvp, custom_vjp):
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
        return out, (q, k, v, segments, weights)

    def attend_bwd(saves, scale, residuals, ct):
        q, k, v, _, weights = residuals
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


@program
def forward_rule(custom_jvp, custom_vjp):
    @custom_jvp
    def f(x, y=2.0):
        return jnp.sin(x) * y

    @f.defjvp
    def f_jvp(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        return f(x, y), 3 * jnp.cos(x) * y * t_x + jnp.sin(x) * t_y

    x = jnp.asarray(X)
    return values_and_derivatives(f, x, 3.0), f(y=5.0, x=x), jax.grad(f)(0.5)


@program
def reverse_rule(custom_jvp, custom_vjp):
    @custom_vjp
    def f(x, y=2.0):
        return {"out": (jnp.sin(x) * y, x)}

    def f_fwd(x, y):
        return f(x, y), (x, y)

    def f_bwd(residuals, ct):
        (x, y), (ct, ct_x) = residuals, ct["out"]
        return [5 * jnp.cos(x) * y * ct + ct_x, jnp.sum(jnp.sin(x) * ct)]  # a list will do

    f.defvjp(f_fwd, f_bwd)
    x = jnp.asarray(X)
    return values_and_derivatives(f, x, 3.0, forward=False), f(y=5.0, x=x)


@program
def one_function_for_each_argument(custom_jvp, custom_vjp):
    @custom_jvp
    def f(x, y, z):
        return x * y * jnp.sum(z["a"])

    f.defjvps(
        None,
        lambda t, out, x, y, z: 2 * out * t / y,
        lambda t, out, x, y, z: out * jnp.sum(t["a"]),
    )
    args = jnp.asarray(X), jnp.asarray(X) + 1, {"a": jnp.asarray(X), "b": jnp.ones(2)}
    return jax.jvp(f, args, args), jax.grad(lambda *xs: jnp.sum(f(*xs)), (0, 1, 2))(*args)


@program
def nondiff_arguments(custom_jvp, custom_vjp):
    f = ft.partial(custom_jvp, nondiff_argnums=(0,), nondiff_argnames=("n",))(
        lambda fn, x, n, y: fn(x) * y**n
    )

    @f.defjvp
    def f_jvp(fn, n, primals, tangents):
        assert n == 2
        assert fn is jnp.sin
        (x, y), (t_x, t_y) = primals, tangents
        return f(fn, x, n, y), 7 * y**n * t_x + fn(x) * t_y

    @ft.partial(custom_vjp, nondiff_argnums=(2, 0))
    def g(fn, x, n, y):
        return fn(x) * y**n

    def g_fwd(fn, x, n, y):
        return g(fn, x, n, y), (x, y)

    def g_bwd(fn, n, residuals, ct):
        x, y = residuals
        return 7 * ct * y**n, ct * fn(x)

    g.defvjp(g_fwd, g_bwd)
    grads = [jax.grad(lambda x, y, h=h: h(jnp.sin, x, 2, y), (0, 1)) for h in (f, g)]
    return [(grad(0.5, 3.0), jax.jit(grad)(0.5, 3.0)) for grad in grads]


@program
def nondiff_tracer_of_a_forward_rule(custom_jvp, custom_vjp):
    @ft.partial(custom_jvp, nondiff_argnums=(1,))
    def f(x, y):
        return x * y

    @f.defjvp
    def f_jvp(y, primals, tangents):
        return f(*primals, y), 5 * y * tangents[0]

    grad = jax.grad(f, (0, 1))  # that of `y` is zero, silently
    return grad(2.0, 3.0), jax.jit(grad)(2.0, 3.0), jax.vmap(grad)(X, X)


@program
def symbolic_zeros_of_tangents(custom_jvp, custom_vjp):
    seen = []

    @custom_jvp
    def f(x, y, n):
        return x * y["a"], y["b"] * n

    def f_jvp(primals, tangents):
        (x, y, n), (t_x, t_y, _) = primals, tangents
        is_zero = lambda t: isinstance(t, SymbolicZero)
        seen.append([is_zero(t) for t in jax.tree.leaves(tangents, is_leaf=is_zero)])
        assert t_y["b"].shape == y["b"].shape
        return f(x, y, n), (t_x * y["a"], t_y["b"])

    f.defjvp(f_jvp, symbolic_zeros=True)
    y = {"a": jnp.asarray(X), "b": jnp.ones(2)}
    out = jax.jvp(lambda x: f(x, y, jnp.array(3.0))[0], (jnp.asarray(X),), (jnp.ones(3),))
    return out, seen[0]


@program
def symbolic_zeros_of_cotangents(custom_jvp, custom_vjp):
    seen = []

    @custom_vjp
    def f(x, y):
        return x * y["a"], x + 1, y["n"]

    def f_fwd(x, y):
        assert type(y["n"]) is CustomVJPPrimal
        seen.append([leaf.perturbed for leaf in (x, y["a"])])
        values = custom_vjp_primal_tree_values((x, y))
        return f(*values), values

    def f_bwd(residuals, cts):
        _, y = residuals
        seen.append([isinstance(ct, SymbolicZero) for ct in cts])
        return cts[0] * y["a"], {"a": cts[1], "n": None}  # a zero of the right shape

    f.defvjp(f_fwd, f_bwd, symbolic_zeros=True)
    y = {"a": jnp.asarray(X), "n": jnp.arange(2)}
    loss = lambda x: jnp.sum(f(x, y)[0])
    return jax.grad(loss)(jnp.asarray(X)), jax.jit(jax.grad(loss))(jnp.asarray(X)), seen[:2]


@program
def integers(custom_jvp, custom_vjp):
    @custom_jvp
    def f(x, n):
        return x[n], n + 1

    @f.defjvp
    def f_jvp(primals, tangents):
        (x, n), (t_x, t_n) = primals, tangents
        assert t_n.dtype == jax.dtypes.float0
        assert t_n.shape == n.shape
        return f(x, n), (2 * t_x[n], t_n)

    @custom_vjp
    def g(x, n):
        return x[n], n + 1

    def g_fwd(x, n):
        return g(x, n), (x, n)

    def g_bwd(residuals, cts):
        (x, n), (ct, ct_n) = residuals, cts
        assert ct_n.dtype == jax.dtypes.float0
        return jnp.zeros_like(x).at[n].set(2 * ct), n  # what is returned for `n` is dropped

    g.defvjp(g_fwd, g_bwd)
    x, n = jnp.asarray(X), jnp.array([2, 0])
    out = []
    for h in (f, g):
        loss = lambda x, n: jnp.sum(h(x, n)[0])  # noqa: B023
        out.append([jax.grad(loss)(x, n), jax.jit(jax.grad(loss))(x, n), h(x, n)])
        both = jax.grad(loss, (0, 1), allow_int=True)(x, n)
        out.append([both[0], both[1].dtype == jax.dtypes.float0])
    return out


@program
def none_for_zero(custom_jvp, custom_vjp):
    @custom_vjp
    def f(x, y, z):
        return x * y["a"][0] * y["b"] * jnp.sum(z[0])

    def f_bwd(residuals, ct):
        # `None` for one leaf, for a part of a tree and for a whole argument; and an array for
        # the only leaf of a list.
        return ct, {"a": None, "b": 3 * ct}, jnp.ones(2)

    f.defvjp(lambda *args: (f(*args), None), f_bwd)
    args = 2.0, {"a": [3.0, 4.0], "b": 5.0}, [jnp.ones(2)]
    return jax.grad(f, (0, 1, 2))(*args)


@program
def a_rule_that_is_not_linear(custom_jvp, custom_vjp):
    @custom_jvp
    def f(x, y):
        return x * y

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] ** 2 + jnp.cos(tangents[1])))
    return jax.jvp(f, (2.0, 3.0), (4.0, 5.0)), jax.jvp(lambda x: f(x, 3.0), (2.0,), (4.0,))


@program
def partials_and_defaults(custom_jvp, custom_vjp):
    def scaled(scale, x, y=1.0):
        return scale * x * y

    f = custom_jvp(ft.partial(scaled, 2.0))

    @f.defjvp
    def f_jvp(primals, tangents):  # as many as the caller gave
        return f(*primals), 10 * tangents[0] * len(primals)

    return jax.grad(f)(3.0), jax.grad(f)(3.0, 4.0)


@program
def decorated_twice(custom_jvp, custom_vjp):
    @custom_vjp
    def f(x):
        return x**2

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (5 * x * ct,))
    g = custom_jvp(f)
    g.defjvp(lambda primals, tangents: (g(*primals), jax.grad(f)(*primals) * tangents[0]))
    h = jax.custom_batching.custom_vmap(custom_jvp(lambda x: 2 * x))
    h.defjvp(lambda primals, tangents: (2 * primals[0], 3 * tangents[0]))
    h.def_vmap(lambda n, batched, xs: (20 * xs, True))
    return jax.grad(f)(2.0), jax.jvp(g, (2.0,), (1.0,)), jax.vmap(h)(X)


@program
def gradient_clipping(custom_jvp, custom_vjp):
    @custom_vjp
    def clip(limits, x):
        return x

    def clip_bwd(limits, ct):
        return None, jnp.clip(ct, *limits)

    clip.defvjp(lambda limits, x: (x, limits), clip_bwd)
    f = lambda x: jnp.sum(10 * jnp.sin(clip((-1.0, 2.0), x)))
    return jax.grad(f)(jnp.asarray(X)), jax.vmap(jax.grad(f))(jnp.stack([X, 2 * X]))


QUICK = ("one_function_for_each_argument", "nondiff_arguments", "none_for_zero")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PROGRAMS],
)
def test_same_as_jax(name):
    expected = PROGRAMS[name](jax.custom_jvp, jax.custom_vjp)
    assert_close(PROGRAMS[name](eqg.jax_custom_jvp, eqg.jax_custom_vjp), expected)


# ---------------------------------------------------------------- more than with JAX


@eqg.jax_custom_vjp
def product(x, y):
    """The product; its gradient is five times too large."""
    return x * y


def _product_fwd(x, y):
    return product(x, y), (x, y)


def _product_bwd(residuals, ct):
    x, y = residuals
    return 5 * ct * y, 5 * ct * x


product.defvjp(_product_fwd, _product_bwd)


@eqg.jax_custom_jvp
def sine(x):
    return jnp.sin(x)


@sine.defjvp
def _sine_jvp(primals, tangents):
    return sine(*primals), jnp.cos(primals[0]) * tangents[0]


def test_forward_mode_of_a_reverse_rule():
    assert jax.jvp(product, (2.0, 3.0), (1.0, 0.0)) == (6.0, 3.0)
    assert jax.grad(product)(2.0, 3.0) == 15.0
    assert jax.jacfwd(jax.grad(product), 1)(2.0, 3.0) == 5.0


class Wave(eqx.Module):
    amplitude: jax.Array
    fn: object
    order: int

    def __call__(self, x):
        return self.amplitude * self.fn(x)


@pytest.mark.parametrize("transform", [lambda f: f, eqx.filter_jit])
def test_modules_as_arguments(transform):
    @eqg.jax_custom_jvp
    def forward(wave, x):
        return wave(x)

    @forward.defjvp
    def forward_jvp(primals, tangents):
        (wave, x), (t_wave, t_x) = primals, tangents
        assert t_wave.fn is None
        assert t_wave.order is None or t_wave.order.dtype == jax.dtypes.float0
        return forward(wave, x), 3 * t_wave.amplitude * wave.fn(x) + t_x

    @eqg.jax_custom_vjp
    def reverse(wave, x):
        return wave(x)

    def reverse_fwd(wave, x):
        return reverse(wave, x), (wave, x)

    def reverse_bwd(residuals, ct):
        wave, x = residuals
        ct_wave = eqx.tree_at(lambda w: w.amplitude, wave, 3 * ct * wave.fn(x))
        return ct_wave, ct  # as JAX drops what is returned for integers, so for functions

    reverse.defvjp(reverse_fwd, reverse_bwd)
    wave, x = Wave(jnp.array(2.0), jnp.cos, 1), jnp.array(0.0)
    for f in (forward, reverse):
        grads = transform(eqx.filter_grad(lambda wave: f(wave, x)))(wave)  # noqa: B023
        assert grads.amplitude == 3.0
        assert grads.fn is None
        assert transform(eqx.filter_grad(lambda x: f(wave, x)))(x) == 1.0  # noqa: B023


def closes_over(decorator, scale, x):
    """The rule, the function and an argument of `nondiff_argnums` hold a tracer."""
    fn = lambda x: jnp.sin(scale * x)

    if decorator is eqg.jax_custom_jvp:
        f = decorator(lambda fn, x: scale * fn(x), nondiff_argnums=(0,))
        f.defjvp(lambda fn, ps, ts: (f(fn, *ps), scale * jax.jvp(fn, ps, ts)[1] + ts[0]))
    else:
        f = decorator(lambda fn, x: scale * fn(x), nondiff_argnums=(0,))
        f.defvjp(
            lambda fn, x: (f(fn, x), x),
            lambda fn, x, ct: (ct * (scale * jax.grad(fn)(x) + 1.0),),
        )
    return f(fn, x)


@pytest.mark.parametrize("decorator", [eqg.jax_custom_jvp, eqg.jax_custom_vjp])
def test_traced_values_anywhere(decorator):
    f = ft.partial(closes_over, decorator)
    expected = lambda scale, x: scale**2 * jnp.cos(scale * x) + 1
    grad = jax.grad(f, 1)
    assert_close(jax.jit(grad)(3.0, 0.2), expected(3.0, 0.2))
    assert_close(jax.vmap(grad, (0, None))(jnp.asarray(X), 0.2), expected(jnp.asarray(X), 0.2))
    scanned = lambda scale, x: jax.lax.scan(lambda c, _: (f(scale, c), None), x, length=1)[0]
    assert_close(jax.jit(jax.grad(scanned, 1))(3.0, 0.2), expected(3.0, 0.2))
    with pytest.raises(RuleError, match=r"an argument of `nondiff_argnums`|it closes over"):
        jax.grad(f)(3.0, 0.2)


def test_tracers_as_nondiff_arguments_of_a_reverse_rule():
    @ft.partial(eqg.jax_custom_vjp, nondiff_argnums=(0,))
    def f(x, y):
        return x * y

    f.defvjp(lambda x, y: (f(x, y), y), lambda x, y, ct: (5 * x * ct,))
    assert jax.jit(jax.grad(f, 1))(2.0, 3.0) == 10.0
    assert jax.vmap(jax.grad(f, 1))(jnp.array([2.0]), jnp.array([3.0])) == 10.0
    with pytest.raises(RuleError, match=r"`f` was differentiated .* `nondiff_argnums`"):
        jax.grad(f)(2.0, 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["jax_custom_vjp3", "jax_custom_jvp3"])
@pytest.mark.parametrize("name", ["integers", "none_for_zero", "gradient_clipping"])
def test_experimental_flags(flag, name):
    if not hasattr(jax.config, flag):
        pytest.skip(f"this version of JAX does not have `{flag}`")
    run = ft.partial(PROGRAMS[name], eqg.jax_custom_jvp, eqg.jax_custom_vjp)
    expected, before = run(), getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        assert_close(run(), expected)
        assert_close(
            jax.jit(jax.grad(ft.partial(closes_over, eqg.jax_custom_vjp, 3.0)))(0.0), 10.0
        )
    finally:
        jax.config.update(flag, before)


def test_dead_terms_are_dropped():
    @eqg.jax_custom_jvp
    def f(x, y):
        return x + y

    f.defjvps(lambda t, out, x, y: t, lambda t, out, x, y: jnp.inf * t)
    assert jax.grad(f)(2.0, 3.0) == 1.0


def test_an_output_that_a_batch_shares():
    """JAX up to 0.11 counts the cotangent of the first output once for each example."""

    @eqg.jax_custom_vjp
    def f(x, y):
        return 2 * y, x * y

    f.defvjp(
        lambda x, y: (f(x, y), (x, y)),
        lambda res, cts: (cts[1] * res[1], 2 * cts[0] + cts[1] * res[0]),
        generic_batching=True,
    )

    def loss(f, xs, y):
        shared, out = jax.vmap(f, (0, None))(xs, y)
        return shared[0] + jnp.sum(out)

    plain = lambda x, y: (2 * y, x * y)
    expected = jax.grad(loss, (1, 2))(plain, jnp.asarray(X), 2.0)
    assert_close(jax.grad(loss, (1, 2))(f, jnp.asarray(X), 2.0), expected)


def test_concrete_values_at_compile_time():
    @jax.jit
    def program(x):
        with jax.ensure_compile_time_eval():
            assert product(2.0, 3.0) == 6.0
            assert jax.grad(product)(2.0, 3.0) == 15.0
        return product(x, 3.0)

    assert program(2.0) == 6.0


# ---------------------------------------------------------------- values in eager programs

N = jnp.array(2)


def _sliced(custom_vjp):
    f = custom_vjp(lambda x, n: x[:n])
    pad = lambda x, ct: jnp.zeros_like(x).at[: ct.size].set(ct)
    f.defvjp(lambda x, n: (x[:n], x), lambda x, ct: (pad(x, ct), None))
    return jax.grad(lambda x: jnp.sum(f(x, N)))(X)


def _on_its_device(custom_vjp):
    f = custom_vjp(lambda x, y: (2 * x, 3 * y))
    bwd = lambda _, ct: (jax.device_put(2 * ct[0], ct[0].device), 3 * ct[1])
    f.defvjp(lambda x, y: ((2 * x, 3 * y), None), bwd)
    return jax.grad(lambda x: jnp.sum(f(x, X)[0]))(jnp.asarray(X))


def _by_numpy(custom_vjp):
    f = custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), np.cos(np.asarray(x))), lambda cos, ct: (cos * ct,))
    return jax.grad(lambda x: jnp.sum(f(x)))(np.ones(2, np.float32))


@pytest.mark.parametrize("run", [_sliced, _on_its_device, _by_numpy])
def test_a_reverse_rule_looks_at_values(run):
    """Where the function or a rule is traced for a check, what JAX then raises is no error."""
    assert_close(run(eqg.jax_custom_vjp), run(jax.custom_vjp))


def _repeated(custom_jvp):
    f = custom_jvp(lambda x, n: x * jnp.ones(n))
    f.defjvp(lambda p, t: (f(*p), t[0] * jnp.ones(p[1])))
    return jax.vmap(lambda x: f(x, N))(jnp.asarray(X))


def _by_math(custom_jvp):
    f = custom_jvp(lambda x, y: math.sin(x))
    f.defjvp(lambda p, t: (math.sin(p[0]), math.cos(p[0]) * float(p[1]) * t[0]))
    return jax.grad(f)(0.3, 2.5)


def _constant_under_jit(custom_jvp):
    f = custom_jvp(lambda x, n: x)
    f.defjvp(lambda p, t: (p[0], t[0] * int(p[1])))
    return jax.jit(jax.grad(lambda x: f(x, np.array(2))))(0.3)


@pytest.mark.parametrize("run", [_repeated, _by_math, _constant_under_jit])
def test_a_forward_rule_looks_at_values(run):
    assert_close(run(eqg.jax_custom_jvp), run(jax.custom_jvp))


@pytest.mark.parametrize(
    "n", [np.arange(3), jax.random.split(jax.random.key(0), 3)], ids=["integers", "keys"]
)
def test_beside_an_array_that_has_no_tangent(n):
    """JAX's zero for such an array is of no number, and the zero of `y` is known to be one."""

    def gradients(custom_jvp):
        f = custom_jvp(lambda x, n, y: jnp.sin(x) * y)
        slope = lambda p, t: jnp.cos(p[0]) * p[2] * t[0] + jnp.sin(p[0]) * t[2]
        f.defjvp(lambda p, t: (f(*p), slope(p, t)))
        grad = jax.grad(f)
        return grad(0.5, n, 2.0), jax.jit(grad)(0.5, n, 2.0), jax.grad(grad)(0.5, n, 2.0)

    assert_close(gradients(eqg.jax_custom_jvp), gradients(jax.custom_jvp))


def test_the_error_of_a_rule_is_raised_once():
    f = eqg.jax_custom_jvp(lambda x, y: x * y)

    @f.defjvp
    def f_jvp(primals, tangents):
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        jax.grad(f)(2.0, 3.0)
    assert caught.value.__context__ is None


def test_positions_from_the_end():
    for decorator in (jax.custom_jvp, eqg.jax_custom_jvp):
        f = decorator(lambda x, n: x * n, nondiff_argnums=(-1,))
        f.defjvp(lambda n, p, t: (p[0] * n, 5 * t[0]))
        assert jax.grad(f)(0.3, 2) == 5.0
    with pytest.raises(RuleError, match="are not positions"):
        eqg.jax_custom_jvp(lambda x, n: x * n, nondiff_argnums=(-3,))


def test_the_gradient_of_a_number_stays_weak():
    """An output is not used, so that zeros take the place of its cotangent."""
    for decorator in (jax.custom_vjp, eqg.jax_custom_vjp):
        f = decorator(lambda x, y: (x * y, x))
        bwd = lambda xy, ct: (ct[0] * xy[1] + ct[1], ct[0] * xy[0])
        f.defvjp(lambda x, y: ((x * y, x), (x, y)), bwd)
        grad = jax.grad(lambda x, f=f: f(x, 2.0)[0])(0.3)
        assert (grad * jnp.bfloat16(1)).dtype == jnp.bfloat16


# ---------------------------------------------------------------- objects


def test_metadata():
    assert product.__name__ == "product"
    assert product.__doc__.startswith("The product")
    assert list(inspect.signature(product).parameters) == ["x", "y"]
    assert repr(product) == "<eqx_grads.jax_custom_vjp of product>"
    assert product.fwd is _product_fwd
    assert product.bwd is _product_bwd
    assert sine.jvp is _sine_jvp
    assert sine.fun.__name__ == "sine"
    assert sine.nondiff_argnums == ()
    with pytest.raises(AttributeError, match="has no attribute `backward`"):
        _ = product.backward


def test_a_leaf_and_an_object():
    assert jax.tree.leaves([product]) == [product]
    assert {product: 1}[product] == 1
    assert jax.jit(lambda f, x: f(x, 3.0), static_argnums=0)(product, 2.0) == 6.0
    assert pickle.loads(pickle.dumps(product)) is product
    assert copy.deepcopy(sine) is sine
    local = eqg.jax_custom_jvp(lambda x: 2 * x)
    local.defjvps(lambda t, out, x: 3 * t)
    assert jax.grad(copy.deepcopy(local))(1.0) == 3.0


class Holder:
    product = product


def test_does_not_bind_as_a_method():
    """As in JAX, where a decorated function in a class is called without `self`."""
    assert Holder().product(2.0, 3.0) == 6.0


# ---------------------------------------------------------------- errors


@pytest.fixture
def as_users_run_it():
    """Without the run-time type checks of the tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@eqg.jax_custom_jvp
def no_jvp(x, *, scale=1.0):
    return scale * x


@eqg.jax_custom_vjp
def no_vjp(x, y=1.0):
    return x * y


def keyword_only():
    f = eqg.jax_custom_jvp(no_jvp.fun)
    f.defjvps(lambda t, out, x: t)
    assert jax.grad(f)(2.0) == 1.0  # with the default value, as in JAX
    f(2.0, scale=3.0)


def partial_by_keyword():
    f = eqg.jax_custom_jvp(ft.partial(no_vjp.fun, 2.0))
    f.defjvps(lambda t, out, x: t)
    f(y=2.0)


def swapped_zeros():
    f = eqg.jax_custom_vjp(lambda x, y, z: (x, y, z))
    fwd = lambda x, y, z: (f(x.value, y.value, z.value), None)
    f.defvjp(fwd, lambda _, cts: (cts[1], cts[0], cts[2]), symbolic_zeros=True)
    jax.grad(lambda *xs: jnp.sum(f(*xs)[2]))(jnp.ones(1), jnp.ones(2), jnp.ones(3))


@pytest.mark.parametrize("call", [lambda: no_jvp(1.0), lambda: no_vjp(1.0)])
def test_a_missing_rule_is_an_attribute_error_too(call):
    with pytest.raises(AttributeError, match="defined for custom_"):  # as in JAX
        call()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        # These first sentences are JAX's.
        (lambda: no_jvp(1.0), r"^No JVP defined for custom_jvp function no_jvp using defjvp\."),
        (lambda: no_vjp(1.0), r"^No VJP defined for custom_vjp function no_vjp using defvjp\."),
        (
            lambda: product(1.0),
            r"custom_vjp-decorated function product could .*\nmissing a required argument: 'y'",
        ),
        (
            keyword_only,
            r"custom_jvp-decorated function no_jvp could .*"
            r"\nThe following keyword arguments could not be resolved to positions: scale",
        ),
        (partial_by_keyword, r"could not be resolved to positions: y"),
        (swapped_zeros, r"a zero that does not fit(.|\n)*is float..\[2\], .* is float..\[1\]"),
        (lambda: eqg.jax_custom_jvp(3), r"`fun` of `jax_custom_jvp` is not a function"),
        (lambda: sine.defjvp(3), r"`jvp` of `defjvp` is not a function"),
        (lambda: sine.defjvps(3), r"`jvps` of `defjvps` is not a function"),
        (lambda: product.defvjp(3, len), r"`fwd` of `defvjp` is not a function"),
        (lambda: product.defvjp(len, 3), r"`bwd` of `defvjp` is not a function"),
        (lambda: product.defvjp(len, len, "yes"), r"`symbolic_zeros` .* is not a bool"),
        (lambda: product.defvjp(len, len, False, 1), r"`optimize_remat` .* is not a bool"),
        (
            lambda: eqg.jax_custom_jvp(sine.fun, nondiff_argnums=(-2,)),
            r"`nondiff_argnums` of `sine` are not positions\.\n  they hold -2",
        ),
        (
            lambda: eqg.jax_custom_jvp(sine.fun, nondiff_argnames="z"),
            r"of `sine` .*\n  they hold 'z'; the parameters are x\n(.|\n)*nondiff_argnames",
        ),
    ],
)
def test_errors(call, text, as_users_run_it):
    with pytest.raises((RuleError, TypeError, ValueError), match=text):
        call()


def test_a_method_is_not_bound():
    """As in JAX, where Python says that an argument is missing. The error says why."""

    class Layer:
        @ft.partial(eqg.jax_custom_vjp, nondiff_argnums=(0,))
        def scale(self, x):
            return 2 * x

        scale.defvjp(lambda self, x: (2 * x, None), lambda self, _, ct: (3 * ct,))

    layer = Layer()
    with pytest.raises(RuleError, match=r"missing a required argument(?s:.*)does not bind"):
        jax.grad(lambda x: layer.scale(x))(1.0)
    assert jax.grad(lambda x: Layer.scale(layer, x))(1.0) == 3.0
