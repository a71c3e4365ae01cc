"""The arguments that the rules of host functions are given, their complex convention, and host
functions of tangents."""

import re

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close


pytestmark = pytest.mark.x64


X = jnp.array([1.0, 2.0], jnp.float32)


def _shifted(x, shift=None, scale=2.0):
    return scale * x if shift is None else scale * x + shift


def _like_x(x, *_):
    return x


class TestDefaults:
    """Rules get positional arguments with their defaults, as the rules of `custom_vjp` do. The
    function and `out` get what the caller gave."""

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
        """A ufunc and `*args` get what was given; a default that is not an array stays."""
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
        for derive, given in ((forward, "`h_jvp` gets `primals`"), (_grad(h), "`h_bwd`")):
            with pytest.raises(ValueError, match="to unpack") as caught:
                derive(X)
            notes = "\n".join(caught.value.__notes__)
            assert "`x`, `shift`, `scale`" in notes
            assert given in notes
            assert "_host_call" not in notes
        with pytest.raises(jax.errors.JaxRuntimeError, match="`x`, `shift`, `scale`"):
            jax.jit(forward)(X)[1].block_until_ready()


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

    def test_a_constant_that_a_loop_carries(self):
        """Only the tangent of the second output comes from one."""

        def called(t):
            three, same = jax.lax.while_loop(
                lambda c: c[0][0] < 3, lambda c: (c[0] + 1, c[1]), (jnp.zeros_like(t), t)
            )
            return jax.pure_callback(np.asarray, three, three) * same

        np.testing.assert_allclose(_pushed(called)(X), 6 * X)

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


# ---------------------------------------------------------------- broadcast arguments


def _out(x, y):
    return jax.ShapeDtypeStruct(np.broadcast_shapes(x.shape, y.shape), x.dtype)


def _product(x, y):
    return x * y


def _product_bwd(residuals, ct):
    x, y = residuals
    return ct * y, ct * x


def _make(**options):
    function = eqg.host_function(_product, out=_out, **options)
    function.def_bwd(_product_bwd)
    return function


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "legacy_vectorized"])
@pytest.mark.parametrize(
    "shapes", [((5,), ()), ((2, 3), (3,)), ((2, 1), (1, 3))], ids=["scalar", "row", "ones"]
)
def test_cotangents_are_summed_over_broadcast_axes(shapes, method, getkey):
    x, y = (jr.normal(getkey(), shape) for shape in shapes)
    product = _make(vmap_method=method)
    gradients = lambda fn: jax.grad(lambda x, y: jnp.sum(jnp.sin(fn(x, y))), (0, 1))
    with jax.numpy_rank_promotion("allow"):
        expected = gradients(_product)(x, y)
        assert_close(gradients(product)(x, y), expected)
        assert_close(jax.jit(gradients(product))(x, y), expected)
        xs = jnp.stack([x, 2 * x])
        batched = lambda fn: jax.jit(jax.vmap(gradients(fn), (0, None)))(xs, y)
        # With an axis in front, a `y` without it has to broadcast as it does without `vmap`.
        if method == "sequential" or len(shapes[0]) > 1 or shapes[1] == ():
            assert_close(batched(product), batched(_product))


def test_half_precision_is_summed_in_single():
    product = _make()
    x = jnp.ones(4096, jnp.float16)
    ct_y = jax.grad(lambda y: product(x, y)[:].sum().astype(jnp.float32))(jnp.float16(1))
    assert ct_y == 4096


def test_a_cotangent_that_no_broadcast_explains():
    function = eqg.host_function(_product, out=_out)
    function.def_bwd(lambda residuals, ct: (ct[:2], ct[0]))
    with pytest.raises(
        eqg.RuleError,
        match=r"(?s)at the cotangent of `x`: promised float32\[3\], returned "
        r"float32\[2\].*Return a cotangent of the shape of its argument",
    ):
        jax.grad(lambda x: jnp.sum(function(x, 2.0)))(jnp.ones(3, jnp.float32))


def test_none_among_the_cotangents_is_explained():
    @eqg.host_function(out=lambda x: (x, jax.ShapeDtypeStruct((), jnp.int32)))
    def count(x):
        return np.sin(x), np.int32(x.size)

    @count.def_bwd
    def _count_bwd(residuals, cts):
        ct, ct_size = cts
        return (ct * np.cos(residuals[0]) + ct_size * 1.0,)

    with pytest.raises(TypeError, match="NoneType") as caught:
        jax.grad(lambda x: count(x)[0])(1.0)
    assert any("`None` is the tangent or cotangent" in n for n in caught.value.__notes__)
