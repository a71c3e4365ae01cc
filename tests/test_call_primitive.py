"""The one primitive of every call: what it carries, how it is batched and traced."""

import abc
import collections
import functools as ft
import operator
import pickle
import subprocess
import sys
import textwrap
import types

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import pytest
from eqx_grads import ste
from eqx_grads._jaxprs.structure import equations
from jax.experimental import checkify  # noqa: TID251  an interpreter of others
from jax.interpreters import partial_eval as pe

from .helpers import assert_linear_in_size, count_calls


X, Y = jnp.array([0.5, -1.2, 2.0]), jnp.array([1.5, 0.3, -0.7])


def pair(kind, fn=lambda x, y: (jnp.sin(x), 3 * y, jnp.int32(2))):
    """A function of two arguments, each of which one output depends on, and an integer."""
    if kind == "jvp":
        f = eqg.custom_jvp(fn)
        f.def_jvp(lambda p, t: (f(*p), (jnp.cos(p[0]) * t[0], 3 * t[1], None)))
        return f
    f = eqg.custom_vjp(fn)
    f.def_fwd(lambda x, y: (f(x, y), x))
    f.def_bwd(lambda x, ct: (jnp.cos(x) * ct[0], 3 * ct[1]))
    return f


def calls(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "eqg_call"]


KINDS = pytest.mark.parametrize("kind", ["jvp", "vjp"])


@KINDS
def test_the_traced_function_is_in_the_program(kind):
    """Interpreters of other libraries can enter it."""
    (eqn,) = calls(jax.make_jaxpr(pair(kind))(X, Y))
    assert [e.primitive.name for e in eqn.params["call_jaxpr"].eqns] == ["sin", "mul"]
    assert str(eqn.params["call"]) == "<lambda>"
    assert not eqn.params["call_jaxpr"].consts


def test_a_constant_is_stored_once():
    """It is an operand, as in a `jax.custom_jvp`: a scan does not copy it into its body."""
    table = jnp.arange(1000.0)
    f = eqg.custom_jvp(lambda x: x * table)
    f.def_jvp(lambda p, t: (f(*p), t[0] * table))
    (eqn,) = calls(jax.make_jaxpr(f)(1.0))
    assert len(eqn.invars) == 2
    eqgt.assert_trees_close(jax.jit(jax.jacfwd(f))(2.0), table)
    eqgt.assert_trees_close(jax.jit(jax.vmap(f))(jnp.ones(2)), jnp.stack([table, table]))


# ------------------------------------------------------------------ batching


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0)])
def test_outputs_that_do_not_depend_on_the_batch(in_axes, transform):
    """They have the batch dimension if they can have a tangent, as their tangent may."""
    got = jax.vmap(transform(pair("jvp")), in_axes, (0, 0, None))(X, Y)
    copies = lambda x: jnp.broadcast_to(x[:, None] if in_axes[0] == 0 else x, (3, 3))
    want = (jnp.sin(X), copies(3 * Y).T) if in_axes[0] == 0 else (copies(jnp.sin(X)), 3 * Y)
    eqgt.assert_trees_close(got, (*want, jnp.int32(2)))


@KINDS
def test_an_integer_that_does_not_depend_on_the_batch(kind):
    f = jax.vmap(pair(kind), (0, 0), (0, 0, None))
    eqgt.assert_trees_close(f(X, Y), (jnp.sin(X), 3 * Y, jnp.int32(2)))
    gradient = jax.grad(lambda x: jnp.sum(f(x, Y)[0]))
    eqgt.assert_trees_close(gradient(X), jnp.cos(X))


@KINDS
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
def test_derivatives_of_a_batch(kind, in_axes):
    plain = lambda x, y: (jnp.sin(x), 3 * y)
    f = lambda x, y: pair(kind)(x, y)[:2]

    def gradients(f):
        loss = lambda x, y: sum(
            jnp.sum(jnp.cos(out)) for out in jax.vmap(f, in_axes, (0, 0))(x, y)
        )
        args = tuple(X if axis == 0 else X[0] for axis in in_axes)
        return jax.grad(loss, (0, 1))(*args), jax.jit(jax.grad(loss, (0, 1)))(*args)

    eqgt.assert_trees_close(gradients(f), gradients(plain))


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


