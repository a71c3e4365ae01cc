"""The arguments that the rules of host functions are given, their complex convention, and host
functions of tangents."""

import re

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError


X = jnp.array([1.0, 2.0], jnp.float32)


def _shifted(x, shift=None, scale=2.0):
    return scale * x if shift is None else scale * x + shift


def _like_x(x, *_):
    return x


class TestDefaults:
    """Rules are given positional arguments that have their default, as those of `custom_vjp`
    are; the function and `out` are given what the caller gave."""

    @pytest.mark.slow
    def test_def_bwd(self):
        seen = []
        h = eqg.host_function(_shifted, out=lambda x, shift=None: x)

        @h.def_bwd
        def h_bwd(residuals, ct, *, perturbed):
            seen.append((residuals, perturbed))
            x, shift, scale = residuals
            return scale * ct, None if shift is None else ct, (ct * x).sum()

        np.testing.assert_allclose(jax.grad(lambda x: h(x).sum())(X), 2.0)
        (_, shift, scale), perturbed = seen[0]
        assert shift is None
        assert isinstance(scale, np.ndarray)
        assert scale.dtype == jnp.result_type(float)
        assert perturbed == (True, None, False)
        by_shift = jax.jit(jax.grad(lambda s: h(X, s).sum()))
        np.testing.assert_allclose(by_shift(X), 1.0)
        eqgt.check_rule(h, X, order=1, checks=("reverse", "forward", "transforms"))

    def test_def_fwd(self):
        h = eqg.host_function(_shifted, out=_like_x)

        @h.def_fwd
        def h_fwd(x, shift, scale):
            return _shifted(x, shift, scale), scale

        h.def_bwd(lambda scale, ct: (scale * ct, None, None))
        for grad in (jax.grad, lambda f: jax.jit(jax.grad(f))):
            np.testing.assert_allclose(grad(lambda x: h(x).sum())(X), 2.0)

    @pytest.mark.parametrize("vmap_method", ["sequential", "expand_dims"])
    def test_def_jvp(self, vmap_method):
        seen = []
        h = eqg.host_function(_shifted, out=_like_x, vmap_method=vmap_method)

        @h.def_jvp
        def h_jvp(primals, tangents):
            (x, shift, scale), (t_x, t_shift, t_scale) = primals, tangents
            seen.append((t_shift, t_scale))
            return _shifted(x, shift, scale), scale * t_x + t_scale * x

        assert jnp.array_equal(jax.jvp(h, (X,), (X,))[1], 2 * X)
        assert seen[0] == (None, 0.0)
        pushed = jax.jit(jax.vmap(lambda x: jax.jvp(h, (x,), (x,))[1]))(jnp.stack([X, X]))
        assert jnp.array_equal(pushed, jnp.stack([2 * X, 2 * X]))

    def test_what_has_no_defaults(self):
        """A ufunc and `*args` get what was given; a default that is no array stays."""
        h = eqg.host_function(np.add, out=lambda x, y: x)
        h.def_bwd(lambda residuals, ct: (ct,) * len(residuals))
        np.testing.assert_allclose(jax.grad(lambda x: h(x, x).sum())(X), 2.0)
        h = eqg.host_function(lambda x, *rest: x, out=_like_x)
        h.def_bwd(lambda residuals, ct: (ct,) + (None,) * (len(residuals) - 1))
        np.testing.assert_allclose(jax.grad(lambda x: h(x, x, x).sum())(X), 1.0)
        h = eqg.host_function(lambda x, mode=("a", 1): x, out=_like_x)

        @h.def_bwd
        def h_bwd(residuals, ct):
            assert residuals[1] == ("a", 1)
            return ct, None

        np.testing.assert_allclose(jax.grad(lambda x: h(x).sum())(X), 1.0)

    def test_a_traced_default(self):
        def loss(x):
            return eqg.host_function(lambda y, shift=x: y, out=_like_x)(x).sum()

        with pytest.raises(RuleError, match="closes over a traced value"):
            jax.jit(loss)(X)

    def test_a_tuple_that_is_unpacked(self):
        h = eqg.host_function(_shifted, out=_like_x)

        @h.def_jvp
        def h_jvp(primals, tangents):
            (x,), (t_x,) = primals, tangents
            return x, t_x

        @h.def_bwd
        def h_bwd(residuals, ct):
            (x,) = residuals
            return (x * ct,)

        forward = lambda x: jax.jvp(h, (x,), (x,))
        for derive, given in ((forward, "`h_jvp` is given `primals`"), (_grad(h), "`h_bwd`")):
            with pytest.raises(ValueError, match="to unpack") as caught:
                derive(X)
            notes = "\n".join(caught.value.__notes__)
            assert "`x`, `shift`, `scale`" in notes
            assert given in notes
            assert "_host_call" not in notes
        with pytest.raises(jax.errors.JaxRuntimeError, match="`x`, `shift`, `scale`"):
            jax.jit(forward)(X)[1].block_until_ready()

    def test_errors_name_what_a_host_function_has(self):
        h = eqg.host_function(_shifted, out=_like_x)
        h.def_bwd(lambda residuals: residuals)
        with pytest.raises(RuleError, match="that have their default are passed") as caught:
            _grad(h)(X)
        assert "vmap(" not in str(caught.value)


