"""The rules of host functions: what they are given and may return, linear maps, and host
functions of tangents."""

import re

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import assert_close
from .test_host_function import fails, like, make, product, total


pytestmark = [pytest.mark.versions, pytest.mark.x64]

X = jnp.array([1.0, 2.0], jnp.float32)


def grad(f):
    return jax.grad(total(f))


def pushed(f):
    return lambda x: jax.jvp(f, (x,), (x,))[1]


# ---------------------------------------------------------------- what a rule is given


def shifted(x, shift=None, scale=2.0):
    return scale * x if shift is None else scale * x + shift


class TestDefaults:
    """Rules get positional arguments with their defaults, as the rules of `custom_vjp` do. The
    function and `out` get what the caller gave."""

    def test_of_a_backward_rule(self):
        seen = []
        h = eqg.host_function(shifted, out=lambda x, shift=None: x)

        @h.def_bwd
        def h_bwd(residuals, ct, *, perturbed):
            seen.append((residuals, perturbed))
            x, shift, scale = residuals
            return scale * ct, None if shift is None else ct, (ct * x).sum()

        assert jnp.all(grad(h)(X) == 2.0)
        (_, shift, scale), perturbed = seen[0]
        assert (shift, scale.dtype) == (None, jnp.result_type(float))
        assert isinstance(scale, np.ndarray)
        assert perturbed == (True, None, False)
        assert jnp.all(jax.jit(grad(lambda s: h(X, s)))(X) == 1.0)

    @pytest.mark.parametrize("vmap_method", ["sequential", "expand_dims"])
    def test_of_a_forward_rule(self, vmap_method):
        seen = []
        h = eqg.host_function(shifted, out=like, vmap_method=vmap_method)

        @h.def_jvp
        def h_jvp(primals, tangents):
            (x, shift, scale), (t_x, t_shift, t_scale) = primals, tangents
            seen.append((t_shift, t_scale))
            return shifted(x, shift, scale), scale * t_x + t_scale * x

        assert jnp.array_equal(pushed(h)(X), 2 * X)
        assert seen[0] == (None, 0.0)
        xs = jnp.stack([X, X])
        assert jnp.array_equal(jax.jit(jax.vmap(pushed(h)))(xs), 2 * xs)

    def test_of_keywords(self):
        """If the rule has a parameter for them."""

        @eqg.host_function(out=lambda x, **_: x)
        def power(x, *, n=3, unused=1):
            return x**n

        power.def_fwd(lambda x, *, n: (x**n, x))
        power.def_bwd(lambda x, ct, *, n: (ct * n * x ** (n - 1),))
        for of_power in (jax.grad(power), jax.jit(jax.grad(power))):
            assert (of_power(2.0), of_power(2.0, n=2)) == (12.0, 4.0)
        power.def_jvp(lambda p, t, *, n: (p[0] ** n, t[0] * n * p[0] ** (n - 1)))
        assert jax.jvp(power, (2.0,), (1.0,)) == (8.0, 12.0)

    def test_what_has_no_defaults(self):
        """A ufunc and `*args` get what was given; a default that is not an array stays."""
        for fn in (np.add, lambda x, *rest: x + rest[0]):
            h = eqg.host_function(fn, out=like)
            h.def_bwd(lambda residuals, ct: (ct,) * len(residuals))
            assert jnp.all(grad(lambda x, h=h: h(x, x))(X) == 2.0)
        h = eqg.host_function(lambda x, mode=("a", 1): x, out=like)

        @h.def_bwd
        def h_bwd(residuals, ct):
            assert residuals[1] == ("a", 1)
            return ct, None

        assert jnp.all(grad(h)(X) == 1.0)

    def test_a_tuple_that_is_unpacked(self):
        h = eqg.host_function(shifted, out=like)

        @h.def_jvp
        def h_jvp(primals, tangents):
            (x,), (t_x,) = primals, tangents
            return x, t_x

        @h.def_bwd
        def h_bwd(residuals, ct):
            (x,) = residuals
            return (x * ct,)

        for derive, rule in ((pushed(h), "`h_jvp`"), (grad(h), "`h_bwd`")):
            with pytest.raises(ValueError, match="to unpack") as caught:
                derive(X)
            note = "".join(caught.value.__notes__)
            assert re.search(f"in the rule {rule}.*an entry for each positional", note)
        with pytest.raises(jax.errors.JaxRuntimeError, match="entry for each positional"):
            jax.jit(pushed(h))(X).block_until_ready()


