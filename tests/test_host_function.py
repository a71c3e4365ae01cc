"""Functions on the host, against the same functions in JAX and closed forms."""

import collections
import concurrent.futures
import copy
import gc
import math
import pickle
import traceback
from types import SimpleNamespace

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.x64]


def _numpy(x, y):
    return np.sin(x) * y + np.sum(x, -1, keepdims=True)


def _jax(x, y):
    return jnp.sin(x) * y + jnp.sum(x, -1, keepdims=True)


def _like_x(x, y):
    return x


def _bwd(arguments, ct):
    x, y = arguments
    return ct * np.cos(x) * y + np.sum(ct, -1, keepdims=True), ct * np.sin(x)


def _jvp(primals, tangents):
    (x, y), (t_x, t_y) = primals, tangents
    t_out = np.cos(x) * t_x * y + np.sin(x) * t_y + np.sum(t_x, -1, keepdims=True)
    return _numpy(x, y), t_out


def make(*rules, **options):
    function = eqg.host_function(_numpy, out=_like_x, **options)
    for name, rule in zip(("def_bwd", "def_jvp"), (_bwd, _jvp), strict=True):
        if name in rules:
            getattr(function, name)(rule)
    return function


def loss(f):
    return lambda x, y: jnp.sum(f(x, y) ** 3)


# ---------------------------------------------------------------- values, modes and orders


def test_the_step_of_each_leaf():
    """The distance between evaluations, seen from inside of the function."""
    seen = []

    def square(pair, scale):
        seen.append((float(pair["a"]), float(pair["b"]), float(scale)))
        return pair["a"] ** 2 + pair["b"] ** 2 + scale**2

    f = eqg.host_function(
        square,
        out=lambda pair, scale: scale,
        finite_difference="central",
        step=({"a": 0.25, "b": None}, 0.5),
    )
    pair = {"a": jnp.float32(4.0), "b": jnp.float32(0.5)}
    grads = jax.grad(f, (0, 1))(pair, jnp.float32(0.1))
    expected = {"a": jnp.float32(8.0), "b": jnp.float32(1.0)}, jnp.float32(0.2)
    assert_close(grads, expected, tolerance=1e-3)
    a, b, scale = (np.ptp([point[i] for point in seen]) for i in range(3))
    assert a == 2.0  # relative to 4
    assert np.isclose(b, 2 * np.finfo(np.float32).eps ** (1 / 3))  # relative to 1
    assert np.isclose(scale, 1.0)


def test_float64_of_numpy_is_cast_to_what_was_promised():
    f = eqg.host_function(
        lambda x: (np.asarray(x, np.float64), np.int64(7), np.float64(0.1)),
        out=(jnp.zeros(3, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float16)),
    )
    for call in (f, jax.jit(f)):
        x, n, half = call(jnp.ones(3, jnp.float32))
        assert (x.dtype, n.dtype, half.dtype) == (jnp.float32, jnp.int32, jnp.float16)
        assert (n, half) == (7, np.float16(0.1))


# ---------------------------------------------------------------- transformations


def test_vectorized_differences_take_as_many_calls_as_one_example():
    calls = []

    def square(x):
        calls.append(x.shape)
        return x**2

    f = eqg.host_function(
        square, out=lambda x: x, finite_difference="central", vmap_method="expand_dims"
    )
    xs = jnp.arange(12.0).reshape(4, 3)
    grads = jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(f(x)))))(xs)
    assert_close(grads, 2 * xs, tolerance=1e-3)
    assert calls == [(4, 3)] * 6


def test_tracing_calls_nothing():
    f = eqg.host_function(lambda x: 1 / 0, out=lambda x: x, finite_difference="central")
    jax.make_jaxpr(jax.hessian(lambda x: jnp.sum(f(x))))(jnp.ones(2))