def _grad(f):
    return jax.grad(lambda *args: f(*args).sum())


class TestTheNumberOfCotangents:
    """The advice to return a tuple is for a rule that returned none."""

    @pytest.mark.parametrize(("ct", "is_tuple"), [(X, False), ((X,), True)])
    def test_of_a_host_function(self, ct, is_tuple):
        h = eqg.host_function(lambda x, y: x, out=_like_x)
        h.def_bwd(lambda residuals, _: ct)
        with pytest.raises(RuleError, match="one cotangent for each argument") as caught:
            _grad(h)(X, X)
        assert ("Return a tuple" in str(caught.value)) == (not is_tuple)

    @pytest.mark.parametrize(("ct", "is_tuple"), [(X, False), ((X,), True)])
    def test_of_a_custom_vjp(self, ct, is_tuple):
        f = eqg.custom_vjp(lambda x, y: x)
        f.def_fwd(lambda x, y: (x, None))
        f.def_bwd(lambda residuals, _: ct)
        with pytest.raises(RuleError, match="one cotangent for each argument") as caught:
            _grad(f)(X, X)
        assert ("Return a tuple" in str(caught.value)) == (not is_tuple)


# ------------------------------------------------------------ host functions of tangents

_sine = eqg.host_function(np.sin, out=_like_x)


def _callback(t):
    return jax.pure_callback(np.asarray, t, t, vmap_method="sequential")


def _of_host(x, called):
    @eqg.custom_jvp
    def f(x):
        return 2 * x

    @f.def_jvp
    def f_jvp(primals, tangents):
        return f(*primals), 2 * called(tangents[0])

    return f(x)


def _padded(t):
    return _sine(jnp.concatenate([t, jnp.ones(1, t.dtype)]))[:2]


