"""The one primitive of every call: what it carries, how it is batched and traced."""

import abc
import itertools

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import pytest
from eqx_grads import ste
from eqx_grads._jaxprs.structure import equations


pytestmark = [pytest.mark.versions, pytest.mark.x64]


X, Y = jnp.array([0.5, -1.2, 2.0]), jnp.array([1.5, 0.3, -0.7])


# ------------------------------------------------------------------ batching


def test_a_tangent_with_the_batch_of_an_output_without_it():
    """The value of one argument, the derivative of another."""
    f = lambda v, s: eqg.replace_gradient(v, s)
    out = jax.vmap(f, (None, 0))(X, jnp.stack([X, Y]))
    eqgt.assert_trees_close(out, jnp.stack([X, X]))
    loss = lambda s: jnp.sum(jnp.sin(jax.vmap(f, (None, 0))(X, s)))
    expected = jnp.stack([jnp.cos(X), jnp.cos(X)])
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        eqgt.assert_trees_close(gradient(jnp.stack([X, Y])), expected)


def test_an_argument_without_the_batch_keeps_its_value():
    """Eagerly it is an array, at which the function may look."""
    f = eqg.custom_jvp(lambda x, n: x * 2 if n > 1 else x)
    f.def_jvp(lambda p, t: (f(*p), t[0]))
    eqgt.assert_trees_close(jax.vmap(f, (0, None))(X, 2.0), 2 * X)


def half_batched(w, x):
    return 2 * w, w * x, jnp.ones_like(w), jnp.argmax(w)


half_batched_vjp = eqg.custom_vjp(half_batched)
half_batched_vjp.def_fwd(lambda w, x: (half_batched_vjp(w, x), (w, x)))
half_batched_vjp.def_bwd(lambda r, cts: (2 * cts[0] + r[1] * cts[1], r[0] * cts[1]))


@pytest.mark.parametrize("loop", ["switch", "fori", "while", "scan", "jit", "plain"])
def test_an_output_that_is_not_batched(loop):
    """Its tangent comes from the same call as the others, and is batched with them."""

    def call(f, i, w, x):
        if loop == "switch":
            return jax.lax.switch(i, [f, f], w, x)
        if loop == "fori":
            return jax.lax.fori_loop(0, 2, lambda _, c: f(c[0], x), f(w, x))
        if loop == "while":
            step = lambda c: (c[0] + 1, f(c[1][0], x))
            return jax.lax.while_loop(lambda c: c[0] < 2, step, (0, f(w, x)))[1]
        if loop == "scan":
            return jax.lax.scan(lambda c, _: (f(c[0], x), c[3]), f(w, x), None, 2)[0]
        return jax.jit(f)(w, x) if loop == "jit" else f(w, x)

    def loss(f):
        vmapped = jax.vmap(lambda i, w, x: call(f, i, w, x), (0, None, 0))
        return lambda w, xs: sum(
            jnp.sum(jnp.sin(o)) for o in vmapped(jnp.arange(3) % 2, w, xs)[:3]
        )

    args = (jnp.array([0.5, 0.7]), jnp.arange(6.0).reshape(3, 2))
    with_rule, plain = loss(half_batched_vjp), loss(half_batched)
    eqgt.assert_trees_close(jax.jvp(with_rule, args, args), jax.jvp(plain, args, args))
    if loop != "while":
        eqgt.assert_trees_close(
            jax.grad(with_rule, (0, 1))(*args), jax.grad(plain, (0, 1))(*args)
        )


# ------------------------------------------------------------------ other interpreters


def test_effects_happen_once(capfd):
    f = eqg.custom_jvp(lambda x: (jax.debug.print("seen {}", x), jnp.sin(x))[1])
    f.def_jvp(lambda p, t: (f(*p), jnp.cos(p[0]) * t[0]))
    for run in (jax.jit(f), jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f))):
        run(0.5)
        jax.effects_barrier()
        assert capfd.readouterr().out.count("seen 0.5") == 1


# ------------------------------------------------------------------ one object