def test_python_threads():
    """With residuals on the host, which the threads share."""
    f = make("def_bwd", "def_jvp")
    f.def_fwd(lambda x, y: (_numpy(x, y), (x, y)), keep=2)
    grad, expected = jax.jit(jax.grad(loss(f))), jax.jit(jax.grad(loss(_jax)))
    y = jnp.ones(3)
    points = [jnp.full(3, 0.1 * i) for i in range(20)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: grad(x, y), points))
    assert_close(got, [expected(x, y) for x in points], tolerance=1e-4)


def test_it_is_compiled_once():
    """The call is equal to the next one, and so found in JAX's caches."""
    f = make("def_bwd")
    traced = []

    @jax.jit
    def step(f, x, y):
        traced.append(0)
        return jax.grad(loss(f))(x, y)

    x, y = jnp.ones(2), jnp.ones(2)
    for _ in range(3):
        step(f, x, y)
    assert len(traced) == 1


# ---------------------------------------------------------------- residuals


def _counting():
    counts = {"fwd": 0, "bwd": 0}
    f = eqg.host_function(np.exp, out=lambda x: x)

    def fwd(x):
        counts["fwd"] += 1
        out = np.exp(x)
        return out, {"anything": [out], "not an array": object()}

    @f.def_bwd
    def bwd(residuals, ct):
        counts["bwd"] += 1
        assert type(residuals["not an array"]) is object
        return (ct * residuals["anything"][0],)

    return f, fwd, counts


def test_residuals_stay_on_the_host():
    f, fwd, counts = _counting()
    f.def_fwd(fwd)
    x = jnp.array([0.5, 1.0])
    grad = jax.value_and_grad(lambda x: jnp.sum(f(x)))
    for i, call in enumerate((grad, jax.jit(grad)), 1):
        x = x + 0.5
        assert_close(call(x)[1], jnp.exp(x))
        assert counts == {"fwd": i, "bwd": i}
    # Without the value, the forward pass is dead code, and the backward pass makes up for it.
    jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(x + 1)
    assert counts == {"fwd": 3, "bwd": 3}


def test_residuals_that_are_not_kept_are_computed_again():
    f, fwd, counts = _counting()
    f.def_fwd(keep=3)(fwd)
    xs = jnp.arange(10.0) / 10
    grad = jax.jit(jax.value_and_grad(lambda xs: jnp.sum(jax.vmap(f)(xs))))
    assert_close(grad(xs)[1], jnp.exp(xs))
    # Forward 10; backward in the same order, so that none of those kept is of use.
    assert counts == {"fwd": 20, "bwd": 10}

    scanned = lambda x: jax.lax.scan(lambda x, _: (f(x) / 4, None), x, None, length=10)[0]
    counts.update(fwd=0, bwd=0)
    jax.jit(jax.grad(scanned))(0.1)
    assert counts == {"fwd": 17, "bwd": 10}  # the last three steps are kept


def test_a_backward_rule_may_ask_what_is_perturbed():
    seen = []
    f = eqg.host_function(lambda pair, *, power: pair[0] * pair[1] ** power, out=jnp.zeros(()))

    @f.def_bwd
    def f_bwd(arguments, ct, *, perturbed, power):
        seen.append(perturbed)
        ((_, y),) = arguments
        return ((ct * y**power, None),)

    assert jax.grad(lambda x: f((x, 3.0), power=2))(2.0) == 9.0
    assert seen == [((True, False),)]


# ---------------------------------------------------------------- who calls what