# ------------------------------------------------------------------ pruning


def pruned(fn, used, *args):
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return pe.dce_jaxpr(jaxpr, used)


@KINDS
def test_a_call_without_used_outputs_is_dropped(kind):
    assert not calls(pruned(pair(kind), [False] * 3, X, Y)[0])


@KINDS
def test_a_call_with_an_unused_output(kind):
    jaxpr, _ = pruned(pair(kind), [True, False, False], X, Y)
    f = lambda x: jax.core.eval_jaxpr(jaxpr, (), x, Y)[0]
    eqgt.assert_trees_close(f(X), jnp.sin(X))
    eqgt.assert_trees_close(jax.grad(lambda x: jnp.sum(f(x)))(X), jnp.cos(X))
    eqgt.assert_trees_close(jax.vmap(f)(jnp.stack([X, Y])), jnp.sin(jnp.stack([X, Y])))
    eqgt.assert_trees_close(jax.hessian(lambda x: jnp.sum(f(x)))(X), jnp.diag(-jnp.sin(X)))


def test_an_operand_that_only_the_rule_needs_is_kept():
    two = lambda v, s: eqg.replace_gradient((v, v), (s, 2 * s))
    jaxpr, used = pruned(two, [True, False], X, Y)
    assert used == [True, True]
    f = lambda s: jax.core.eval_jaxpr(jaxpr, (), X, s)[0]
    eqgt.assert_trees_close(jax.grad(lambda s: jnp.sum(f(s)))(Y), jnp.ones(3))


def test_a_pruned_reverse_rule():
    jaxpr, _ = pruned(pair("vjp"), [False, True, False], X, Y)
    f = lambda x, y: jnp.sum(jax.core.eval_jaxpr(jaxpr, (), x, y)[0])
    eqgt.assert_trees_close(jax.grad(f, (0, 1))(X, Y), (jnp.zeros(3), jnp.full(3, 3.0)))


# ------------------------------------------------------------------ how often


def counted(kind):
    count = collections.Counter()

    def fn(x, y):
        count["function"] += 1
        return jnp.sin(x) * y

    if kind == "jvp":
        f = eqg.custom_jvp(fn)

        @f.def_jvp
        def _(primals, tangents):
            count["rule"] += 1
            x, y = primals
            return f(x, y), jnp.cos(x) * y * tangents[0] + jnp.sin(x) * tangents[1]
    else:
        f = eqg.custom_vjp(fn)

        @f.def_fwd
        def _(x, y):
            count["rule"] += 1
            return f(x, y), (x, y)

        f.def_bwd(lambda r, ct: (jnp.cos(r[0]) * r[1] * ct, jnp.sin(r[0]) * ct))
    return f, count


def scan(f):
    return lambda s, x: jax.lax.scan(lambda c, u: (f(c, u), None), s, x)[0]


# How often the function and its rule are run when the types have been seen before. With
# `jax.custom_jvp` underneath it was as often, or more often, but for the Hessian.
TRACES = {
    "jit": (lambda f: jax.jit(f)(X, X), 1, 0),
    "vmap": (lambda f: jax.vmap(f)(X, X), 1, 0),
    "jit(vmap)": (lambda f: jax.jit(jax.vmap(f))(X, X), 1, 0),
    "grad": (lambda f: jax.grad(f)(1.0, 2.0), 1, 1),
    "jit(grad)": (lambda f: jax.jit(jax.grad(f))(1.0, 2.0), 1, 1),
    "grad(jit)": (lambda f: jax.grad(jax.jit(f))(1.0, 2.0), 2, 1),
    "jit(vmap(grad))": (lambda f: jax.jit(jax.vmap(jax.grad(f)))(X, X), 1, 1),
    "jit(grad(vmap))": (
        lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(f)(x, X))))(X),
        1,
        1,
    ),
    "grad(scan)": (lambda f: jax.grad(scan(f))(1.0, X), 2, 1),
    "checkpoint": (lambda f: jax.grad(jax.checkpoint(f))(1.0, 2.0), 2, 1),
}