class TestATangentOnTheHost:
    @pytest.mark.parametrize(
        ("called", "name"), [(_sine, "`sin`"), (_callback, "`asarray`"), (_padded, "`sin`")]
    )
    def test_reverse_mode(self, called, name):
        f = lambda x: _of_host(x, called)
        match = rf"(?s)rule `\S*f_jvp` of `\S*f`.*{name} on the host.*test_host_rules"
        for grad in (_grad(f), jax.jit(_grad(f)), _grad(jax.jit(f)), _grad(jax.checkpoint(f))):
            with pytest.raises(RuleError, match=match) as caught:
                grad(X)
            assert "linear_host_function" in str(caught.value)
        report = eqgt.check_rule(f, X, checks=("reverse",), raises=False)
        assert "no reverse mode" not in str(report)
        assert re.search(r"rule `\S*f_jvp`", str(report))

    def test_in_a_loop(self):
        def loop(x):
            return jax.lax.scan(lambda c, _: (_of_host(c, _callback), None), x, length=2)[0]

        with pytest.raises(RuleError, match="on the host"):
            _grad(loop)(X)

    def test_of_one_argument_of_two(self):
        """The other has a reverse mode."""

        @eqg.custom_jvp
        def f(x, y):
            return x, y

        @f.def_jvp
        def f_jvp(primals, tangents):
            return f(*primals), (_callback(tangents[0]), 3 * tangents[1])

        of_second = jax.grad(lambda y: f(X, y)[1].sum())
        np.testing.assert_allclose(of_second(X), 3.0)
        both = jax.grad(lambda x, y: f(x, y)[1].sum(), (0, 1))
        np.testing.assert_allclose(both(X, X)[1], 3.0)
        with pytest.raises(RuleError, match="on the host"):
            jax.grad(lambda x: f(x, x)[0].sum())(X)

    def test_forward_mode_is_as_it_was(self):
        f = lambda x: _of_host(x, _callback)
        pushed = lambda x: jax.jvp(f, (x,), (x,))[1]
        for run in (pushed, jax.jit(pushed), jax.vmap(pushed)):
            np.testing.assert_allclose(run(X), 2 * X)

    def test_a_constant_that_a_loop_carries(self):
        """Only the tangent of the second output comes from one."""

        def called(t):
            three, same = jax.lax.while_loop(
                lambda c: c[0][0] < 3, lambda c: (c[0] + 1, c[1]), (jnp.zeros_like(t), t)
            )
            return jax.pure_callback(np.asarray, three, three) * same

        np.testing.assert_allclose(_pushed(called)(X), 6 * X)

    def test_a_linear_host_function(self):
        linear = eqg.linear_host_function(lambda x: 3 * x, lambda y: 3 * y)
        np.testing.assert_allclose(_grad(lambda x: _of_host(x, linear))(X), 6.0)

    def test_a_backward_rule(self):
        """The way out that the error gives."""
        f = eqg.custom_vjp(lambda x: 2 * x)
        f.def_fwd(lambda x: (f(x), None))
        f.def_bwd(lambda _, ct: (2 * ct,))
        f.def_jvp(lambda primals, tangents: (f(*primals), 2 * _callback(tangents[0])))
        np.testing.assert_allclose(_grad(f)(X), 2.0)
        np.testing.assert_allclose(jax.jvp(f, (X,), (X,))[1], 2 * X)


def _pushed(called):
    return lambda x: jax.jvp(lambda x: _of_host(x, called), (x,), (x,))[1]


class TestAValueOfTangents:
    def test_the_error(self):
        @eqg.custom_jvp
        def f(x):
            return x, {"a": jnp.sin(x)}

        @f.def_jvp
        def f_jvp(primals, tangents):
            x, t = primals[0], tangents[0]
            return (x, {"a": jnp.sin(x + 0 * t)}), (t, {"a": jnp.cos(x) * t})

        loss = lambda x: f(x)[1]["a"].sum()
        match = r"(?s)`\S*f_jvp` of `\S*f` returned a value that depends on its tangents.*"
        for run in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
            with pytest.raises(RuleError, match=match + r"at out\[1\]\['a'\].*test_host_rules"):
                run(X)
        np.testing.assert_allclose(jax.jvp(loss, (X,), (X,))[1], (jnp.cos(X) * X).sum(), 1e-6)
        with pytest.raises(RuleError, match=match):
            jax.hessian(loss)(X)
        report = eqgt.check_rule(f, X, checks=("reverse",), raises=False)
        assert "no reverse mode" not in str(report)
        assert "must not depend on the tangents" in str(report)

    def test_the_value_and_the_tangent_of_one_call(self):
        """JAX separates them, by whatever way it traces the call."""
        f = eqg.custom_jvp(lambda x: jnp.sin(x))
        loop = lambda x: jax.lax.while_loop(lambda y: y[0] < 0.9, jax.jit(jnp.sin), x)
        f.def_jvp(lambda primals, tangents: jax.jvp(jax.jit(jnp.sin), primals, tangents))
        np.testing.assert_allclose(_grad(f)(X), jnp.cos(X), 1e-6)
        f.def_jvp(lambda primals, tangents: (loop(primals[0]), 3 * tangents[0]))
        np.testing.assert_allclose(_grad(f)(X), 3.0)