@pytest.mark.parametrize("way", ["elementwise", "implicit", "custom_vjp"])
def test_ufunc(way):
    """A ufunc has options with default values, and no rule knows them (NumPy 2.4)."""
    sine = eqg.host_function(np.sin, out=lambda x: x)
    cosine = eqg.host_function(np.cos, out=lambda x: x)
    f = eqg.elementwise(sine, lambda out, x: cosine(x))
    if way == "implicit":
        equation = f
        f = eqg.implicit(lambda y, x: y - equation(x))(sine)
    if way == "custom_vjp":
        f = eqg.custom_vjp(sine)
        f.def_fwd(lambda x: (sine(x), x))
        f.def_bwd(lambda x, ct: (ct * cosine(x),))
    x = jnp.array([0.5, -1.0])
    assert_close(jax.jit(f)(x), jnp.sin(x))
    assert_close(jax.jit(jax.vmap(jax.grad(f)))(x), jnp.cos(x))


# ---------------------------------------------------------------- a decorated function


@eqg.host_function(out=lambda x: x, finite_difference="central")
def named(x):
    """A docstring."""
    return 2 * x


def test_it_is_a_good_citizen():
    assert (named.__name__, named.__doc__) == ("named", "A docstring.")
    assert repr(named) == "<eqx_grads.host_function of named>"
    assert named.__wrapped__(3) == 6
    assert pickle.loads(pickle.dumps(named)) is named
    local = make("def_bwd")
    assert copy.copy(local)(jnp.ones(2), jnp.ones(2)).shape == (2,)
    assert copy.deepcopy(local)(jnp.ones(2), jnp.ones(2)).shape == (2,)
    assert hash(local) == hash(local)
    rule = local.def_fwd(_numpy)
    assert rule is _numpy


@pytest.mark.thorough
def test_nothing_is_kept_alive():
    """A call in a program that is gone leaves its arrays to the garbage collector."""
    import weakref

    class Big:
        pass

    big = Big()
    f = eqg.host_function(lambda x: x * (big is not None), out=lambda x: x)
    f.def_bwd(lambda arguments, ct: (ct,))
    jax.jit(jax.grad(lambda x: jnp.sum(f(x))))(jnp.ones(2))
    alive = weakref.ref(big)
    del f, big
    jax.clear_caches()
    gc.collect()
    assert alive() is None


# ---------------------------------------------------------------- errors


def test_an_exception_arrives_as_it_was_raised():
    class NoSolution(Exception):
        pass

    def solve(x):
        if np.sum(x) > 1:
            raise NoSolution("none for this x")  # the line
        return x

    f = eqg.host_function(solve, out=lambda x: x, finite_difference="central")
    x = jnp.ones(3)
    for call in (f, jax.grad(lambda x: jnp.sum(f(x)))):
        with pytest.raises(NoSolution, match="none for this x") as caught:
            call(x)
        assert "by `solve`, called with float" in caught.value.__notes__[0]
        assert caught.traceback[-1].name == "solve"
    for call in (jax.jit(f), jax.vmap(f), jax.jit(jax.grad(lambda x: jnp.sum(f(x))))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="on the host") as caught:
            jax.block_until_ready(call(2 * x))
        text = str(caught.value)
        assert "`solve` raised an exception on the host." in text
        assert "NoSolution: none for this x" in text
        assert 'raise NoSolution("none for this x")  # the line' in text
        assert "finite_difference.py" not in text.partition("raised an exception")[2]


def test_a_promise_of_python_numbers():
    """A float is one number, by itself and in a tree; a class may make the tree."""
    assert eqg.host_function(lambda x: 2 * float(x), out=0.0)(1.5) == 3.0
    pair = collections.namedtuple("pair", ["a", "b"])
    f = eqg.host_function(lambda x, y: pair(x, 2 * y), out=pair)
    assert f(1.0, 2.0) == pair(1.0, 4.0)
    count = eqg.host_function(lambda x: int(x.size), out=jax.ShapeDtypeStruct((), int))
    assert jax.jit(count)(jnp.ones(3)) == 3