@KINDS
@pytest.mark.parametrize("name", TRACES)
def test_how_often_a_function_is_traced(kind, name):
    run, functions, rules = TRACES[name]
    f, count = counted(kind)
    run(f)
    jax.clear_caches()
    count.clear()
    run(f)
    assert (count["function"], count["rule"]) == (functions, rules)


# ------------------------------------------------------------------ other interpreters


@KINDS
@pytest.mark.parametrize("order", ["plain", "jit", "grad", "scan", "vmap"])
def test_checkify(kind, order):
    """It enters the function, and the rules stay."""

    def fn(x):
        checkify.check(x > 0, "negative")
        return jnp.sin(x)

    if kind == "jvp":
        f = eqg.custom_jvp(fn)
        f.def_jvp(lambda p, t: (f(*p), 7 * t[0]))
    else:
        f = eqg.custom_vjp(fn)
        f.def_fwd(lambda x: (f(x), None))
        f.def_bwd(lambda _, ct: (7 * ct,))
    run = {
        "plain": f,
        "jit": jax.jit(f),
        "grad": jax.grad(f),
        "scan": lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        "vmap": lambda x: jax.vmap(f)(x[None])[0],
    }[order]
    for x, text in ((jnp.array(0.5), None), (jnp.array(-0.5), "negative")):
        error, out = checkify.checkify(run)(x)
        assert (error.get() is None) if text is None else (text in error.get())
        eqgt.assert_trees_close(out, jnp.asarray(_plain(order, x)))
    if order == "plain":
        gradient = jax.grad(lambda x: checkify.checkify(f)(x)[1])
        assert gradient(0.5) == 7.0


def _plain(order, x):
    sin = jnp.sin
    return {"plain": sin(x), "jit": sin(x), "grad": 7.0, "scan": sin(sin(x)), "vmap": sin(x)}[
        order
    ]


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


def test_d11_what_eqx_filter_leaves_can_be_printed():
    for f in (scaled(), pair("jvp"), pair("vjp")):
        for part in eqx.partition(f, eqx.is_array):
            assert "eqx_grads.custom_" in repr(part)
            assert str(part)


def test_one_object_is_compiled_once():
    traces = []

    @eqx.filter_jit
    def run(f, x):
        traces.append(f)
        return f(x)

    f, g = scaled(), scaled()
    for x in (X, Y):
        run(f, x)
    assert len(traces) == 1
    run(jax.tree.map(lambda w: 2 * w, f), X)  # other arrays, the same rules
    assert len(traces) == 1
    run(g, X)
    assert len(traces) == 2


def test_a_decorated_function_with_traced_rules_as_an_argument():
    """Its rules are static, and what they capture is an operand all the same."""

    def loss(x, a):
        inner = eqg.custom_jvp(Scale(X))
        inner.def_jvp(lambda p, t: (inner(*p), a * t[0]))
        outer = eqg.custom_jvp(lambda g, x: g(x))
        outer.def_jvp(lambda p, t: jax.jvp(p[0], p[1:], t[1:]))
        return jax.lax.scan(lambda c, _: (outer(inner, c), None), x, None, length=2)[0]

    gradient = jax.jit(jax.grad(lambda x, a: jnp.sum(loss(x, a))))
    with jax.checking_leaks():
        eqgt.assert_trees_close(gradient(jnp.ones(3), 2.0), jnp.full(3, 4.0))


# ------------------------------------------------------------------ findings