class Scale(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x


def scaled():
    f = eqg.custom_jvp(Scale(X))
    f.def_jvp(lambda p, t: (f(*p), 7 * t[0]))
    return f


def test_d11_a_decorated_module_shows_its_arrays():
    f = scaled()
    assert jax.tree.leaves(f)[0] is X
    assert len(jax.tree.leaves(f)) == 1
    eqgt.assert_trees_close(jax.grad(lambda x: jnp.sum(f(x)))(X), jnp.full(3, 7.0))
    doubled = jax.tree.map(lambda w: 2 * w, f)
    eqgt.assert_trees_close(doubled(1.0), 2 * X)
    for run in (eqx.filter_grad, lambda g: eqx.filter_jit(eqx.filter_grad(g))):
        with pytest.raises(
            eqg.RuleError, match=r"(?s)closes over.*at `weight`.*Pass the Module as an argument"
        ):
            run(lambda f: jnp.sum(f(2.0)))(f)


# ------------------------------------------------------------------ findings


class AbstractFirst(eqx.Module):
    @abc.abstractmethod
    @eqg.custom_jvp
    def apply(self, x):
        """The outer decorator sets an attribute."""


class AbstractSecond(eqx.Module):
    @eqg.custom_jvp
    @abc.abstractmethod
    def apply(self, x):
        """The inner decorator has set one."""


@pytest.mark.parametrize("cls", [AbstractFirst, AbstractSecond])
def test_d9_abstract_methods(cls):
    with pytest.raises(TypeError, match="abstract"):
        cls()

    class Concrete(cls):
        @eqg.custom_jvp
        def apply(self, x):
            return x

        apply.def_jvp(lambda p, t: (p[1], 2 * t[1]))

    assert jax.grad(Concrete().apply)(1.0) == 2.0


def test_d12_nonlocal():
    """A cell that holds no tracer is shared with the original."""
    calls = 0

    def loss(x, a):
        def fn(x):
            nonlocal calls
            calls += 1
            return jnp.sin(x) * a

        f = eqg.custom_jvp(fn)
        f.def_jvp(lambda p, t: (f(*p), jnp.cos(*p) * a * t[0]))
        return f(x)

    jax.jit(loss)(1.0, 2.0)
    assert calls == 1


# ------------------------------------------------------------------ what an adversary found


def _index():
    return jax.lax.axis_index("i").astype(float)


def _rounded_jvp():
    f = eqg.custom_jvp(lambda w: jnp.round(w))
    f.def_jvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return f


def _rounded_vjp():
    f = eqg.custom_vjp(lambda w: jnp.round(w))
    f.def_fwd(lambda w: (f(w), None))
    f.def_bwd(lambda _, ct: (ct,))
    return f


_GRADIENTS = {
    "eager": lambda mapped: jax.grad(lambda w, xs: jnp.sum(mapped(w, xs))),
    "jit of grad": lambda mapped: jax.jit(jax.grad(lambda w, xs: jnp.sum(mapped(w, xs)))),
    "grad of jit": lambda mapped: jax.grad(lambda w, xs: jnp.sum(jax.jit(mapped)(w, xs))),
}


@pytest.mark.parametrize("gradient", _GRADIENTS.values(), ids=_GRADIENTS)
@pytest.mark.parametrize("axis_name", [None, "i"])
@pytest.mark.parametrize(
    "rounded",
    [
        _rounded_jvp(),
        _rounded_vjp(),
        ste.round,
    ],
    ids=["custom_jvp", "custom_vjp", "ste"],
)
def test_a_call_without_the_batch_stays_one_call_under_a_named_axis(
    rounded, axis_name, gradient
):
    """In a gradient, with the name of an axis that the function does not use, it was computed
    for each example, and so was all that used its result: a convolution of weights that are
    quantized was a grouped one, and took several hundred times as long."""
    w, xs = jnp.ones((5, 3)), jnp.ones((64, 3))
    mapped = jax.vmap(lambda w, x: rounded(w) @ x, (None, 0), axis_name=axis_name)
    eqgt.assert_trees_close(gradient(mapped)(w, xs), jnp.full((5, 3), 64.0))
    program = jax.make_jaxpr(gradient(mapped))(w, xs)
    sizes = {v.aval.size for eqn in equations(program) for v in eqn.outvars}
    assert max(sizes) == 64 * 5  # the outputs, and not the weights, of each example


def test_rules_that_use_the_axis_if_some_arguments_are_perturbed():
    """A rule is traced with all arguments perturbed to see whether it uses the axis. JAX runs
    this one after the `vmap`, where the axis has no name."""
    reverse = eqg.custom_vjp(lambda a, b: a * b)

    @reverse.def_fwd
    def _(a, b, *, perturbed):
        factor = 1 + _index() if perturbed == (True, False) else jnp.ones(())
        return reverse(a, b), (a, b, factor)

    reverse.def_bwd(lambda r, ct: (ct * r[1] * r[2], ct * r[0]))
    forward = eqg.custom_jvp(lambda a, b: a * b)

    @forward.def_jvp(symbolic_zeros=True)
    def _(primals, tangents):
        (a, b), (t_a, t_b) = primals, tangents
        if t_b is None:
            return forward(a, b), b * t_a * (1 + _index())
        return forward(a, b), eqg.tangents.add(None if t_a is None else b * t_a, a * t_b)

    xs = jnp.array([1.0, 2.0, 3.0])
    for f in (reverse, forward):
        mapped = jax.vmap(lambda a, b, x, f=f: f(a, b) * x, (None, None, 0), axis_name="i")
        for transform in (lambda f: f, jax.jit, jax.checkpoint):
            loss = lambda a, mapped=mapped, t=transform: jnp.sum(t(mapped)(a, 3.0, xs))
            with pytest.raises(NameError, match="unbound axis name") as info:
                jax.grad(loss)(2.0)
            assert "Give an argument the batch dimension" in info.value.__notes__[0]
        # What the note says: with the batch dimension, it is as if each example had the rule.
        batch = jax.vmap(
            lambda a, b, x, f=f: f(a + 0 * _index(), b) * x, (None, None, 0), axis_name="i"
        )
        assert jax.grad(lambda a, batch=batch: jnp.sum(batch(a, 3.0, xs)))(2.0) == 42.0


def test_a_function_that_looks_at_a_value_without_the_batch_under_a_named_axis():
    """It can't be traced to see whether it uses the axis."""
    f = eqg.custom_jvp(lambda w: 2 * w if w > 0 else w)
    f.def_jvp(lambda p, t: (f(*p), 2 * t[0] if p[0] > 0 else t[0]))
    total = lambda w: jnp.sum(jax.vmap(lambda x: x * f(w), axis_name="i")(jnp.arange(3.0)))
    assert jax.value_and_grad(total)(3.0) == (18.0, 6.0)


def test_a_custom_vjp_with_a_collective_of_a_value_without_the_batch():
    """A sum over the axis has no batch dimension: a test of JAX's own."""
    f = eqg.custom_vjp(lambda w: jax.lax.psum(w, "i"))
    f.def_fwd(lambda w: (f(w), None))
    f.def_bwd(lambda _, ct: (2 * ct,))
    staged = lambda w: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(f)(w))(w)[0]
    xs = jnp.arange(4.0)
    for fn in (f, staged, jax.jit(f)):
        mapped = jax.vmap(lambda _, w, fn=fn: fn(w), (0, None), out_axes=None, axis_name="i")
        assert mapped(xs, 2.0) == jax.jit(mapped)(xs, 2.0) == 8.0
        assert jax.grad(mapped, 1)(xs, 2.0) == jax.grad(jax.jit(mapped), 1)(xs, 2.0) == 2.0