def test_a_promise_of_what_has_a_shape_and_a_dtype():
    x = jnp.arange(3.0)

    class Like:
        shape, dtype = [3], x.dtype

    types = (jax.typeof(x), jax.eval_shape(jnp.sin, x), np.zeros(3, np.float64), Like())
    for t in types:
        f = eqg.host_function(np.sin, out=t)
        f.def_fwd(lambda x: (np.sin(x), np.cos(x)), residuals=t)
        f.def_bwd(lambda cos, ct: (cos * ct,))
        for run in (jax.vjp, jax.jit(jax.vjp, static_argnums=0)):
            out, pull = run(f, x)
            assert_close((out, pull(x)[0]), (jnp.sin(x), x * jnp.cos(x)))
        tree = eqg.host_function(lambda x: (x, {"a": -x}), out=lambda _, t=t: (t, {"a": t}))
        assert_close(tree(x), (x, {"a": -x}))
    f = eqg.host_function(np.sin, out=jax.typeof)
    assert_close(jax.vmap(f)(x), jnp.sin(x))
    linear = eqg.linear_host_function(lambda x: 2 * x, lambda y: 2 * y, out=jax.typeof(x))
    assert_close(linear(x), 2 * x)
    for key in (jax.random.key(0), jax.typeof(jax.random.key(0))):
        _raises("NumPy has no keys", eqg.host_function(lambda x: x, out=key), x)


def test_a_compiled_program_logs_the_exception_once(caplog):
    """And with no frame of this library except the frame that raises it."""

    def solve(x):
        raise ZeroDivisionError("none")

    for fn, text in (
        (solve, "ZeroDivisionError: none"),
        (lambda x: x[:1], "a different shape than"),
    ):
        caplog.clear()
        f = eqg.host_function(fn, out=lambda x: x)
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(jax.jit(f)(jnp.ones(3)))
        logged = [record for record in caplog.records if record.exc_info]
        for record in logged:
            shown = "".join(traceback.format_exception(record.exc_info[1]))
            assert shown.count("host_callback.py") == 1
            assert shown.count(text) == 1
        assert logged


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (lambda x: {"a": x[:2]}, r"at out\['a'\]: promised float\d\d\[3\], returned f"),
        (
            lambda x: {"a": x * 1j},
            r"at out\['a'\]: promised float\d\d\[3\], returned c",
        ),
        (lambda x: {"a": x > 0}, "returned a different dtype than promised"),
        (lambda x: {"a": np.arange(3)}, "returned a different dtype than promised"),
        (lambda x: {"b": x}, "returned a different structure than promised"),
        (lambda x: None, "returned a different structure than promised"),
    ],
)
def test_what_was_returned_is_compared_with_what_was_promised(returned, match):
    def solve(x):
        return returned(x)

    f = eqg.host_function(solve, out=lambda x: {"a": x})
    with pytest.raises(RuleError, match=match):
        f(jnp.ones(3))
    with pytest.raises(RuleError, match="`solve` returned a different"):
        f(jnp.ones(3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="`solve` returned a different"):
        jax.block_until_ready(jax.jit(f)(jnp.ones(3)))


def test_a_shape_without_the_axes_of_vmap():
    """One result for the whole batch is not the result of each example."""
    f = eqg.host_function(lambda x: np.sum(x), out=jnp.zeros(()), vmap_method="expand_dims")
    g = eqg.host_function(lambda x: x[:2], out=lambda x: x, vmap_method="expand_dims")
    h = eqg.host_function(lambda x: x[:1], out=lambda x: x, vmap_method="expand_dims")
    xs = jnp.ones((4, 3))
    for fn, x in ((f, xs), (g, xs), (h, xs), (h, xs[:, 0])):
        match = "the function is given the axes of"
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            jax.block_until_ready(jax.vmap(fn)(x))


def test_an_output_of_arguments_that_are_not_batched():
    both = eqg.host_function(
        lambda x, y: (np.sin(x), np.cos(y)), out=lambda x, y: (x, y), vmap_method="expand_dims"
    )
    both.def_bwd(lambda r, ct: (ct[0] * np.cos(r[0]), -ct[1] * np.sin(r[1])))
    xs, y = jnp.array([1.0, 2.0, 3.0]), jnp.array(0.5)
    sines, cosines = jax.jit(jax.vmap(both, (0, None)))(xs, y)
    assert_close(sines, jnp.sin(xs))
    assert_close(cosines, jnp.full(3, jnp.cos(y)))
    loss = lambda x, y: sum(both(x, y))
    of_xs, of_y = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(xs, y)
    assert_close(of_xs, jnp.cos(xs))
    assert_close(of_y, jnp.full(3, -jnp.sin(y)))


def test_a_zero_cotangent_without_the_axes_of_vmap():
    fn = eqg.host_function(
        lambda x, y: x + 0 * y, out=lambda x, y: x, vmap_method="expand_dims"
    )
    fn.def_bwd(lambda r, ct: (ct, 0.0))
    xs, ys = jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 5.0, 6.0])
    of_xs, of_ys = jax.vmap(jax.grad(fn, (0, 1)))(xs, ys)
    assert jnp.array_equal(of_xs, jnp.ones(3))
    assert jnp.array_equal(of_ys, jnp.zeros(3))