PROGRAM = """
import cloudpickle, sys
import eqx_grads as eqg, jax

def make(scale):
    f = eqg.custom_jvp(lambda x: scale * x)

    @f.def_jvp
    def rule(primals, tangents):
        return f(*primals), 7 * tangents[0]

    return f

@eqg.custom_vjp
def tripled(x):
    return 3 * x

tripled.def_fwd(lambda x: (tripled(x), None))
tripled.def_bwd(lambda _, ct: (5 * ct,))

class Layer:
    @eqg.custom_jvp
    def apply(self, x):
        return x

    apply.def_jvp(lambda p, t: (p[1], 9 * t[1]))

sys.stdout.buffer.write(cloudpickle.dumps((make(2.0), tripled, Layer())))
"""


@pytest.mark.thorough
def test_d4_cloudpickle():
    """What raw JAX and Equinox pass: local functions, and those of `__main__`."""
    cloudpickle = pytest.importorskip("cloudpickle")
    script = textwrap.dedent(PROGRAM)
    data = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    local, tripled, layer = cloudpickle.loads(data.stdout)
    assert (local(1.0), jax.grad(local)(1.0)) == (2.0, 7.0)
    assert (tripled(1.0), jax.grad(tripled)(1.0)) == (3.0, 5.0)
    assert jax.grad(layer.apply)(1.0) == 9.0
    again = cloudpickle.loads(cloudpickle.dumps(pair("vjp")))
    eqgt.assert_trees_close(jax.grad(lambda x: jnp.sum(again(x, Y)[0]))(X), jnp.cos(X))
    assert pickle.loads(pickle.dumps(module_level)) is module_level


@eqg.custom_jvp
def module_level(x):
    return x


def capturing_containers(n):
    table = {i: jnp.float32(i) for i in range(n)}
    objects = [types.SimpleNamespace(i=[i]) for i in range(10 * n)]
    f = eqg.custom_jvp(lambda x: x * len(table) * len(objects))
    f.def_jvp(lambda p, t: (f(*p), t[0] * len(table) * len(objects)))
    return f


def test_d8_captured_containers_are_read_once():
    def calls_of_the_second_trace(n):
        f = capturing_containers(n)
        jax.make_jaxpr(f)(1.0)
        return count_calls(jax.make_jaxpr(f), 1.0)

    assert calls_of_the_second_trace(3000) == calls_of_the_second_trace(3) > 0


@pytest.mark.slow
def test_d8_the_first_trace_is_linear_in_the_size_of_containers():
    assert_linear_in_size(lambda n: jax.make_jaxpr(capturing_containers(n))(1.0), 300)


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


class Dict(dict):
    pass


class Config:
    scale = None


class Dynamic:
    def __getattr__(self, name):
        return _HIDDEN[name]


_HIDDEN = {}


class Plain:
    def __init__(self, x):
        self.x = x


def in_a_dict_subclass(a):
    kept = Dict(a=a)
    return lambda: kept["a"]


def in_a_mapping_proxy(a):
    kept = types.MappingProxyType({"a": a})
    return lambda: kept["a"]


def in_a_class(a):
    Config.scale = a
    config = Config()
    return lambda: config.scale


def in_a_methodcaller(a):
    call = operator.methodcaller("get", "missing", a)
    return lambda: call({})


def four_deep(a):
    kept = Plain(Plain(Plain(Plain(a))))
    return lambda: kept.x.x.x.x


def behind_getattr(a):
    _HIDDEN["a"] = a
    kept = Dynamic()
    return lambda: kept.a


@pytest.mark.parametrize(
    "hide",
    [
        in_a_dict_subclass,
        in_a_mapping_proxy,
        in_a_class,
        in_a_methodcaller,
        four_deep,
    ],
)
def test_d10_hidden_tracers(hide):
    """An error of ours that says what to do, and not JAX's leak error."""

    def loss(x, a):
        get = hide(a)
        f = eqg.custom_jvp(lambda x: jnp.sin(x) * get())
        f.def_jvp(lambda p, t: (f(*p), jnp.cos(*p) * get() * t[0]))
        return jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]

    with pytest.raises(eqg.RuleError, match=r"(?s)traced value.*Pass (the|this) value"):
        jax.grad(jax.jit(loss))(1.0, 2.0)


