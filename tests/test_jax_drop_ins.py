"""`jax_custom_jvp` and `jax_custom_vjp`: what JAX's decorators do, and what they can't do.

The witness is JAX itself: `PROGRAMS` are run with its decorators and with ours.
"""

import functools as ft
import math

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.x64]


# ---------------------------------------------------------------- the same as with JAX

PROGRAMS = {}


X = np.linspace(0.3, 1.1, 3)


def program(fn):
    PROGRAMS[fn.__name__] = fn
    return fn


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


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_jax(name):
    expected = PROGRAMS[name](jax.custom_jvp, jax.custom_vjp)
    assert_close(PROGRAMS[name](eqg.jax_custom_jvp, eqg.jax_custom_vjp), expected)


# ---------------------------------------------------------------- more than with JAX


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
    """Where the function or a rule is traced for a check, the exception that JAX then raises is
    not an error."""
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


def test_the_gradient_of_a_number_stays_weak():
    """An output is not used, so that zeros take the place of its cotangent."""
    for decorator in (jax.custom_vjp, eqg.jax_custom_vjp):
        f = decorator(lambda x, y: (x * y, x))
        bwd = lambda xy, ct: (ct[0] * xy[1] + ct[1], ct[0] * xy[0])
        f.defvjp(lambda x, y: ((x * y, x), (x, y)), bwd)
        grad = jax.grad(lambda x, f=f: f(x, 2.0)[0])(0.3)
        assert (grad * jnp.bfloat16(1)).dtype == jnp.bfloat16


# ---------------------------------------------------------------- errors


@eqg.jax_custom_jvp
def no_jvp(x, *, scale=1.0):
    return scale * x


@eqg.jax_custom_vjp
def no_vjp(x, y=1.0):
    return x * y


@pytest.mark.parametrize("call", [lambda: no_jvp(1.0), lambda: no_vjp(1.0)])
def test_a_missing_rule_is_an_attribute_error_too(call):
    with pytest.raises(AttributeError, match="defined for custom_"):  # as in JAX
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