def _raises(match, fn, *args):
    with pytest.raises(RuleError, match=match):
        fn(*args)


@pytest.mark.thorough
def test_no_derivative():
    f = make()
    x = jnp.ones(3)
    for derivative in (jax.jacfwd, jax.jacrev):
        _raises("`_numpy` was differentiated, and has no derivative", derivative(f), x, x)
    for rule in ("def_bwd", "def_jvp"):
        f = make(rule)
        match = f"The rule `_{rule[4:]}` of `_numpy` was differentiated: a second derivative"
        _raises(match, jax.hessian(loss(f)), x, x)
        _raises("With `finite_difference='central'`", jax.hessian(loss(f)), x, x)


def test_too_many_calls_of_a_rule():
    x = jnp.ones(20)
    f = make("def_bwd", max_rule_calls=19)
    _raises("takes 20 calls of the rule `_bwd`; `max_rule_calls` is 19", jax.jacfwd(f), x, x)
    jax.jacfwd(make("def_bwd", max_rule_calls=20))(x, x)
    f = make("def_jvp", max_rule_calls=39)
    _raises("takes 40 calls of the rule `_jvp`", jax.jacrev(f, (0, 1)), x, x)
    jax.jacrev(f, 0)(x, x)  # one argument is half of them


def test_rules_that_do_not_fit():
    x = jnp.ones(3)
    grad = lambda f: jax.grad(loss(f))

    def bad(rule, name="def_bwd"):
        f = make()
        getattr(f, name)(rule)
        return f

    f = bad(lambda arguments, ct: ct)
    _raises("did not return one cotangent for each argument", grad(f), x, x)
    f = bad(lambda arguments, ct: (ct[:2], ct))
    _raises(r"at the cotangent of `x`: promised float\d\d\[3\]", grad(f), x, x)
    f = bad(lambda arguments, ct: ({"a": ct}, ct))
    _raises("a cotangent that does not have the structure", grad(f), x, x)
    f = bad(lambda primals, tangents: primals[0], "def_jvp")
    jvp = lambda f: lambda x, y: jax.jvp(f, (x, y), (x, y))
    _raises("did not return a pair", jvp(f), x, x)
    f = bad(lambda primals, tangents: (primals[0], primals[0][:2]), "def_jvp")
    _raises("at the tangent of out: promised ", jvp(f), x, x)
    f = bad(_bwd)
    f.def_fwd(lambda x, y: x)
    _raises("did not return a pair", grad(f), x, x)
    f.def_fwd(lambda x, y: (x, (x,)), residuals=lambda x, y: {"x": x})
    _raises("residuals of a different structure than promised", grad(f), x, x)
    f.def_fwd(lambda x, y: (x, {"x": x[:1]}), residuals=lambda x, y: {"x": x})
    _raises(r"at residuals\['x'\]: promised ", grad(f), x, x)
    _raises(
        "`keep` of `def_fwd` is not an integer of at least 0",
        lambda: f.def_fwd(_numpy, keep=-1),
    )
    # `None` is zero.
    f = bad(lambda arguments, ct: (None, ct))
    assert_close(jax.grad(loss(f), (0, 1))(x, x)[0], jnp.zeros(3))