def test_d10_what_no_search_can_find():
    """The error is JAX's, or ours. While the value is valid, it may be used."""

    def loss(x, a):
        get = behind_getattr(a)
        f = eqg.custom_jvp(lambda x: jnp.sin(x) * get())
        f.def_jvp(lambda p, t: (f(*p), jnp.cos(*p) * get() * t[0]))
        return jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0]

    eqgt.assert_trees_close(jax.jit(jax.grad(loss))(1.0, 2.0), 2 * jnp.cos(1.0))
    with pytest.raises((eqg.RuleError, TypeError), match=r"traced value|constant handler"):
        jax.grad(jax.jit(loss))(1.0, 2.0)


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


@pytest.mark.parametrize("name", ["defjvp", "defjvps", "defvjp"])
def test_d12_names_of_jax(name):
    with pytest.raises(AttributeError, match=rf"no attribute `{name}`. Use `.*def_"):
        getattr(pair("jvp"), name)


@pytest.mark.parametrize("decorator", [eqg.custom_jvp, eqg.custom_vjp])
def test_d12_options_of_jax(decorator):
    with pytest.raises(eqg.RuleError, match=r"(?s)`nondiff_argnums`.*keyword-only"):
        ft.partial(decorator, nondiff_argnums=(0,))(jnp.sin)


def test_d12_a_rule_of_another_arity():
    def bad_jvp(primal, tangent, more):
        return primal, tangent

    f = eqg.custom_jvp(lambda x: x)
    f.def_jvp(bad_jvp)
    with pytest.raises(eqg.RuleError, match=r"(?s)`bad_jvp` can't be called.*missing.*'more'"):
        jax.grad(f)(1.0)
    g = eqg.custom_vjp(lambda x: x)
    g.def_fwd(lambda: None)
    g.def_bwd(lambda residuals, ct: (ct,))
    with pytest.raises(eqg.RuleError, match=r"(?s)can't be called.*too many positional"):
        jax.grad(g)(1.0)


def test_d12_an_error_inside_of_a_rule_is_left_alone():
    f = eqg.custom_jvp(lambda x: x)
    f.def_jvp(lambda p, t: (p[0], len(3)))
    with pytest.raises(TypeError, match="has no len") as info:
        jax.grad(f)(1.0)
    assert not isinstance(info.value, eqg.RuleError)


def test_d12_jax_names_the_function():
    class Net(eqx.Module):
        activation: object

    with pytest.raises(TypeError, match=r"Argument .<function <lambda>"):
        jax.grad(lambda m: 1.0)(Net(pair("jvp")))


def test_t1_custom_gradient_names_the_users_function():
    @eqg.custom_gradient
    def log1pexp(x):
        return jnp.log1p(jnp.exp(x)), lambda ct: (ct, ct, ct)

    with pytest.raises(eqg.RuleError, match=r"log1pexp") as info:
        jax.grad(log1pexp)(1.0)
    assert "_custom_gradient" not in str(info.value)
    assert "test_call_primitive.py" in str(info.value)


def test_t2_a_wrong_value_is_not_blamed_on_the_tangent():
    f = eqg.custom_jvp(lambda x: jnp.sin(x))
    f.def_jvp(lambda p, t: (jnp.zeros(3), jnp.cos(*p) * t[0]))
    with pytest.raises(eqg.RuleError, match="returned another output than"):
        jax.jvp(f, (1.0,), (1.0,))


# ------------------------------------------------------------------ what an adversary found


def _index():
    return jax.lax.axis_index("i").astype(float)


@eqg.custom_jvp
def indexed(b, x):
    return b * 1.0, x * _index()


@indexed.def_jvp
def indexed_jvp(primals, tangents):
    t_b, t_x = tangents
    return indexed(*primals), (t_b, t_x * _index())


@eqg.custom_jvp
def indexed_by_rule(b, x):
    return b * x, x


