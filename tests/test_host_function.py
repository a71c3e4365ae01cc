"""Functions on the host: what they are given, promise and return, and the exceptions of host
code. Against the same functions in JAX."""

import collections
import copy
import gc
import math
import pickle
import traceback
import weakref
from types import SimpleNamespace

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.x64]

CENTRAL = {"finite_difference": "central"}
BATCH = {"vmap_method": "expand_dims"}


def like(x, *_):
    return x


def product(x, y):
    return x * y


def product_bwd(residuals, ct):
    x, y = residuals
    return ct * y, ct * x


def make(bwd=product_bwd, out=like, **options):
    """The product, with this rule."""
    function = eqg.host_function(product, out=out, **options)
    function.def_bwd(bwd)
    return function


def total(f):
    return lambda *args: jnp.sum(f(*args))


def fails(match, fn, *args):
    with pytest.raises(RuleError, match=match):
        fn(*args)


def in_program(match, fn, *args):
    """What the compiled program raises."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=match) as caught:
        jax.block_until_ready(fn(*args))
    return str(caught.value)


# ---------------------------------------------------------------- how it is called


def test_the_step_of_each_leaf():
    """The distance between evaluations, seen from inside of the function."""
    seen = []

    def square(pair, scale):
        seen.append((float(pair["a"]), float(pair["b"]), float(scale)))
        return pair["a"] ** 2 + pair["b"] ** 2 + scale**2

    step = {"a": 0.25, "b": None}, 0.5
    f = eqg.host_function(square, out=lambda pair, scale: scale, step=step, **CENTRAL)
    pair = {"a": jnp.float32(4.0), "b": jnp.float32(0.5)}
    grads = jax.grad(f, (0, 1))(pair, jnp.float32(0.1))
    expected = {"a": jnp.float32(8.0), "b": jnp.float32(1.0)}, jnp.float32(0.2)
    assert_close(grads, expected, tolerance=1e-3)
    a, b, scale = (np.ptp([point[i] for point in seen]) for i in range(3))
    assert a == 2.0  # relative to 4
    assert np.isclose(b, 2 * np.finfo(np.float32).eps ** (1 / 3))  # relative to 1
    assert np.isclose(scale, 1.0)


def test_it_is_traced_without_a_call_and_once():
    f = eqg.host_function(lambda x: 1 / 0, out=like, **CENTRAL)
    jax.make_jaxpr(jax.hessian(total(f)))(jnp.ones(2))
    f, traced = make(), []

    @jax.jit
    def step(f, x, y):
        traced.append(0)
        return jax.grad(total(f))(x, y)

    for _ in range(3):
        step(f, jnp.ones(2), jnp.ones(2))
    assert len(traced) == 1  # the call is equal to the next one, and so found in JAX's caches


def test_a_rule_that_is_given_anew():
    """What JAX kept of the calls of the earlier rule is not used."""
    h, x = eqg.host_function(lambda x: 3 * x, out=like), jnp.array([1.0, 2.0])
    for factor in (3.0, 5.0):
        h.def_bwd(lambda _, ct, factor=factor: (factor * ct,))
        h.def_jvp(lambda p, t, factor=factor: (3 * p[0], factor * t[0]))
        for derivative in (jax.grad, jax.jacfwd):
            assert derivative(h)(x[0]) == factor
            assert jnp.all(jax.vmap(derivative(h))(x) == factor)


@pytest.mark.parametrize("way", ["elementwise", "implicit", "custom_vjp"])
def test_ufunc(way):
    """A ufunc has options with default values, and no rule knows them (NumPy 2.4)."""
    sine = eqg.host_function(np.sin, out=like)
    cosine = eqg.host_function(np.cos, out=like)
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


@eqg.host_function(out=like, finite_difference="central")
def named(x):
    """A docstring."""
    return 2 * x


def test_it_is_a_good_citizen():
    assert (named.__name__, named.__doc__) == ("named", "A docstring.")
    assert repr(named) == "<eqx_grads.host_function of named>"
    assert named.__wrapped__(3) == 6
    assert pickle.loads(pickle.dumps(named)) is named
    local = make()
    for same in (copy.copy(local), copy.deepcopy(local)):
        assert same(jnp.ones(2), jnp.ones(2)).shape == (2,)
    assert hash(local) == hash(local)
    assert local.def_fwd(product) is product


@pytest.mark.thorough
def test_nothing_is_kept_alive():
    """A call in a program that is gone leaves its arrays to the garbage collector."""

    class Big:
        pass

    big = Big()
    f = eqg.host_function(lambda x: x * (big is not None), out=like)
    f.def_bwd(lambda arguments, ct: (ct,))
    jax.jit(jax.grad(total(f)))(jnp.ones(2))
    alive = weakref.ref(big)
    del f, big
    jax.clear_caches()
    gc.collect()
    assert alive() is None


# ---------------------------------------------------------------- what is promised


def test_float64_of_numpy_is_cast_to_what_was_promised():
    f = eqg.host_function(
        lambda x: (np.asarray(x, np.float64), np.int64(7), np.float64(0.1)),
        out=(jnp.zeros(3, jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float16)),
    )
    for call in (f, jax.jit(f)):
        x, n, half = call(jnp.ones(3, jnp.float32))
        assert (x.dtype, n.dtype, half.dtype) == (jnp.float32, jnp.int32, jnp.float16)
        assert (n, half) == (7, np.float16(0.1))


def test_a_promise_of_python_numbers():
    """A float is one number, by itself and in a tree; a class may make the tree."""
    assert eqg.host_function(lambda x: 2 * float(x), out=0.0)(1.5) == 3.0
    pair = collections.namedtuple("pair", ["a", "b"])
    assert eqg.host_function(lambda x, y: pair(x, 2 * y), out=pair)(1.0, 2.0) == pair(1.0, 4.0)
    count = eqg.host_function(lambda x: int(x.size), out=jax.ShapeDtypeStruct((), int))
    assert jax.jit(count)(jnp.ones(3)) == 3


def test_a_promise_of_what_has_a_shape_and_a_dtype():
    x = jnp.arange(3.0)

    class Like:
        shape, dtype = [3], x.dtype

    for t in (jax.typeof(x), jax.eval_shape(jnp.sin, x), np.zeros(3, np.float64), Like()):
        f = eqg.host_function(np.sin, out=t)
        f.def_fwd(lambda x: (np.sin(x), np.cos(x)))
        f.def_bwd(lambda cos, ct: (cos * ct,))
        out, pull = jax.jit(jax.vjp, static_argnums=0)(f, x)
        assert_close((out, pull(x)[0]), (jnp.sin(x), x * jnp.cos(x)))
        tree = eqg.host_function(lambda x: (x, {"a": -x}), out=lambda _, t=t: (t, {"a": t}))
        assert_close(tree(x), (x, {"a": -x}))
    assert_close(jax.vmap(eqg.host_function(np.sin, out=jax.typeof))(x), jnp.sin(x))
    linear = eqg.linear_host_function(lambda x: 2 * x, lambda y: 2 * y, out=jax.typeof(x))
    assert_close(linear(x), 2 * x)
    key = jax.typeof(jax.random.key(0))
    fails("does not say what is returned", eqg.host_function(lambda x: x, out=key), x)


def test_what_was_returned_is_compared_with_what_was_promised():
    x = np.ones(3)
    wrong = {"a": x[:2]}, {"a": x * 1j}, {"b": x}, None
    for returned in wrong:
        f = eqg.host_function(lambda x, returned=returned: returned, out=lambda x: {"a": x})
        fails("`<lambda>` returned a different", f, x)
        in_program("`<lambda>` returned a different", jax.jit(f), x)


def test_an_out_is_given_the_keywords_that_it_has_parameters_for():
    """Most types depend on no option of the function."""

    def power(x, *, n=3, repeat=1):
        return np.tile(x**n, repeat)

    repeated = lambda x, repeat: jax.ShapeDtypeStruct((repeat * x.shape[0],), x.dtype)
    x = jnp.arange(1.0, 4.0)
    for out in (lambda x: x, lambda x, *, n: x, lambda x, **_: x):
        f = eqg.host_function(power, out=out, **CENTRAL)
        assert_close(f(x, n=2), x**2)
        assert_close(jax.grad(lambda x, f=f: f(x, n=2).sum())(x), 2 * x, tolerance=1e-3)
    twice = eqg.host_function(power, out=lambda x, *, repeat=1: repeated(x, repeat))
    assert twice(x, n=2, repeat=2).shape == (6,)
    forgotten = eqg.host_function(power, out=lambda x: x)
    fails("returned a different shape than promised", lambda: forgotten(x, repeat=2))
    needed = eqg.host_function(power, out=lambda x, *, repeat: repeated(x, repeat))
    fails("`out` of `power` has other parameters", lambda: needed(x, n=2))


def test_an_out_gets_types_and_no_values():
    for out in (lambda x, n: x[0], lambda x, n: jnp.sum(x), lambda x, n: x.sum()):
        match = r"`out` of `product` computes(?s:.*)jax.ShapeDtypeStruct\(\(\), x.dtype\)"
        fails(match, make(out=out), jnp.arange(3.0), 1.0)
    for shape in (lambda n: (n,), lambda n: (int(n),), lambda n: tuple(range(n))):
        full = make(out=lambda x, n, shape=shape: jax.ShapeDtypeStruct(shape(n), x.dtype))
        for call in (full, jax.jit(full)):
            fails(r"`out` of `product`(.|\n)*static_argnums", call, 1.0, jnp.array(3))


def test_bad_promises_and_arguments():
    f = eqg.host_function(lambda x, y=None: x, out=like)
    fails("an argument that is not an array and has no hash", f, 1.0, bytearray())
    closing = lambda a: eqg.host_function(lambda: np.sin(a), out=1.0)()
    fails("closes over a traced value", jax.jit(closing), 1.0)
    for out in (
        *(0, (3,), [3], True, float, int, np.float32, jnp.float32, np.dtype("float32")),
        *(lambda x: "x", lambda x: x.shape, lambda x: x.dtype, [float]),
        SimpleNamespace(shape=(1,), dtype="torch.float32"),
    ):
        f = eqg.host_function(lambda x: x, out=out)
        fails("not say what is returned(?s:.*)A shape or a dtype alone is", f, jnp.ones(1))
    f = make(**CENTRAL, step=(1.0,))
    fails("`step` of `product` does not fit the arguments", f, jnp.ones(2), jnp.ones(2))


# ---------------------------------------------------------------- exceptions on the host


def test_an_exception_arrives_as_it_was_raised():
    class NoSolution(Exception):
        pass

    def solve(x):
        if np.sum(x) > 1:
            raise NoSolution("none for this x")  # the line
        return x

    f, x = eqg.host_function(solve, out=like, **CENTRAL), jnp.ones(3)
    for call in (f, jax.grad(total(f))):
        with pytest.raises(NoSolution, match="none for this x") as caught:
            call(x)
        assert "by `solve`, called with float" in caught.value.__notes__[0]
        assert caught.traceback[-1].name == "solve"
    for call in (jax.jit(f), jax.vmap(f), jax.jit(jax.grad(total(f)))):
        text = in_program("`solve` raised an exception on the host.", call, 2 * x)
        assert "NoSolution: none for this x" in text
        assert 'raise NoSolution("none for this x")  # the line' in text
        assert "finite_difference.py" not in text.partition("raised an exception")[2]


def test_a_compiled_program_logs_the_exception_once(caplog):
    """And with no frame of this library except the frame that raises it."""

    def solve(x):
        raise ZeroDivisionError("none")

    for fn, text in (
        (solve, "ZeroDivisionError: none"),
        (lambda x: x[:1], "a different shape than"),
    ):
        caplog.clear()
        in_program(text, jax.jit(eqg.host_function(fn, out=like)), jnp.ones(3))
        logged = [record for record in caplog.records if record.exc_info]
        for record in logged:
            shown = "".join(traceback.format_exception(record.exc_info[1]))
            assert (shown.count("host_callback.py"), shown.count(text)) == (1, 1)
        assert logged


@pytest.mark.parametrize("derivative", [jax.grad, jax.hessian])
def test_differences_at_the_edge_of_a_domain(derivative):
    """NaN, or the exception of the function: it may be any mistake, and is not hidden."""

    def root(x):
        return np.asarray(math.sqrt(x), x.dtype)

    of = lambda fn: derivative(eqg.host_function(fn, out=like, **CENTRAL))
    assert np.isnan(of(lambda x: np.where(x < 0, np.nan, x))(0.0))
    with pytest.raises(ValueError, match=r"domain|nonnegative") as caught:
        of(root)(0.0)
    (note,) = [note for note in caught.value.__notes__ if "smaller `step`" in note]
    assert "`root` was called for a finite difference" in note
    in_program("give a smaller `step`", jax.jit(of(root)), 0.0)
    with pytest.raises(RuleError, match="a different shape than promised") as caught:
        of(lambda x: x if x == 0 else np.append(x, x))(0.0)
    assert "was called for a finite difference" in caught.value.__notes__[0]


# ---------------------------------------------------------------- the axes of vmap


def test_shapes_that_do_not_have_the_axes_of_vmap():
    """One result for the whole batch is not the result of each example."""
    xs = jnp.ones((4, 3))
    for fn, out, x in (
        (np.sum, jnp.zeros(()), xs),
        (lambda x: x[:2], like, xs),
        (lambda x: x[:1], like, xs),
        (lambda x: x[:1], like, xs[:, 0]),
    ):
        call = jax.vmap(eqg.host_function(fn, out=out, **BATCH))
        in_program("the function is given the axes of", call, x)
    p, x = jnp.arange(3.0), jnp.arange(4.0)
    call = make(out=lambda p, x: x, **BATCH)
    text = in_program("could not be broadcast", jax.vmap(call, (0, None)), p, x)
    assert f"called with {p.dtype}[3], {p.dtype}[1,4], under `vmap` of {p.dtype}[]" in text
    assert "jnp.broadcast_arrays" in text
    cured = jax.vmap(lambda p, x: call(*jnp.broadcast_arrays(p, x)), (0, None))
    assert_close(cured(p, x), p[:, None] * x[None])


def test_an_output_of_arguments_that_are_not_batched():
    """It has the axes of the batch if each argument has them."""
    both = lambda method: eqg.host_function(
        lambda x, y: (np.sin(x), np.cos(y)), out=lambda x, y: (x, y), vmap_method=method
    )
    xs, y = jnp.array([1.0, 2.0, 3.0]), jnp.array(0.5)
    sines, cosines = jax.jit(jax.vmap(both("broadcast_all"), (0, None)))(xs, y)
    assert_close((sines, cosines), (jnp.sin(xs), jnp.full(3, jnp.cos(y))))
    in_program("With `'broadcast_all'`", jax.vmap(both("expand_dims"), (0, None)), xs, y)


def shape_of_both(x, y):
    return jax.ShapeDtypeStruct(np.broadcast_shapes(x.shape, y.shape), x.dtype)


@pytest.mark.parametrize(
    ("shapes", "method"),
    [
        (((5,), ()), "expand_dims"),
        (((2, 3), (3,)), "sequential"),
        (((2, 1), (1, 3)), "expand_dims"),
    ],
)
def test_cotangents_are_summed_over_broadcast_axes(shapes, method, getkey):
    x, y = (jr.normal(getkey(), shape) for shape in shapes)
    host = make(out=shape_of_both, vmap_method=method)
    gradients = lambda fn: jax.grad(lambda x, y: jnp.sum(jnp.sin(fn(x, y))), (0, 1))
    with jax.numpy_rank_promotion("allow"):
        assert_close(gradients(host)(x, y), gradients(product)(x, y))
        xs = jnp.stack([x, 2 * x])
        batched = lambda fn: jax.jit(jax.vmap(gradients(fn), (0, None)))(xs, y)
        # With an axis in front, a `y` without it has to broadcast as it does without `vmap`.
        if method == "sequential" or len(shapes[0]) > 1 or shapes[1] == ():
            assert_close(batched(host), batched(product))


def test_half_precision_is_summed_in_single():
    f, x = make(out=shape_of_both), jnp.ones((4096, 2), jnp.float16)
    ct_y = jax.grad(lambda y: f(x, y).sum().astype(jnp.float32))(x[0])
    assert jnp.all(ct_y == 4096)