def test_complex_steps_need_a_function_of_complex_numbers():
    f = eqg.host_function(np.abs, out=lambda x: x, finite_difference="complex")
    _raises("returned a real array for a complex argument", jax.grad(f), 1.0)
    f = eqg.host_function(np.conj, out=lambda x: x, finite_difference="complex")
    _raises("complex steps were asked for", jax.jacrev(f, holomorphic=True), 1.0 + 1.0j)


def test_bad_arguments():
    f = eqg.host_function(
        lambda x, y=None, *, scale=1.0: x * scale,
        out=lambda x, *_, **__: x,
        finite_difference="central",
    )
    _raises(
        "differentiated with respect to a keyword-only argument",
        jax.grad(lambda s: f(1.0, scale=s)),
        2.0,
    )
    _raises("was given a random key", f, jax.random.key(0))
    _raises("an argument that is not an array and has no hash", f, 1.0, bytearray())
    closing = lambda a: eqg.host_function(lambda x: a * x, out=lambda x: x)(a)
    _raises("closes over a traced value", jax.jit(closing), 1.0)
    closing = lambda a: eqg.host_function(lambda: np.sin(a), out=1.0)()
    _raises("closes over a traced value", jax.jit(closing), 1.0)
    f = eqg.host_function(lambda x: x, out=lambda x: "x")
    _raises("`out` of `<lambda>` does not say what is returned", f, 1.0)
    types = (float, int, np.float32, jnp.float32, np.dtype("float32"))
    types += (SimpleNamespace(shape=(1,), dtype="torch.float32"),)
    for out in (0, (3,), [3], True, *types, lambda x: x.shape, lambda x: x.dtype, [float]):
        f = eqg.host_function(lambda x: x, out=out)
        _raises("not say what is returned(?s:.*)A shape or a dtype alone is", f, jnp.ones(1))
    f = make(finite_difference="central", step=(1.0,))
    _raises("`step` of `_numpy` does not fit the arguments", f, jnp.ones(2), jnp.ones(2))


def test_an_exception_under_vmap_shows_what_the_code_was_given():
    fn = lambda p, x: p * x
    call = eqg.host_function(fn, out=lambda p, x: x, vmap_method="expand_dims")
    p, x = jnp.arange(3.0), jnp.arange(4.0)
    with pytest.raises(RuntimeError, match="could not be broadcast") as error:
        jax.block_until_ready(jax.vmap(call, (0, None))(p, x))
    dtype = p.dtype
    assert f"called with {dtype}[3], {dtype}[1,4], under `vmap` of {dtype}[]" in str(
        error.value
    )
    assert "jnp.broadcast_arrays" in str(error.value)
    cured = jax.vmap(lambda p, x: call(*jnp.broadcast_arrays(p, x)), (0, None))
    assert_close(cured(p, x), p[:, None] * x[None])


@pytest.mark.parametrize("out", [lambda x: x[0], lambda x: x.sum(), lambda x: jnp.sum(x)])
def test_an_out_that_computes(out):
    call = eqg.host_function(np.sum, out=out)
    with pytest.raises(eqg.RuleError, match="`out` of `sum` computes") as error:
        call(jnp.arange(3.0))
    assert "jax.ShapeDtypeStruct((), x.dtype)" in str(error.value)