@indexed_by_rule.def_jvp
def indexed_by_rule_jvp(primals, tangents):
    (b, x), (t_b, t_x) = primals, tangents
    return indexed_by_rule(b, x), (b * t_x + x * t_b, t_x * _index())


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_output_that_depends_on_the_axis_only(transform):
    """`axis_index` has no operand, and the batch dimension all the same."""
    batch = jnp.arange(4.0)
    mapped = lambda f: transform(lambda x: jax.vmap(f, (0, None), axis_name="i")(batch, x)[1])
    eqgt.assert_trees_close(mapped(indexed)(2.0), 2 * batch)
    for f in (indexed, indexed_by_rule):
        assert jax.grad(lambda x, f=f: jnp.sum(mapped(f)(x)))(2.0) == 6.0
    f = eqg.custom_vjp(lambda x: (x, jax.lax.axis_index("i")))
    f.def_fwd(lambda x: (f(x), None))
    f.def_bwd(lambda _, ct: (ct[0],))
    got = transform(jax.vmap(f, axis_name="i"))(jnp.arange(3.0))[1]
    eqgt.assert_trees_close(got, jnp.arange(3, dtype=jnp.int32))


@eqg.custom_jvp
def mean_over_axis(w):
    return jax.lax.pmean(w, "i")


@mean_over_axis.def_jvp
def mean_over_axis_jvp(primals, tangents):
    return mean_over_axis(*primals), jax.lax.pmean(tangents[0], "i")


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_collective_of_a_value_without_the_batch(transform):
    f = transform(jax.vmap(lambda x, w: x * mean_over_axis(w), (0, None), axis_name="i"))
    eqgt.assert_trees_close(f(jnp.arange(3.0), 2.0), 2 * jnp.arange(3.0))
    assert jax.grad(lambda w: jnp.sum(f(jnp.arange(3.0), w)))(2.0) == 3.0
    total = transform(jax.vmap(mean_over_axis, axis_name="i"))
    eqgt.assert_trees_close(total(jnp.arange(3.0)), jnp.ones(3))


def _rounded_jvp():
    f = eqg.custom_jvp(lambda w: jnp.round(w))
    f.def_jvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return f


def _rounded_vjp():
    f = eqg.custom_vjp(lambda w: jnp.round(w))
    f.def_fwd(lambda w: (f(w), None))
    f.def_bwd(lambda _, ct: (ct,))
    return f


def _rounded_by_another():
    """JAX keeps the batched program of the inner `jit`."""
    inner = jax.jit(ste.round)
    f = eqg.custom_vjp(lambda w: inner(w))
    f.def_fwd(lambda w: (inner(w), None))
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
        _rounded_by_another(),
        eqg.elementwise(jnp.round, lambda y, w: 1.0),
        ste.round,
    ],
    ids=["custom_jvp", "custom_vjp", "another", "elementwise", "ste"],
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


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_rule_that_uses_the_axis_of_a_value_without_the_batch(transform):
    """The value has no batch dimension, and the residual, and so the cotangent, has one."""
    f = eqg.custom_vjp(lambda w: w * 1.0)
    f.def_fwd(lambda w: (f(w), _index()))
    f.def_bwd(lambda index, ct: (ct * index,))
    g = eqg.custom_jvp(lambda w: w * 1.0)
    g.def_jvp(lambda primals, tangents: (g(*primals), tangents[0] * _index()))
    xs = jnp.arange(1.0, 5.0)
    for fn in (f, g):
        mapped = jax.vmap(lambda w, x, fn=fn: fn(w) * x, (None, 0), axis_name="i")
        loss = lambda w, mapped=mapped: jnp.sum(transform(mapped)(w, xs))
        assert transform(jax.grad(loss))(2.0) == jnp.sum(xs * jnp.arange(4.0))
        twice = lambda w, mapped=mapped: jnp.sum(transform(mapped)(w, xs) ** 2)
        # Of the square, with the value `w` and the slope `index`.
        assert transform(jax.grad(twice))(2.0) == jnp.sum(2 * 2.0 * xs**2 * jnp.arange(4.0))


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


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("use", ["index", "sum", "inner call"])
def test_a_backward_rule_that_uses_the_axis(transform, use):
    """JAX 0.10 gives 36 for the index, and JAX 0.12 refuses it."""
    f = eqg.custom_vjp(lambda a: a * 1.0)
    f.def_fwd(lambda a: (f(a), None))
    backward = {
        "index": lambda ct: ct * (1 + _index()),
        "sum": lambda ct: jax.lax.psum(ct * (1 + _index()), "i") / 3,
        "inner call": jax.jit(lambda ct: ct * (1 + _index())),
    }
    f.def_bwd(lambda _, ct: (backward[use](ct),))
    mapped = jax.vmap(lambda a, x: f(a) * x, (None, 0), axis_name="i")
    xs = jnp.array([1.0, 2.0, 3.0])
    gradient = jax.grad(lambda a: jnp.sum(transform(mapped)(a, xs)))
    expected = (jnp.array(14.0), jnp.array(14.0))
    eqgt.assert_trees_close((gradient(2.0), jax.jit(gradient)(2.0)), expected, tolerance=1e-6)


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


