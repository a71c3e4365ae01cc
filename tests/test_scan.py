"""`filter_scan` against loops written out and `jax.lax.scan`."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close, checking_leaks, temp_bytes


CHECKPOINTS = (None, 1, 3, 100, "sqrt", "replay", "auto")


def cell(weight, h, x):
    return jnp.tanh(weight @ h + x)


def written_out(weight, h, xs, *, reverse=False, each_carry=lambda t, h: h):
    ys = []
    times = list(range(len(xs)))
    for t in times[::-1] if reverse else times:
        h = cell(weight, each_carry(t, h), xs[t])
        ys.append(h * x_scale(xs[t]))
    return h, jnp.stack(ys[::-1] if reverse else ys)


def x_scale(x):
    return 1 + 0.1 * x


def scanned(weight, h, xs, **options):
    def step(h, x):
        h = cell(weight, h, x)
        return h, h * x_scale(x)

    return eqg.filter_scan(step, h, xs, **options)


def arguments(getkey, steps=7):
    dtype = jnp.zeros(()).dtype
    return (
        jr.normal(getkey(), (3, 3), dtype),
        jr.normal(getkey(), (3,), dtype),
        jr.normal(getkey(), (steps, 3), dtype),
    )


def loss(f):
    def value(*args):
        h, ys = f(*args)
        return jnp.sum(jnp.sin(h)) + jnp.sum(ys**2)

    return value


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("reverse", [False, True])
def test_values_and_gradients(checkpoint, reverse, getkey):
    args = arguments(getkey)
    f = ft.partial(scanned, checkpoint=checkpoint, reverse=reverse)
    plain = ft.partial(written_out, reverse=reverse)
    assert_close(f(*args), plain(*args), eps=500)
    assert_close(
        jax.grad(loss(f), (0, 1, 2))(*args), jax.grad(loss(plain), (0, 1, 2))(*args), eps=500
    )


ORDERS: dict[str, Callable[..., Any]] = {
    "forward": lambda f: lambda *args: jax.jvp(f, args, args),
    "forward over reverse": lambda f: (
        lambda *args: jax.jvp(jax.grad(loss(f), (0, 1, 2)), args, args)[1]
    ),
    "reverse over reverse": lambda f: jax.grad(
        lambda *args: sum(jnp.sum(g**2) for g in jax.grad(loss(f), (0, 1, 2))(*args)),
        (0, 1, 2),
    ),
    "grad(vmap)": lambda f: (
        lambda w, h, xs: jax.grad(
            lambda w, xs: jnp.sum(jax.vmap(lambda x: loss(f)(w, h, x))(xs)), (0, 1)
        )(w, jnp.stack([xs, -xs]))
    ),
    "vmap(grad)": lambda f: (
        lambda w, h, xs: jax.vmap(jax.grad(loss(f), (0, 1, 2)), (None, None, 0))(
            w, h, jnp.stack([xs, -xs])
        )
    ),
    "grad(jit)": lambda f: jax.grad(jax.jit(loss(f)), (0, 1, 2)),
    "jit(grad)": lambda f: jax.jit(jax.grad(loss(f), (0, 1, 2))),
    "remat": lambda f: jax.grad(jax.checkpoint(loss(f)), (0, 1, 2)),
    "nested": lambda f: (
        lambda w, h, xs: jax.grad(
            lambda w, h: jnp.sum(
                eqg.filter_scan(
                    lambda h, x: (f(w, h, x[None] * xs)[0], None), h, xs[:2], checkpoint=1
                )[0]
            ),
            (0, 1),
        )(w, h)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("checkpoint", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_every_order(order, checkpoint, getkey):
    args = arguments(getkey, steps=5)

    def plain(weight, h, xs):
        def step(h, x):
            h = cell(weight, h, x)
            return h, h * x_scale(x)

        return jax.lax.scan(step, h, xs)

    f = ft.partial(scanned, checkpoint=checkpoint)
    with checking_leaks():
        got = ORDERS[order](f)(*args)
    assert_close(got, ORDERS[order](plain)(*args), eps=500)


class Cell(eqx.Module):
    weight: jax.Array
    activation: Callable[..., Any]
    depth: int

    def __call__(self, h, x):
        for _ in range(self.depth):
            h = self.activation(self.weight @ h + x)
        return h, h

    def step(self, h, x):
        return self(h, x)


@pytest.mark.slow
def test_modules_methods_and_closures(getkey):
    weight, h, xs = arguments(getkey)
    module = Cell(weight, jnp.tanh, 2)
    plain = lambda m: jnp.sum(jax.lax.scan(lambda h, x: m(h, x), h, xs)[1] ** 2)
    expected = eqx.filter_grad(plain)(module)
    for function in (
        lambda m: m,
        lambda m: m.step,
        lambda m: lambda h, x: m(h, x),
        lambda m: ft.partial(Cell.step, m),
    ):
        total = lambda m, fn=function: jnp.sum(
            eqg.filter_scan(fn(m), h, xs, checkpoint=2)[1] ** 2
        )
        assert_close(eqx.filter_grad(total)(module), expected, eps=500)
        with checking_leaks():
            assert_close(eqx.filter_grad(eqx.filter_jit(total))(module), expected, eps=500)


@pytest.mark.thorough
def test_a_module_as_carry_and_as_xs(getkey):
    weight, h, _ = arguments(getkey)
    module = Cell(weight, jnp.tanh, 1)

    def train(module, x):
        grad = eqx.filter_grad(lambda m: jnp.sum(m(h, x)[0] ** 2))(module)
        updates = jax.tree.map(lambda g: -0.1 * g, grad)
        return eqx.apply_updates(module, updates), module.activation

    xs = jnp.ones((4, 3))
    trained, activation = eqg.filter_scan(train, module, xs)
    expected = module
    for x in xs:
        expected, _ = train(expected, x)
    assert_close(trained.weight, expected.weight, eps=500)
    assert trained.activation is activation is jnp.tanh
    assert trained.depth == 1

    layers = eqx.filter_vmap(lambda w: Cell(w, jnp.tanh, 1))(jnp.stack([weight, 2 * weight]))
    through, _ = eqg.filter_scan(lambda h, layer: layer(h, jnp.ones(3)), h, layers)
    assert_close(through, cell(2 * weight, cell(weight, h, jnp.ones(3)), jnp.ones(3)), eps=500)


def test_keys_counters_none_and_static_outputs():
    def step(carry, x):
        assert x == {"a": None, "b": "static", "c": 3}
        carry, name = carry, carry["name"]
        key, _ = jr.split(carry["key"])
        carry = {**carry, "key": key, "count": carry["count"] + 1, "x": 0.5 * carry["x"]}
        return carry, (carry["count"], name, jnp.tanh, None, 2)

    init = {"key": jr.key(0), "count": 0, "name": "me", "none": None, "x": 1.0, "fixed": 7}
    xs = {"a": None, "b": "static", "c": 3}
    for checkpoint in (None, 2):
        carry, ys = eqg.filter_scan(step, init, xs, length=5, checkpoint=checkpoint)
        assert carry["count"] == 5
        assert carry["x"] == 0.5**5
        assert (carry["name"], carry["none"], carry["fixed"]) == ("me", None, 7)
        assert jnp.issubdtype(carry["key"].dtype, jax.dtypes.prng_key)
        assert ys[0].tolist() == [1, 2, 3, 4, 5]
        assert ys[1:4] == ("me", jnp.tanh, None)
        assert ys[4].tolist() == [2] * 5


def test_an_integer_that_the_steps_leave_alone_is_static():
    def step(carry, x):
        h, power = carry
        assert isinstance(power, int)
        return (h * x**power, power), None

    (h, power), _ = eqg.filter_scan(step, (1.0, 2), jnp.array([2.0, 3.0]))
    assert h == 36.0
    assert power == 2


@pytest.mark.parametrize("checkpoint", [None, 3])
@pytest.mark.parametrize("steps", [0, 1])
def test_no_step_and_one_step(steps, checkpoint, getkey):
    weight, h, xs = arguments(getkey, steps)
    last, ys = scanned(weight, h, xs, checkpoint=checkpoint)
    assert ys.shape == (steps, 3)
    assert_close(last, cell(weight, h, xs[0]) if steps else h)
    grad = jax.grad(lambda *args: jnp.sum(scanned(*args, checkpoint=checkpoint)[0]), 1)
    plain = lambda h: jnp.sum(cell(weight, h, xs[0]) if steps else h)
    assert_close(grad(weight, h, xs), jax.grad(plain)(h))


@pytest.mark.thorough
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("checkpoint", [None, 2, 100])
def test_truncate(reverse, checkpoint, getkey):
    steps = 7
    args = arguments(getkey, steps)

    def cut(t, h):
        done = steps - 1 - t if reverse else t
        return jax.lax.stop_gradient(h) if done % 3 == 0 and done > 0 else h

    plain = ft.partial(written_out, each_carry=cut, reverse=reverse)
    f = ft.partial(scanned, truncate=3, checkpoint=checkpoint, reverse=reverse)
    assert_close(
        jax.grad(loss(f), (0, 1, 2))(*args), jax.grad(loss(plain), (0, 1, 2))(*args), eps=500
    )
    assert_close(jax.jvp(f, args, args), jax.jvp(plain, args, args), eps=500)


def test_truncation_stops_what_is_not_finite():
    def step(h, x):
        return h * x, h

    xs = jnp.array([2.0, 1.0, jnp.inf, 1.0])
    last = lambda x: eqg.filter_scan(step, x, xs, truncate=2)[0]
    assert jax.grad(last)(1.0) == 0.0


@eqg.custom_vjp
def _clip(h):
    return h


@_clip.def_fwd
def _clip_fwd(h):
    return h, None


@_clip.def_bwd
def _clip_bwd(residuals, ct):
    return (jax.tree.map(lambda c: jnp.clip(c, -0.1, 0.1), ct),)


@pytest.mark.parametrize("checkpoint", [None, 3])
@pytest.mark.parametrize("truncate", [None, 4])
def test_carry_gradient(checkpoint, truncate, getkey):
    args = arguments(getkey)

    def each(t, h):
        h = jax.lax.stop_gradient(h) if truncate and t % truncate == 0 and t > 0 else h
        return _clip(h)

    plain = ft.partial(written_out, each_carry=each)
    f = ft.partial(scanned, carry_gradient=_clip, checkpoint=checkpoint, truncate=truncate)
    got = jax.grad(loss(f), (0, 1, 2))(*args)
    assert_close(got, jax.grad(loss(plain), (0, 1, 2))(*args), eps=500)
    assert jnp.max(jnp.abs(got[1])) <= jnp.asarray(0.1, got[1].dtype)


def test_dtypes_and_weak_types():
    for dtype in ("float16", "bfloat16", "float32"):
        last, ys = eqg.filter_scan(lambda c, x: (c + x, x), 0.0, jnp.ones(3, dtype))
        assert last.dtype == ys.dtype == dtype
        assert last == 3.0
    grad = jax.grad(lambda x: eqg.filter_scan(lambda c, _: (2 * c, None), x, length=3)[0])
    assert grad(1.0) == 8.0
    assert eqg.filter_scan(lambda c, x: (c + x, x), np.zeros(()), np.ones(3))[0] == 3.0


@pytest.mark.parametrize("checkpoint", [3, 5, "sqrt"])
def test_chunks_of_a_loop_without_xs(checkpoint):
    """Each chunk is as long as its share of `length`, though nothing is sliced."""

    def last(x):
        step = lambda c, _: (2 * c, c)
        return eqg.filter_scan(step, x, length=12, checkpoint=checkpoint)

    carry, ys = jax.jit(last)(1.0)
    assert carry == 2.0**12
    assert ys.tolist() == [2.0**i for i in range(12)]
    assert jax.grad(lambda x: last(x)[0])(1.0) == 2.0**12


@pytest.mark.cost
def test_memory():
    h, xs = jnp.zeros((8, 16)), jnp.ones((1024, 8, 16))
    last = lambda **options: jax.grad(
        lambda w: jnp.sum(
            eqg.filter_scan(lambda h, x: (jnp.tanh(h @ w + x), None), h, xs, **options)[0]
        )
    )
    weight = jnp.eye(16)
    plain = temp_bytes(last(), weight)
    assert temp_bytes(last(checkpoint="sqrt"), weight) < plain / 8
    assert temp_bytes(last(truncate=32), weight) < plain / 8
    assert temp_bytes(last(checkpoint="replay"), weight) < 0.6 * plain
    assert temp_bytes(last(checkpoint="auto"), weight) < 0.6 * plain


@pytest.mark.cost
def test_chunks_of_one_step_copy_nothing():
    """XLA copied `xs`, as it gave the axis of length one another layout."""
    xs = jnp.ones((200, 4096))
    step = lambda w, c, x: (c + jnp.sum(jnp.tanh(jnp.tanh(w * x))), jnp.tanh(w * x))

    def last(w):
        return eqg.filter_scan(ft.partial(step, w), jnp.array(0.0), xs, checkpoint=1)[0]

    assert temp_bytes(jax.grad(last), jnp.array(0.5)) < 2 * xs[0].nbytes


@pytest.mark.cost
@pytest.mark.slow
def test_a_hundred_thousand_steps():
    h = jnp.zeros(4)
    weight = 0.5 * jnp.eye(4)

    def total(weight, **options):
        step = lambda h, t: (jnp.tanh(weight @ h + jnp.sin(t.astype(h.dtype))), jnp.sum(h))
        return jnp.sum(eqg.filter_scan(step, h, jnp.arange(100_000), **options)[1])

    plain = temp_bytes(jax.grad(total), weight)
    truncated = jax.jit(jax.grad(ft.partial(total, truncate=250)))
    assert temp_bytes(truncated, weight) < plain / 2  # the arrays of `ys` and `t` are left
    both = jax.grad(ft.partial(total, checkpoint="sqrt"))
    got = truncated(weight)
    np.testing.assert_allclose(got, jax.jit(both)(weight), rtol=1e-3, atol=5)


class TestErrors:
    @pytest.mark.parametrize(
        ("init", "step", "message"),
        [
            (
                {"h": jnp.ones(2), "act": jnp.tanh},
                lambda c, x: ({**c, "act": jnp.sin}, None),
                r"at carry\['act'\]: it was .*tanh.*, and is .*sin(?s:.)*is static",
            ),
            (
                (jnp.ones(2), "a"),
                lambda c, x: ((c[0], "b"), None),
                r"at carry\[1\]: it was str \('a'\), and is str \('b'\)",
            ),
            (
                [jnp.ones(2)],
                lambda c, x: ([c[0][:1]], None),
                r"at carry\[0\]: it was float..\[2\], and is float..\[1\](?s:.)*"
                r"the shape \(1,\)",
            ),
            (
                jnp.ones(2),
                lambda c, x: (c.astype("bfloat16"), None),
                r"at carry: it was float..\[2\], and is bfloat16\[2\](?s:.)*dtype bfloat16",
            ),
            (
                (jnp.ones(2), jnp.ones(3)),
                lambda c, x: (c[:1], None),
                r"at carry: it was a tuple of 2, and is a tuple of 1",
            ),
            (
                {"a": (jnp.ones(2), None)},
                lambda c, x: ({"a": (c["a"][0], 1.0)}, None),
                r"at carry\['a'\]\[1\]: it was None, and is float",
            ),
            (
                eqx.nn.Linear(2, 2, key=jr.key(0)),
                lambda c, x: (eqx.nn.Linear(2, 2, use_bias=False, key=jr.key(0)), None),
                r"at carry(\.bias)?: it was ",
            ),
            (
                jnp.ones(2),
                lambda c, x: ("no array", None),
                r"at carry: it was float..\[2\], and is str",
            ),
            (jnp.ones(2), lambda c, x: c, r"did not return a pair\.\n  it returned "),
        ],
    )
    def test_the_carry(self, init, step, message):
        for checkpoint in (None, 2):
            with pytest.raises(RuleError, match=message):
                eqg.filter_scan(step, init, length=5, checkpoint=checkpoint)

    def test_static_field(self):
        class WithStatic(eqx.Module):
            x: jax.Array
            n: int = eqx.field(static=True)

        step = lambda c, x: (WithStatic(c.x, c.n + 1), None)
        with pytest.raises(RuleError, match=r"at carry\.n: it was 1, and is 2, a static field"):
            eqg.filter_scan(step, WithStatic(jnp.ones(2), 1), length=3)

    def test_the_function_is_named(self):
        def my_step(c, x):
            return c[:1], None

        with pytest.raises(RuleError, match=r"`my_step`, a step of(?s:.)*test_scan\.py"):
            eqg.filter_scan(my_step, jnp.ones(2), length=3)

    def test_carry_gradient(self):
        step = lambda c, x: (c, None)
        with pytest.raises(RuleError, match=r"`carry_gradient` of(?s:.)*at carry: it was"):
            eqg.filter_scan(
                step, jnp.ones(2), length=3, carry_gradient=lambda h: h.astype("float16")
            )

    def test_lengths(self):
        step = lambda c, x: (c, None)
        xs = {"a": np.ones((3, 2), "float32"), "b": np.ones((4, 2), "float32")}
        with pytest.raises(RuleError, match=r"`xs\['a'\]` says 3 steps, `xs\['b'\]` is float"):
            eqg.filter_scan(step, 0.0, xs)
        with pytest.raises(RuleError, match=r"`length` says 5 steps, `xs\['a'\]` is float32"):
            eqg.filter_scan(step, 0.0, xs, length=5)
        with pytest.raises(RuleError, match=r"without a time axis\.\n  `xs\[1\]` is float"):
            eqg.filter_scan(step, 0.0, (jnp.ones(3), jnp.ones(())))
        with pytest.raises(RuleError, match=r"can't tell the number of steps"):
            eqg.filter_scan(step, 0.0, (jnp.tanh, None))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"length": -1},
                r"`length` of `filter_scan` is not an integer.*\n  it is -1",
            ),
            (
                {"length": 3, "checkpoint": 0},
                r"a `checkpoint` that it does not know(?s:.)*is 0",
            ),
            ({"length": 3, "checkpoint": "log"}, r"does not know\.\n  it is 'log'"),
            ({"length": 3, "truncate": 0}, r"`truncate` of `filter_scan` is not an integer"),
            ({"length": 3, "truncate": True}, r"`truncate` of(?s:.)*it is True"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(RuleError, match=message):
            eqg.filter_scan(lambda c, x: (c, None), 0.0, **options)


@pytest.mark.parametrize("unroll", [0, True, False, np.int32(0), np.int64(2)])
@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": 1}, {"checkpoint": "sqrt"}, {"truncate": 5}, {"online": True}],
)
def test_unroll_is_as_for_jax(unroll, options):
    w, xs = jnp.linspace(0.1, 0.9, 3), jnp.linspace(-1.0, 1.0, 15).reshape(5, 3)

    def loss(w, scan, **options):
        step = lambda h, x: (jnp.tanh(h * w + x), h)
        h, hs = scan(step, jnp.zeros(3), xs, **options)
        return jnp.sum(h) + jnp.sum(hs**2)

    expected = jax.grad(loss)(w, jax.lax.scan)
    got = jax.grad(loss)(w, eqg.filter_scan, unroll=unroll, **options)
    assert_close(got, expected)


def test_unroll_of_zero_is_the_whole_loop():
    step = lambda h, x: (h + x, None)
    program = jax.make_jaxpr(lambda xs: eqg.filter_scan(step, 0.0, xs, unroll=0))(jnp.ones(7))
    assert "unroll=7" in str(program)