# ------------------------------------------------------------ complex numbers


@pytest.mark.slow
def test_the_complex_convention():
    """That of JAX, without a conjugate, which a `rmatvec` has."""
    k = np.array([[1 + 2j, 3 - 1j], [0.5j, -2.0]], np.complex64)
    z = jnp.array([0.3 + 0.7j, -1.1j], jnp.complex64)
    host = eqg.host_function(lambda z: k @ z, out=_like_x)
    host.def_bwd(lambda residuals, ct: (k.T @ ct,))
    linear = eqg.linear_host_function(lambda z: k @ z, lambda y: k.conj().T @ y)
    loss = lambda f: lambda z: jnp.abs(f(z) ** 2 + 1j * f(z)).sum()
    expected = jax.grad(loss(lambda z: k @ z))(z)
    for f in (host, linear):
        np.testing.assert_allclose(jax.grad(loss(f))(z), expected, 1e-5)
        eqgt.check_rule(f, z, order=1, checks=("forward", "reverse", "adjoint"))


# ------------------------------------------------------------ whose function it was


def _scale(x, a):
    return a * x


def _scale_adjoint(y, a):
    return a * y


def test_a_parameter_of_a_linear_map():
    scale = eqg.linear_host_function(_scale, _scale_adjoint)
    with pytest.raises(RuleError, match="function `_scale` was differentiated with respect"):
        jax.grad(lambda a: scale(X, a).sum())(2.0)
    transpose = lambda a: jax.linear_transpose(lambda x: scale(x, a), X)(X)[0].sum()
    with pytest.raises(RuleError, match="adjoint `_scale_adjoint` of `_scale`, which reverse"):
        jax.grad(transpose)(2.0)


def test_a_rule_that_returns_another_shape_is_named_with_its_function():
    h = eqg.host_function(_shifted, out=_like_x)
    h.def_bwd(lambda residuals, ct: (ct[:1, None, None], None, None))
    with pytest.raises(RuleError, match=r"`\S*<lambda>` of `_shifted` returned another shape"):
        _grad(h)(jnp.ones(3))
    h.def_fwd(lambda x, shift, scale: ((x,), x))
    with pytest.raises(RuleError, match=r"`\S*<lambda>` of `_shifted` returned another struct"):
        _grad(h)(jnp.ones(3))


def test_numpy_in_a_residual():
    def residual(y, a):
        return np.asarray(y) ** 2 - a

    root = eqg.implicit(residual)(lambda a: jnp.sqrt(a))
    with pytest.raises(jax.errors.TracerArrayConversionError, match="traced") as caught:
        jax.grad(root)(2.0)
    (note,) = (note for note in caught.value.__notes__ if "`jnp`" in note)
    assert "residual` (in" in note
    assert "test_host_rules" in note


def test_a_rule_that_is_given_anew():
    """What JAX kept of the calls of the earlier rule is not used."""
    h = eqg.host_function(lambda x: 3 * x, out=_like_x)
    for factor in (3.0, 5.0):
        h.def_bwd(lambda _, ct, factor=factor: (factor * ct,))
        h.def_jvp(lambda p, t, factor=factor: (3 * p[0], factor * t[0]))
        for derivative in (jax.grad, jax.jacfwd):
            np.testing.assert_allclose(derivative(h)(X[0]), factor)
            np.testing.assert_allclose(jax.vmap(derivative(h))(X), factor)