@pytest.mark.parametrize("way", ["custom_jvp", "custom_vjp"])
def test_a_rule_that_calls_its_function_is_asked_once_for_its_axes(way):
    """And not by that call once more, to the limit of recursion."""
    n_calls = []
    f = getattr(eqg, way)(lambda a, b: (a * b, b))

    def rule(primals, tangents):
        n_calls.append(1)
        return f(*primals), (tangents[0] * primals[1], tangents[1])

    def fwd(a, b):
        n_calls.append(1)
        return f(a, b), (a, b)

    if way == "custom_jvp":
        f.def_jvp(rule)
    else:
        f.def_fwd(fwd)
        f.def_bwd(lambda residuals, ct: (ct[0] * residuals[1], ct[1]))
    for axes, name in (((None, None), "i"), ((0, None), None), ((0, None), "i")):
        a = jnp.ones((3, 2)) if axes[0] == 0 else jnp.ones(2)
        n_calls.clear()
        jax.make_jaxpr(jax.vmap(f, axes, axis_size=3, axis_name=name))(a, jnp.ones(2))
        assert len(n_calls) <= 2


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_backward_rule_that_uses_the_axis_in_a_scan(transform):
    f = eqg.custom_vjp(lambda a: a * 1.0)
    f.def_fwd(lambda a: (f(a), None))
    f.def_bwd(lambda _, ct: (ct * (1 + _index()),))
    step = lambda c, _: (f(c), None)
    mapped = jax.vmap(
        lambda a, x: jax.lax.scan(step, a, None, length=1)[0] * x, (None, 0), axis_name="i"
    )
    xs = jnp.array([1.0, 2.0, 3.0])
    assert jax.grad(lambda a: jnp.sum(transform(mapped)(a, xs)))(2.0) == 14.0


def test_a_constant_output_under_a_named_axis_is_an_array():
    """A literal of a jaxpr is none."""
    f = eqg.custom_jvp(lambda a: (a * 1.0, jnp.ones((), int)))
    f.def_jvp(lambda primals, tangents: (f(*primals), (tangents[0], None)))
    added = jax.vmap(lambda x: f(2.0)[1].at[()].add(1), axis_name="i", out_axes=None)
    assert added(jnp.ones(3)) == 2
    total = lambda a: jax.vmap(lambda x: f(a)[0] * x * f(a)[1].sum(), axis_name="i")(X).sum()
    with jax.numpy_dtype_promotion("standard"):
        assert jnp.allclose(jax.grad(total)(2.0), jnp.sum(X))