def test_an_out_is_given_the_keywords_that_it_has_parameters_for():
    """Most types depend on no option of the function."""

    def power(x, *, n=3, repeat=1):
        return np.tile(x**n, repeat)

    like = lambda x, repeat: jax.ShapeDtypeStruct((repeat * x.shape[0],), x.dtype)
    options = {"finite_difference": "central"}
    x = jnp.arange(1.0, 4.0)
    for out in (lambda x: x, lambda x, *, n: x, lambda x, **_: x):
        f = eqg.host_function(power, out=out, **options)
        assert_close(f(x, n=2), x**2)
        assert_close(jax.grad(lambda x, f=f: f(x, n=2).sum())(x), 2 * x, tolerance=1e-3)
    twice = eqg.host_function(power, out=lambda x, *, repeat=1: like(x, repeat))
    assert twice(x, n=2, repeat=2).shape == (6,)
    forgotten = eqg.host_function(power, out=lambda x: x)
    _raises("returned a different shape than promised", lambda: forgotten(x, repeat=2))
    needed = eqg.host_function(power, out=lambda x, *, repeat: like(x, repeat))
    _raises("`out` of `power` has other parameters", lambda: needed(x, n=2))


def test_rules_are_given_default_values():
    """As the rules of `custom_vjp` are, if they have a parameter for them."""

    @eqg.host_function(out=lambda x, **_: x)
    def power(x, *, n=3, unused=1):
        return x**n

    power.def_fwd(lambda x, *, n: (x**n, x))
    power.def_bwd(lambda x, ct, *, n: (ct * n * x ** (n - 1),))
    for grad in (jax.grad(power), jax.jit(jax.grad(power))):
        assert grad(2.0) == 12.0
        assert grad(2.0, n=2) == 4.0
    power.def_jvp(lambda p, t, *, n: (p[0] ** n, t[0] * n * p[0] ** (n - 1)))
    assert jax.jvp(power, (2.0,), (1.0,)) == (8.0, 12.0)


# ---------------------------------------------------------------- edges of a domain


def _root(x):
    return np.asarray(math.sqrt(x), x.dtype)


@pytest.mark.parametrize("derivative", [jax.grad, jax.hessian])
def test_differences_at_the_edge_of_a_domain(derivative):
    """NaN, or the exception of the function: it may be any mistake, and is not hidden."""
    like_x = {"out": lambda x: x, "finite_difference": "central"}
    nan = eqg.host_function(lambda x: np.where(x < 0, np.nan, x), **like_x)
    assert np.isnan(derivative(nan)(0.0))
    with pytest.raises(ValueError, match=r"domain|nonnegative") as caught:
        derivative(eqg.host_function(_root, **like_x))(0.0)
    notes = [note for note in caught.value.__notes__ if "smaller `step`" in note]
    assert len(notes) == 1
    assert "`_root` was called for a finite difference" in notes[0]
    with pytest.raises(jax.errors.JaxRuntimeError, match="give a smaller `step`"):
        jax.jit(derivative(eqg.host_function(_root, **like_x)))(0.0)
    wrong_there = eqg.host_function(lambda x: x if x == 0 else np.append(x, x), **like_x)
    with pytest.raises(RuleError, match="a different shape than promised") as caught:
        derivative(wrong_there)(0.0)
    assert "was called for a finite difference" in caught.value.__notes__[0]


def _full(x, n):
    return np.full(n, x)


@pytest.mark.parametrize(
    "out",
    [
        lambda x, n: jax.ShapeDtypeStruct((n,), x.dtype),
        lambda x, n: jax.ShapeDtypeStruct((int(n),), x.dtype),
        lambda x, n: jax.ShapeDtypeStruct(tuple(range(n)), x.dtype),
    ],
)
def test_a_shape_that_is_the_value_of_an_argument(out):
    full = eqg.host_function(_full, out=out)
    for call in (full, jax.jit(full)):
        with pytest.raises(RuleError, match=r"`out` of `_full`(.|\n)*static_argnums"):
            call(1.0, jnp.array(3))