@pytest.mark.parametrize("make", [_rounded_jvp, _rounded_vjp])
def test_an_output_without_the_batch_is_not_mapped(make):
    """`out_axes=None` accepts it, as a state that a BatchNorm's axis goes around."""
    f, xs = make(), jnp.arange(4.0)
    step = lambda x, w: (x * f(w), f(w))
    mapped = jax.vmap(step, (0, None), out_axes=(0, None), axis_name="i")
    for fn in (mapped, jax.jit(mapped)):
        eqgt.assert_trees_close(fn(xs, 1.6), (2 * xs, jnp.array(2.0)))
        assert jax.grad(lambda w, fn=fn: jnp.sum(fn(xs, w)[0]))(1.6) == 6.0


def test_a_constant_output_under_a_named_axis_is_an_array():
    """A literal of a jaxpr is none."""
    f = eqg.custom_jvp(lambda a: (a * 1.0, jnp.ones((), int)))
    f.def_jvp(lambda primals, tangents: (f(*primals), (tangents[0], None)))
    added = jax.vmap(lambda x: f(2.0)[1].at[()].add(1), axis_name="i", out_axes=None)
    assert added(jnp.ones(3)) == 2
    total = lambda a: jax.vmap(lambda x: f(a)[0] * x * f(a)[1].sum(), axis_name="i")(X).sum()
    with jax.numpy_dtype_promotion("standard"):
        assert jnp.allclose(jax.grad(total)(2.0), jnp.sum(X))