def test_a_pruned_rule_that_uses_one_output_of_its_own_function():
    """It was pruned without end."""
    two = eqg.custom_jvp(lambda x, y: (jnp.exp(x), jnp.exp(y)))

    @two.def_jvp
    def _(primals, tangents):
        out = two(*primals)
        return out, (out[0] * tangents[0], out[1] * tangents[1])

    for run in (jax.jit, lambda f: jax.grad(jax.jit(f)), lambda f: jax.hessian(jax.jit(f))):
        eqgt.assert_trees_close(run(lambda x, y: two(x, y)[0])(1.0, 2.0), jnp.exp(1.0))


def test_a_pruned_call_keeps_what_the_value_of_the_rule_needs():
    f = eqg.custom_jvp(lambda x, y: (x * 2, x / y))

    @f.def_jvp
    def _(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        return (x / y * y * 2, x / y), (2 * t_x, t_x / y - x / y**2 * t_y)

    jaxpr = pruned(lambda x, y: f(x, y)[0], [True], 1.0, 2.0)[0]
    run = lambda x, y: jax.core.eval_jaxpr(jaxpr, (), x, y)[0]
    assert jax.value_and_grad(run)(3.0, 2.0) == (6.0, 2.0)


def test_a_pruned_call_with_constants():
    table = jnp.array([1.0, 2.0, 3.0])
    g = eqg.custom_jvp(lambda x, y: (jnp.sin(x) * table, jnp.sin(y) * table))

    @g.def_jvp
    def _(primals, tangents):
        slopes = [jnp.cos(x) * table * t for x, t in zip(primals, tangents, strict=True)]
        return g.__wrapped__(*primals), tuple(slopes)

    f = eqg.custom_jvp(jnp.cos)
    f.def_jvp(lambda p, t: (jnp.cos(p[0]), -g(p[0], 2 * p[0])[0][0] * t[0]))

    def loss(f, x):
        return jnp.sum(jax.lax.scan(lambda c, _: (f(c) + c, f(c)), x, None, length=3)[1])

    second = lambda f: jax.grad(jax.grad(ft.partial(loss, f)))(-2.0)
    eqgt.assert_trees_close(second(f), second(jnp.cos), tolerance=1e-4)


def test_a_pruned_call_that_was_checked_keeps_what_only_the_tangent_needs():
    table = jnp.array([1.0, 2.0, 3.0])

    def fn(x, y):
        checkify.check(jnp.all(x > 0), "negative")
        return table * x, y

    f = eqg.custom_jvp(fn)
    # The value does not depend on `y`, as that of an estimator does not, and its tangent does.
    f.def_jvp(lambda p, t: ((table * p[0], p[1]), (table * (t[0] + 7 * t[1]), t[1])))
    jaxpr, used = pruned(lambda x, y: checkify.checkify(f)(x, y)[1][0], [True], X, Y)
    assert used == [True, True]
    run = lambda x, y: jnp.sum(jax.core.eval_jaxpr(jaxpr, (table,), x, y)[0])
    eqgt.assert_trees_close(jax.grad(run, (0, 1))(X, Y), (table, 7 * table))


def test_rules_that_nobody_asked_for_do_not_raise():
    both = lambda x, y: eqg.nondifferentiable((x, y))
    assert jax.jit(lambda x, y: both(x, y)[0])(1.0, 2.0) == 1.0
    got = jax.vmap(both, (0, None))(X, 2.0)
    eqgt.assert_trees_close(got, (X, jnp.full(3, 2.0)))


def test_checkify_of_a_gradient_of_a_constant():
    """Only a constant is known while the call is made, and it has its jaxpr all the same."""

    def fn(x):
        checkify.check(x > 0, "negative")
        return jnp.sin(x)

    f = eqg.custom_jvp(fn)
    f.def_jvp(lambda p, t: (f(*p), jnp.cos(p[0]) * t[0]))
    error, slope = checkify.checkify(jax.grad(f))(2.0)
    assert error.get() is None
    eqgt.assert_trees_close(slope, jnp.cos(2.0))
    (eqn,) = calls(jax.make_jaxpr(lambda: jax.grad(f)(2.0))())
    assert eqn.params["call_jaxpr"] is not None