def test_none_among_the_cotangents_is_explained():
    @eqg.host_function(out=lambda x: (x, jax.ShapeDtypeStruct((), jnp.int32)))
    def count(x):
        return np.sin(x), np.int32(x.size)

    @count.def_bwd
    def _count_bwd(residuals, cts):
        return (cts[0] * np.cos(residuals[0]) + cts[1] * 1.0,)

    with pytest.raises(TypeError, match="NoneType") as caught:
        jax.grad(lambda x: count(x)[0])(1.0)
    assert any("`None` is the tangent or cotangent" in n for n in caught.value.__notes__)


# ---------------------------------------------------------------- what a rule returns


def test_a_rule_that_returns_none():
    f = make(bwd=lambda _, ct: (None, ct))
    assert not jnp.any(grad(f)(X, X))
    two = eqg.host_function(lambda x: (2 * x, np.sign(x)), out=lambda x: (x, x))
    two.def_jvp(lambda p, t: ((2 * p[0], np.sign(p[0])), (2 * t[0], None)))
    batch = jnp.stack([X, X])
    for fn in (two, jax.vmap(two)):
        assert_close(jax.jvp(fn, (batch,), (batch,))[1], (2 * batch, 0 * batch))
    fails("`keep` of `def_fwd` is not an integer", lambda: f.def_fwd(product, keep=-1))


def test_complex_steps_need_a_function_of_complex_numbers():
    f = eqg.host_function(
        lambda x: (x, np.abs(x)), out=lambda x: (x, x), finite_difference="complex"
    )
    fails("a real array for a complex argument", jax.grad(lambda x: f(x)[0]), 1.0)
    # They are divided by how far the argument moved in its precision.
    f = eqg.host_function(lambda x: 2 * x, out=like, finite_difference="central", step=1e-6)
    assert jax.grad(f)(jnp.float32(1.1)) == 2
    # A difference of differences takes a longer step, as it is of what is less exact.
    seen: list[float] = []
    f = eqg.host_function(lambda x: seen.append(x) or x, out=like, finite_difference="central")
    jax.grad(jax.grad(jax.grad(f)))(jnp.float32(0.5))
    steps = np.finfo("float32").eps ** (np.array([1, 2 / 3, 4 / 9]) / 3)
    assert np.isclose(np.ptp(seen), 2 * sum(steps))
    # Of complex arguments, differences are central ones.
    f = eqg.host_function(lambda z, x: np.exp(z * x), out=like, finite_difference="complex")
    z, x = jnp.array(1.0 + 1.0j), jnp.array(0.7)
    t = jax.jvp(f, (z, x), (1j * z, x))[1]
    assert_close(t, (1 + 1j) * z * x * jnp.exp(z * x), tolerance=1e-3)
    assert_close(jax.grad(jax.grad(f))(x, x), x**2 * jnp.exp(x * x), tolerance=1e-3)


# ---------------------------------------------------------------- linear maps


MATRIX = np.array([[0.5, -1.0, 0.3], [0.2, 0.7, -0.4]])


def matvec(x, scale=1.0):
    return scale * (MATRIX @ x)


def rmatvec(y, scale=1.0):
    return scale * (MATRIX.T @ y)


linear = eqg.linear_host_function(matvec, rmatvec, out=lambda x, *_: jnp.zeros(2, x.dtype))
POINT = jnp.array([1.0, -0.5, 2.0])