def test_rules_that_nobody_asked_for_do_not_raise():
    both = lambda x, y: eqg.nondifferentiable((x, y))
    assert jax.jit(lambda x, y: both(x, y)[0])(1.0, 2.0) == 1.0
    got = jax.vmap(both, (0, None))(X, 2.0)
    eqgt.assert_trees_close(got, (X, jnp.full(3, 2.0)))


# ------------------------------------------------------------------ uses of the named axis
# The witness is the same program with its argument batched as well, as many copies of it: there
# each example has its own value, tangent and cotangent, and nothing is computed once for all.

ROWS = jnp.array([1.0, 2.0, 3.0])
USES = {
    "none": lambda x: 3 * x,
    "index": lambda x: x * (1 + _index()),
    "sum": lambda x: 2 * jax.lax.psum(x, "i"),
    "maximum": lambda x: x * jax.lax.pmax(_index(), "i"),
}


def _function(way, in_value, in_residual, in_backward, has_two_outputs):
    """A function, and rules that are none of its derivatives, which use the axis or do not."""
    of_value, of_residual, of_backward = USES[in_value], USES[in_residual], USES[in_backward]

    def value(w):
        out = of_value(jnp.sin(w))
        return (out, 2 * w) if has_two_outputs else out

    f = getattr(eqg, way)(value)
    if way == "custom_jvp":

        @f.def_jvp
        def _(primals, tangents):
            t_out = of_backward(tangents[0]) * of_residual(primals[0])
            return f(*primals), (t_out, tangents[0]) if has_two_outputs else t_out

    else:
        f.def_fwd(lambda w: (f(w), of_residual(w)))

        @f.def_bwd
        def _(residual, ct):
            first, second = ct if has_two_outputs else (ct, 0)
            return (of_backward(first) * residual + second,)

    return f


def _first(out):
    return out[0] if isinstance(out, tuple) else out


def _as_carry(f):
    return lambda w: jax.lax.scan(lambda c, _: (_first(f(c)), None), w, None, length=2)[0]


WRAPS = {
    "as it is": lambda f: f,
    "checkpoint": jax.checkpoint,
    "carry of a scan": _as_carry,
}


def _gradient(wrapped, in_axis, transform):
    total = lambda w, x: x * sum(map(jnp.sum, jax.tree.leaves(wrapped(w))))
    mapped = transform(jax.vmap(total, (in_axis, 0), axis_name="i"))
    batch = (lambda w: jnp.broadcast_to(w, ROWS.shape)) if in_axis == 0 else lambda w: w
    return jax.grad(lambda w: jnp.sum(mapped(batch(w), ROWS)))(0.7)


# Each way to use the axis in each place, and one in all places.
SOME = [tuple(use if i == k else "none" for i in range(3)) for use in USES for k in range(3)]
SOME = [*dict.fromkeys(SOME), ("index", "sum", "maximum")]


@pytest.mark.thorough
@pytest.mark.parametrize("uses", SOME, ids=str)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("way", ["custom_jvp", "custom_vjp"])
def test_gradient_of_an_argument_without_the_batch(way, wrap, uses):
    """The value, the residual (or factor of the tangent) and the cotangent use the axis."""
    for has_two_outputs, transform in itertools.product((False, True), (lambda f: f, jax.jit)):
        f = WRAPS[wrap](_function(way, *uses, has_two_outputs))
        got, want = (_gradient(f, in_axis, transform) for in_axis in (None, 0))
        eqgt.assert_trees_close(got, want, tolerance=1e-5)