@pytest.mark.slow
def test_jax_30401_a_rule_applies_it_to_its_tangents():
    """jax#30401: a `pure_callback` there fails, here or in the Hessian."""

    def make(f):
        @jax.custom_jvp
        def squared(x):
            return f(x) ** 2

        @squared.defjvp
        def squared_jvp(primals, tangents):
            (x,), (t_x,) = primals, tangents
            return squared(x), 2 * f(x) * f(t_x)

        return lambda x: jnp.sum(jnp.cos(squared(x)))

    got, expected = make(linear), make(lambda x: jnp.asarray(MATRIX, x.dtype) @ x)
    for derivative in (jax.grad, jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
        assert_close(jax.jit(derivative(got))(POINT), derivative(expected)(POINT), eps=500)


def test_errors_of_linear_maps():
    parameter = "`matvec` was differentiated with respect to a parameter(?s:.*)the others have"
    fails(parameter, jax.grad(lambda scale: jnp.sum(linear(POINT, scale))), 2.0)
    fails(parameter, pushed(lambda scale: linear(POINT, scale)), 2.0)
    of_scale = lambda a: jax.linear_transpose(lambda x: linear(x, a), POINT)(POINT[:2])[0]
    fails("linear host function `rmatvec` was differentiated", grad(of_scale), 2.0)
    fails(
        r"`matvec` returned a different shape", eqg.linear_host_function(matvec, rmatvec), POINT
    )
    wrong = eqg.linear_host_function(matvec, lambda y: y, out=jnp.zeros(2))
    fails("`<lambda>` returned a different shape", grad(wrong), POINT)
    closing = lambda a: eqg.linear_host_function(lambda x: a * x, lambda y: a * y)(a)
    fails("closes over a traced value", jax.jit(closing), 1.0)


# ---------------------------------------------------------------- tangents on the host

_sine = eqg.host_function(np.sin, out=like)


def _callback(t):
    return jax.pure_callback(np.asarray, t, t, vmap_method="sequential")


def _padded(t):
    return _sine(jnp.concatenate([t, jnp.ones(1, t.dtype)]))[:2]


def of_host(called):
    """A function whose rule calls one of its tangents."""

    @eqg.custom_jvp
    def f(x):
        return 2 * x

    @f.def_jvp
    def f_jvp(primals, tangents):
        return f(*primals), 2 * called(tangents[0])

    return f


class TestATangentOnTheHost:
    @pytest.mark.parametrize(
        ("called", "name"), [(_sine, "`sin`"), (_callback, "`asarray`"), (_padded, "`sin`")]
    )
    def test_reverse_mode(self, called, name):
        f = of_host(called)
        match = rf"(?s)rule `\S*f_jvp` of `\S*f`.*{name} on the host.*test_host_rules.*"
        for derive in (grad(f), jax.jit(grad(f)), grad(jax.jit(f)), grad(jax.checkpoint(f))):
            fails(match + "linear_host_function", derive, X)
        report = eqgt.check_rule(f, X, checks=("reverse",), raises=False)
        assert "no reverse mode" not in str(report)
        assert re.search(r"rule `\S*f_jvp`", str(report))

    def test_of_one_argument_of_two(self):
        """The other has a reverse mode."""

        @eqg.custom_jvp
        def f(x, y):
            return x, y

        @f.def_jvp
        def f_jvp(primals, tangents):
            return f(*primals), (_callback(tangents[0]), 3 * tangents[1])

        assert jnp.all(grad(lambda y: f(X, y)[1])(X) == 3.0)
        assert jnp.all(jax.grad(lambda x, y: f(x, y)[1].sum(), (0, 1))(X, X)[1] == 3.0)
        fails("on the host", grad(lambda x: f(x, x)[0]), X)

    def test_a_constant_that_a_loop_carries(self):
        """Only the tangent of the second output comes from one."""

        def called(t):
            three, same = jax.lax.while_loop(
                lambda c: c[0][0] < 3, lambda c: (c[0] + 1, c[1]), (jnp.zeros_like(t), t)
            )
            return jax.pure_callback(np.asarray, three, three) * same

        assert_close(pushed(of_host(called))(X), 6 * X)


class TestAValueOfTangents:
    def test_the_error(self):
        @eqg.custom_jvp
        def f(x):
            return x, {"a": jnp.sin(x)}

        @f.def_jvp
        def f_jvp(primals, tangents):
            x, t = primals[0], tangents[0]
            return (x, {"a": jnp.sin(x + t)}), (t, {"a": jnp.cos(x) * t})

        loss = lambda x: f(x)[1]["a"].sum()
        match = r"(?s)`\S*f_jvp` of `\S*f` returned a value that depends on its tangents.*"
        match += r"at out\[1\]\['a'\].*test_host_rules"
        for run in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
            fails(match, run, X)
        fails(match, pushed(loss), X)
        fails(match, jax.hessian(loss), X)
        report = eqgt.check_rule(f, X, checks=("reverse",), raises=False)
        assert "no reverse mode" not in str(report)
        assert "must not depend on the tangents" in str(report)

    def test_the_value_and_the_tangent_of_one_call(self):
        """JAX separates them, by whatever way it traces the call."""
        f = eqg.custom_jvp(lambda x: jnp.sin(x))
        loop = lambda x: jax.lax.while_loop(lambda y: y[0] < 0.9, jax.jit(jnp.sin), x)
        f.def_jvp(lambda primals, tangents: jax.jvp(jax.jit(jnp.sin), primals, tangents))
        assert_close(grad(f)(X), jnp.cos(X))
        f.def_jvp(lambda primals, tangents: (loop(primals[0]), 3 * tangents[0]))
        assert jnp.all(grad(f)(X) == 3.0)
