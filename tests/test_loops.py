"""`filter_scan`, `filter_while_loop`, `filter_map`, `filter_cond`, `filter_checkpoint` and
`linear_recurrence`: what is compiled, kept, exported and refused, and the corners of their
numbers. The numbers are in `tests/guard/registry/loops.py`."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError
from jax import export

from .helpers import assert_close, checking_leaks, compilations, temp_bytes


pytestmark = [pytest.mark.versions, pytest.mark.x64]

FLOAT = jnp.zeros(()).dtype
WEIGHT = 0.5 * jr.normal(jr.key(0), (3, 3), FLOAT)
H, XS = jr.normal(jr.key(1), (3,), FLOAT), jr.normal(jr.key(2), (12, 3), FLOAT)


def tanh_step(h, x):
    h = jnp.tanh(h @ WEIGHT + x)
    return h, h


def gradient(step, h=H, xs=XS, **options):
    loss = lambda h, xs: jnp.sum(eqg.filter_scan(step, h, xs, **options)[0] ** 2)
    return jax.grad(loss, (0, 1))(h, xs)


# ---------------------------------------------------------------- scan: corners of the numbers


def test_truncation_stops_what_is_not_finite():
    xs = jnp.array([2.0, 1.0, jnp.inf, 1.0])
    last = lambda x: eqg.filter_scan(lambda h, x: (h * x, h), x, xs, truncate=2)[0]
    assert jax.grad(last)(1.0) == 0.0


@pytest.mark.parametrize("checkpoint", [3, 5, "sqrt"])
def test_chunks_of_a_loop_without_xs(checkpoint):
    """Each chunk is as long as its share of `length`, though nothing is sliced."""
    step = lambda c, _: (2 * c, c)
    last = lambda x: eqg.filter_scan(step, x, length=12, checkpoint=checkpoint)
    carry, ys = jax.jit(last)(1.0)
    assert (carry, ys.tolist()) == (2.0**12, [2.0**i for i in range(12)])
    assert jax.grad(lambda x: last(x)[0])(1.0) == 2.0**12


def test_unroll_is_as_for_jax():
    """A bool, nothing, and integers of NumPy."""
    given = {0: {}, True: {"checkpoint": "sqrt"}, np.int64(2): {"truncate": 12}}
    for unroll, options in given.items():
        assert_close(gradient(tanh_step, unroll=unroll, **options), gradient(tanh_step))


def test_numbers_in_xs():
    """A1: they are static, in contrast to numbers in the carry. A Python loop is
    the reference."""

    def step(h, x):
        a, s = x
        return h + s * a + float(np.copysign(2.0, s.real)), None

    for dtype, values in ((float, (2.0, 3.0, 2.0, 0.0, -0.0)), (complex, (2j, 3j, 1 + 2j))):
        init = jnp.zeros((), dtype)
        for s in values:
            got = complex(eqg.filter_scan(step, init, (jnp.arange(3).astype(init.dtype), s))[0])
            assert got == sum(s * a + float(np.copysign(2.0, s.real)) for a in range(3))


@pytest.mark.parametrize("options", [{}, {"truncate": 6}, {"checkpoint": "auto"}], ids=str)
def test_effects_happen_once_a_step(options):
    seen, count = [], jax.new_ref(jnp.zeros(2, int))

    def step(h, x):
        jax.debug.callback(seen.append, x[0])
        return jnp.tanh(h + x), None

    def writes(h, x):
        count[...] = count[...] + 1
        return jnp.tanh(h + x), None

    jax.grad(lambda h: jnp.sum(eqg.filter_scan(step, h, XS, **options)[0]))(H)
    jax.effects_barrier()
    assert len(seen) == 12
    eqg.filter_scan(writes, H, XS, **options)
    assert (count[...] == 12).all()


# ---------------------------------------------------------------- D3: rules in the steps


def closure(k, x):
    g = eqg.custom_vjp(lambda x: k * x)
    g.def_fwd(lambda x: (g(x), None))
    g.def_bwd(lambda _, ct: (k * ct,))
    return g(x)


@pytest.mark.parametrize("options", [{"checkpoint": "replay"}, {"truncate": 4}], ids=str)
def test_rules_that_close_over_a_traced_value(options):
    """A value without a derivative is not an obstacle, as long as nobody asks for its
    derivative. Where the derivative is asked for, the rule's error is raised."""
    guarded = lambda k, x: eqg.nondifferentiable(k) * x
    last = {"checkpoint": 1, "truncate": options.get("truncate")}
    for holder in (closure, guarded):
        run = lambda k, o, f=holder: gradient(lambda h, x: (jnp.tanh(f(k, h) + x), None), **o)
        got, want = (jax.jit(lambda k, o=o: run(k, o))(0.5) for o in (options, last))  # noqa: B023
        assert_close(got, want)

    def loss(k):
        step = lambda h, x: (jnp.tanh(closure(k, h) + x), None)
        return jnp.sum(eqg.filter_scan(step, H, XS, **options)[0])

    with pytest.raises(RuleError, match="with respect to a value that it closes over"):
        jax.jit(jax.grad(loss))(0.5)


@pytest.mark.parametrize("checkpoint", ["replay", "auto"])
def test_a_replay_in_forward_mode_needs_no_reverse_derivative(checkpoint):
    """Only what is asked for is differentiated."""

    def step(h, x):
        root = eqg.filter_while_loop(lambda r: r < 2, lambda r: 1.5 * r, 1 + jnp.abs(h))
        return jnp.tanh(root + x), None

    last = lambda h, **options: eqg.filter_scan(step, h, XS[:, 0], **options)[0]
    run = ft.partial(last, checkpoint=checkpoint)
    assert_close(jax.jvp(run, (0.5,), (1.0,)), jax.jvp(last, (0.5,), (1.0,)))
    with pytest.raises(ValueError, match=r"not work for `filter_while_loop`(.|\n)*max_steps`"):
        jax.grad(run)(0.5)
    loop = ft.partial(eqg.filter_while_loop, lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]))
    # The count depends on no argument, and no step changes the other.
    assert jax.grad(lambda x: jnp.prod(jnp.stack(loop((0.0, x)))))(2.0) == 3


# ---------------------------------------------------------------- D5: eager calls

_clipped = lambda h: eqg.clip_gradient(h, -1.0, 1.0)
EAGER = [{}, {"checkpoint": 3}, {"online": True}, {"carry_gradient": _clipped}]
EAGER += [{"truncate": 5, "checkpoint": "replay", "reverse": True}]


@pytest.mark.parametrize("options", EAGER, ids=lambda options: str([*options]))
def test_eager_derivatives_compile_once(options):
    """B12: of a step that stays the same, both modes, to second order."""

    def step(h, x):
        h = jnp.tanh(h * x)
        return h, h

    def loss(h):
        last, ys = eqg.filter_scan(step, h, XS, **options)
        return jnp.sum(last) + jnp.sum(ys)

    def derivatives():
        forward = lambda f: jax.jvp(f, (H,), (H,))
        return jax.grad(loss)(H), forward(loss), forward(jax.grad(loss))

    first, _ = derivatives(), derivatives()
    with compilations() as found:
        derivatives()
    assert not found
    assert_close(first[0], jax.jit(jax.grad(loss))(H))


# ---------------------------------------------------------------- D6: export


def exported(shapes, **options):
    """The gradient of a scan as it is exported with a symbolic size, and as it is."""

    def loss(w, h, xs):
        step = lambda h, x: (jnp.tanh(h @ w + x), None)
        return jnp.sum(eqg.filter_scan(step, h, xs, **options)[0])

    (n,) = export.symbolic_shape("n")
    shapes_of = lambda n: [tuple(n if d == "n" else d for d in shape) for shape in shapes]
    types = [jax.ShapeDtypeStruct(shape, FLOAT) for shape in shapes_of(n)]
    program = export.export(jax.jit(jax.grad(loss, (0, 1, 2))))(*types)
    args = [jr.normal(jr.key(len(shape)), shape, FLOAT) for shape in shapes_of(12)]
    assert_close(program.call(*args), jax.grad(loss, (0, 1, 2))(*args), eps=200)


@pytest.mark.thorough
@pytest.mark.parametrize("truncate", [None, 5])
def test_symbolic_sizes(truncate):
    """A batch, and a number of steps, which can't be divided into chunks."""
    of_batch, of_steps = [(3, 3), ("n", 3), (12, "n", 3)], [(3, 3), (3,), ("n", 3)]
    for checkpoint in (None, 3, "replay", "auto"):
        exported(of_batch, checkpoint=checkpoint, truncate=truncate)
    for checkpoint in (None, "auto"):
        exported(of_steps, checkpoint=checkpoint, truncate=truncate)
    for checkpoint in ("replay", "sqrt")[: 1 if truncate else 2]:
        with pytest.raises(RuleError, match=r"number of steps is symbolic"):
            exported(of_steps, checkpoint=checkpoint, truncate=truncate)


# ---------------------------------------------------------------- D7: static functions


CONTROL_FLOW = {
    "cond": lambda f, g: eqg.filter_cond(True, lambda: (f, 1.0), lambda: (g, 2.0)),
    "scan": lambda f, g: eqg.filter_scan(
        lambda c, _: ((g, c[1] + 1), None), (f, 0.0), length=1
    )[0],
    "while": lambda f, g: eqg.filter_while_loop(
        lambda c: c[1] < 1, lambda c: (g, c[1] + 1), (f, 0.0)
    ),
}


@pytest.mark.parametrize("kind", CONTROL_FLOW)
def test_static_functions_that_close_over_arrays(kind):
    """The same if they are one object; a clear error if not, and never an ambiguous truth
    value."""

    def run(f, g):
        fn, number = CONTROL_FLOW[kind](f, g)
        return fn(jnp.ones(3)), number

    multiply = lambda a: lambda h: h * a
    for wrap in (lambda f: f, jax.jit):
        same = lambda a: run(f := multiply(a), f)
        assert_close(wrap(same)(jnp.arange(3.0)), (jnp.arange(3.0), jnp.array(1.0)))
        with pytest.raises(RuleError, match=r"static"):
            wrap(lambda a: run(multiply(a), multiply(a)))(jnp.arange(3.0))


# ---------------------------------------------------------------- D12: `carry_gradient`


def raw_identity(h):
    f = jax.custom_vjp(lambda h: h)
    f.defvjp(lambda h: (h, None), lambda _, ct: (0.5 * ct,))
    return f(h)


KEEPS = [
    raw_identity,
    lambda h: eqg.replace_gradient(h, jnp.sin(h)),
    lambda h: jax.lax.cond(h[0] > 0, eqg.reverse_gradient, lambda h: h, h),
    lambda h: jnp.where(h > 0, h, jax.lax.stop_gradient(jax.jit(jax.checkpoint(_clipped))(h))),
]
CHANGES = [lambda h: 2 * h, jnp.zeros_like, lambda h: h[::-1]]


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"checkpoint": "replay"}, {"truncate": 4}], ids=str)
def test_carry_gradient(options):
    """The derivative of the function, and never its value."""
    for fn in KEEPS:
        got = gradient(tanh_step, carry_gradient=fn, **options)
        want = gradient(lambda h, x, fn=fn: tanh_step(fn(h), x), **options)
        assert_close(got, want)
    value = lambda **options: eqg.filter_scan(tanh_step, H, XS, **options)
    for fn in CHANGES:
        assert_close(value(carry_gradient=fn, **options), value())
        kept = lambda h, fn=fn: eqg.replace_gradient(h, fn(h))
        want = gradient(lambda h, x, kept=kept: tanh_step(kept(h), x), **options)
        assert_close(gradient(tanh_step, carry_gradient=fn, **options), want)


REPLAYED = {"checkpoint": "replay"}
IN_WINDOWS = [{"truncate": 8, **options} for options in ({}, {"checkpoint": 4}, REPLAYED)]


@pytest.mark.parametrize("options", [*IN_WINDOWS, REPLAYED], ids=str)
def test_half_precision_is_summed_in_single_precision(options):
    """One large term, and many that half precision would drop."""

    def loss(w):
        step = lambda h, x: (h, w * x)
        xs = jnp.ones(2048, w.dtype).at[-9].set(16384.0)  # the last window is apart
        return jnp.sum(eqg.filter_scan(step, w, xs, **options)[1].astype(jnp.float32))

    assert float(jax.grad(loss)(jnp.bfloat16(1.0))) == jnp.bfloat16(2047.0 + 16384.0)


# ---------------------------------------------------------------- branches and checkpoints


class Model(eqx.Module):
    weight: jax.Array
    name: str = eqx.field(static=True, default="a")
    _private = 0

    def __call__(self, x):
        return jnp.sum(self.weight @ x)


def test_numbers_that_branches_return():
    both = eqg.filter_cond(jnp.array(False), lambda: (1000, 2, 0.5), lambda: (999 + 1, 3, 0.25))
    assert both == (1000, 3, 0.25)
    assert isinstance(both[0], int)
    one, other = eqg.filter_cond(jnp.array(True), lambda: (1, 2), lambda: (1, 3))
    assert (type(one), isinstance(other, jax.Array)) == (int, True)
    with jax.disable_jit():
        assert eqg.filter_cond(True, lambda: (1, "a"), lambda: (2, "b")) == (1, "a")


def test_checkpoint_is_like_the_function():
    @eqg.filter_checkpoint
    def double(x, how: str = "twice"):
        """Twice."""
        return 2 * x, how

    assert (double.__name__, double.__doc__, double(H, how="so")[1]) == (
        "double",
        "Twice.",
        "so",
    )

    wrapped = eqg.filter_checkpoint(Model(WEIGHT))  # instead of a layer: attributes, and a tree
    assert wrapped.weight is WEIGHT
    for name in ("no_such", "_private"):
        with pytest.raises(AttributeError, match=name):
            getattr(wrapped, name)
    asked = []
    policy = lambda *_, **options: bool(asked.append(options))
    jax.grad(eqg.filter_checkpoint(jnp.sin, policy=policy))(1.0)
    assert asked or getattr(jax.config, "jax_remat3", False)  # which asks otherwise
    grads = eqx.filter_grad(lambda layers: layers[0](H))([wrapped])
    assert_close(jax.tree.leaves(grads), [jnp.broadcast_to(H, (3, 3))])


def test_a_counter_without_jit():
    """Without `jit`, a step may depend on values."""
    step = lambda state: (state[0] + 1, 2 * state[1] if state[1] > 0 else state[1])
    init = (0, jnp.array(1.5))
    with jax.disable_jit():
        scanned, _ = eqg.filter_scan(lambda c, _: (step(c), None), init, length=3)
        looped = eqg.filter_while_loop(lambda c: c[0] < 3, step, init)
    assert scanned == looped == (3, 12.0)
    # One varies only because the other does.
    assert eqg.filter_scan(lambda c, _: ((c[0] + 1, c[0]), None), (0, 0), length=3)[0] == (3, 2)


# ---------------------------------------------------------------- bounded loops


def _decay(x, n, **options):
    """`n` steps; after them, the body is not finite where it is not evaluated."""
    step = lambda c: (c[0] + 1, jnp.sqrt(n - c[0]) * jnp.sin(c[1]), jr.split(c[2])[0])
    init = (jnp.zeros_like(x), x, jr.key(0))
    return eqg.filter_while_loop(lambda c: c[0] < n, step, init, **options)[1]


def _decay_written_out(x, n):
    for i in range(n):
        x = jnp.sqrt(n - i) * jnp.sin(x)
    return x


@pytest.mark.parametrize("checkpoint", ["sqrt", 4, None])
def test_each_example_of_a_bounded_loop_has_its_own_length(checkpoint):
    lengths, xs = [0, 5, 13, 1, 7], jnp.linspace(0.1, 0.9, 5)
    options = {"max_steps": 13, "checkpoint": checkpoint}
    batch, ns = jax.vmap(lambda x, n: _decay(x, n, **options)), jnp.array(lengths, xs.dtype)
    each = [
        jax.value_and_grad(_decay_written_out)(*pair) for pair in zip(xs, lengths, strict=True)
    ]
    want = jax.tree.map(lambda *x: jnp.stack(x), *each)
    got = batch(xs, ns), jax.jit(jax.grad(lambda xs: jnp.sum(batch(xs, ns))))(xs)
    assert_close(got, want, eps=50)


def test_what_a_bounded_loop_does_not_differentiate():
    """The condition, which may call what has no derivative, and the body for an example that
    has ended before the first step."""
    stop = eqg.nondifferentiable
    loop = lambda x, bound: eqg.filter_while_loop(
        lambda y: (stop(y) > 0) & (y < stop(bound)), jnp.sqrt, x, max_steps=2
    )
    total = lambda xs, bound: jnp.sum(jax.vmap(lambda x: loop(x, bound))(xs))
    with checking_leaks():
        got = jax.jit(jax.grad(total, (0, 1)))(jnp.array([0.0, 0.25]), 0.5)
    assert_close(got, (jnp.ones(2), jnp.zeros(())))


def test_the_bound_of_a_bounded_loop():
    """After its end, a loop skips the chunks that are left."""
    loop = ft.partial(eqg.filter_while_loop, lambda x: x < 1e6, lambda x: 2 * x)
    for n in (0, 1, 5):
        run = ft.partial(loop, max_steps=n)
        assert jax.value_and_grad(run)(3.0) == (3.0 * 2**n, 2.0**n)

    calls = []
    step = lambda x: jax.debug.callback(calls.append, x) or x + 1
    loop = lambda x: eqg.filter_while_loop(lambda x: x < 3, step, x, max_steps=99, checkpoint=5)
    jax.block_until_ready(jax.jit(loop)(0.0))
    jax.effects_barrier()
    assert len(calls) == 5


def test_where_a_loop_has_ended_its_body_is_not_finite():
    step = lambda x: x - jnp.sqrt(x)
    loop = lambda x: eqg.filter_while_loop(lambda x: x > 0, step, x, max_steps=16)
    assert_close(jax.grad(loop)(4.0), jax.grad(lambda x: step(step(step(x))))(4.0))


def test_a_bounded_loop_across_a_named_axis():
    """Examples that go on see the last carry of the examples that have ended."""

    def run(x, loop):
        step = lambda c: 1.2 * c + 0.1 * jnp.sin(jax.lax.psum(c, "b"))
        return jax.vmap(lambda x: loop(lambda c: c < 10, step, x), axis_name="b")(x)

    x = jnp.array([0.5, 4.0, 20.0])
    bounded = lambda x: run(x, ft.partial(eqg.filter_while_loop, max_steps=50))
    unbounded = lambda x: run(x, eqg.filter_while_loop)
    assert_close(bounded(x), unbounded(x), eps=50)
    assert_close(jax.jacrev(bounded)(x), jax.jacfwd(unbounded)(x), eps=100)


@pytest.mark.parametrize("result", [None, (True,), 1.0, np.ones(3, bool)])
def test_a_condition_that_is_no_boolean(result):
    with pytest.raises(RuleError, match="`cond_fun` of `filter_while_loop`, did not return"):
        eqg.filter_while_loop(lambda x: result, lambda x: x, 1.0, max_steps=3)


# ---------------------------------------------------------------- map and recurrences


def test_map_of_keys_integers_and_nothing():
    keys = jr.split(jr.key(0), 7)
    draw = lambda key, i: (jr.normal(key, (2,)) + i.astype(FLOAT), key)
    got, same = eqg.filter_map(draw, keys, np.arange(7), chunk=3)
    np.testing.assert_array_equal(got, jax.vmap(draw)(keys, jnp.arange(7))[0])
    assert jnp.all(same == keys)
    assert eqg.filter_map(jnp.sin, jnp.zeros((0, 3))).shape == (0, 3)
    (n,) = export.symbolic_shape("n")
    types = jax.ShapeDtypeStruct((n, 3), FLOAT)
    program = export.export(jax.jit(lambda xs: eqg.filter_map(jnp.sin, xs)))(types)
    assert_close(program.call(XS), jnp.sin(XS))
    with pytest.raises(RuleError, match="can't divide a symbolic number of slices"):
        export.export(jax.jit(lambda xs: eqg.filter_map(jnp.sin, xs, chunk=2)))(types)


METHODS = ("scan", "associative")


@pytest.mark.parametrize("method", METHODS)
def test_recurrences_of_no_step_and_one_step(method):
    f = lambda a, b, h0: eqg.linear_recurrence(a, b, h0, method=method)
    grad = jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1, 2))
    none = jnp.zeros((0, 2)), jnp.zeros((0, 2)), jnp.ones(2)
    assert f(*none).shape == (0, 2)
    assert_close(grad(*none), (none[0], none[1], jnp.zeros(2)))
    one = (jnp.full((1, 2), 3.0), jnp.ones((1, 2)), jnp.full(2, 5.0))
    assert_close(f(*one), jnp.full((1, 2), 16.0))
    assert_close(grad(*one), (jnp.full((1, 2), 5.0), jnp.ones((1, 2)), jnp.full(2, 3.0)))


def _by_scan(a, b, h0, reverse=False):
    step = lambda h, x: 2 * (x[0] * h + x[1],)
    return jax.lax.scan(step, h0, (jnp.broadcast_to(a, b.shape), b), reverse=reverse)[1]


# A prime, and chunks of 20.
@pytest.mark.parametrize(("steps", "reverse"), [(29, True), (100, False)])
def test_chunks_of_unrolled_steps(steps, reverse, getkey):
    with jax.enable_x64(True):
        normal = lambda *shape: jr.normal(getkey(), shape, "float64")
        b, h0 = normal(steps, 3), normal(3)
        for a in (0.9 * jnp.tanh(normal(steps, 3)), 0.9 * jnp.tanh(normal(1, 3))):

            def all_of(f, a=a):
                value = lambda a, b, h0: jnp.sum(jnp.sin(f(a, b, h0, reverse=reverse)))
                return jax.jit(jax.value_and_grad(value, (0, 1, 2)))(a, b, h0)

            got = all_of(ft.partial(eqg.linear_recurrence, method="associative"))
            assert_close(got, all_of(_by_scan), tolerance=1e-12)


@pytest.mark.parametrize("steps", [1, 3])
def test_an_infinite_last_state_that_does_not_count(steps):
    """A gradient that is shared by examples or steps meets it, and must not."""
    b = jnp.array([[1.0, 3.0], [2.0, 5.0], [jnp.inf, jnp.nan]])
    total = lambda a: jnp.sum(eqg.linear_recurrence(a, b, method="scan")[:2])
    got = jax.grad(total)(jnp.full((steps, 1), 0.5))
    assert_close(got, jnp.array([[4.0]] if steps == 1 else [[0.0], [4.0], [0.0]]))


# ---------------------------------------------------------------- choices by platform


def bytes_kept(layer, xs):
    """By the derivative, for its backward pass."""
    arrays, static = eqx.partition(layer, eqx.is_array)
    pull_back = lambda arrays: jax.vjp(lambda a: eqx.combine(a, static)(xs)[0], arrays)[1]
    kept = jax.tree.leaves(jax.eval_shape(pull_back, arrays))
    return sum(x.size * x.dtype.itemsize for x in kept)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM])
def test_what_gated_cells_keep(make, platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    xs, options = jnp.ones((200, 4, 3)), {"time_major": True}
    gates, states, auto = (
        bytes_kept(make(3, 16, keep=keep, key=jr.key(0), **options), xs)
        for keep in ("gates", "states", "auto")
    )
    assert states < 0.5 * gates
    assert auto == {"cpu": gates, "gpu": states}[platform]
    cell = make(3, 16, key=jr.key(0)).cells[0][0]
    for checkpoint, expected in (("auto", auto), (None, gates), ("replay", states)):
        assert bytes_kept(nn.Recurrent(cell, checkpoint=checkpoint, **options), xs) == expected


@pytest.mark.usefixtures("gpu")
def test_a_linear_recurrence_without_a_loop():
    a, b = jr.uniform(jr.key(0), (1009, 3)), jr.normal(jr.key(1), (1009, 3))
    loss = lambda a, b: jnp.sum(jnp.sin(eqg.linear_recurrence(a, b)))
    for steps in (256, 1009):
        program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(a[:steps], b[:steps])
        assert " scan[" not in str(program)
        assert len(program.eqns) < 100  # calls
    h, expected = np.zeros(3), []
    for a_t, b_t in zip(np.asarray(a, "float64"), np.asarray(b, "float64"), strict=True):
        h = a_t * h + b_t
        expected.append(h)
    np.testing.assert_allclose(eqg.linear_recurrence(a, b), expected, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("cpu")
def test_the_chunk_of_a_loss(monkeypatch):
    x, weight = jr.normal(jr.key(0), (4096, 8)), jr.normal(jr.key(1), (1000, 8))
    labels = jnp.arange(4096) % 1000

    def value_and_program():
        loss = lambda x, w: eqg.losses.linear_cross_entropy(x, w, labels)
        gradient = jax.value_and_grad(loss, (0, 1))
        return jax.jit(gradient)(x, weight), str(jax.make_jaxpr(gradient)(x, weight))

    expected, in_chunks = value_and_program()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    got, at_once = value_and_program()
    assert (" scan[" in in_chunks, " scan[" in at_once) == (True, False)
    assert_close(got, expected, tolerance=1e-4)


# ---------------------------------------------------------------- memory


@pytest.mark.cost
def test_memory_of_a_scan():
    h, xs = jnp.zeros((8, 16)), jnp.ones((1024, 8, 16))
    step = lambda w: lambda h, x: (jnp.tanh(h @ w + x), None)
    last = lambda **options: jax.grad(
        lambda w: jnp.sum(eqg.filter_scan(step(w), h, xs, **options)[0])
    )
    plain = temp_bytes(last(), jnp.eye(16))
    for options, factor in (
        ({"checkpoint": "sqrt"}, 0.125),
        ({"truncate": 32}, 0.125),
        ({"checkpoint": "replay"}, 0.6),
        ({"checkpoint": "auto"}, 0.6),
    ):
        assert temp_bytes(last(**options), jnp.eye(16)) < factor * plain
    # XLA copied `xs`, as it gave the axis of length one another layout.
    xs = jnp.ones((200, 4096))
    step = lambda w: lambda c, x: (c + jnp.sum(jnp.tanh(jnp.tanh(w * x))), jnp.tanh(w * x))
    one = lambda w: eqg.filter_scan(step(w), jnp.array(0.0), xs, checkpoint=1)[0]
    assert temp_bytes(jax.grad(one), jnp.array(0.5)) < 2 * xs[0].nbytes


@pytest.mark.cost
@pytest.mark.parametrize("checkpoint", [None, "sqrt", "auto"])
def test_constant_memory(checkpoint):
    """A hundred thousand steps that are truncated need what a thousand need."""

    def needed(steps):
        def value(weight, xs):
            step = lambda h, x: (jnp.tanh(weight @ h + x), None)
            options = {"truncate": 50, "checkpoint": checkpoint}
            return jnp.sum(eqg.filter_scan(step, jnp.zeros(32), xs, **options)[0])

        return temp_bytes(jax.grad(value), jnp.eye(32), jnp.ones(steps))

    # But for the number of each step, and four bytes to hand it out in windows.
    assert needed(100_000) - needed(1000) <= 2 * 4 * 99_000


def test_memory_of_a_bounded_loop_and_of_a_map():
    """Weights are not among the residuals of each step, or chunk."""
    weight = jnp.ones((64, 64)) / 64

    def temporary(checkpoint):
        options = {"max_steps": 1024, "checkpoint": checkpoint}
        step = lambda w: lambda c: (c[0] + 1, jnp.tanh(w @ c[1]))
        loop = lambda w, x: eqg.filter_while_loop(
            lambda c: c[0] < 900, step(w), (0, x), **options
        )
        return temp_bytes(jax.grad(lambda w, x: jnp.sum(loop(w, x)[1])), weight, jnp.ones(64))

    # 32 carries, and the two arrays that 32 steps save, beside a few arrays like the weight.
    assert temporary("sqrt") < 3 * 32 * 64 * weight.dtype.itemsize + 6 * weight.nbytes
    assert temporary(256) > temporary(64) > temporary("sqrt")
    xs, mlp = jnp.ones((1024, 64)), lambda w: lambda x: jnp.sum(jnp.tanh(w @ jnp.tanh(w @ x)))
    of = lambda run: temp_bytes(jax.grad(lambda w: jnp.sum(run(mlp(w), xs))), weight)
    assert of(eqg.filter_map) < of(lambda f, xs: jax.vmap(f)(xs)) / 3


@pytest.mark.cost
def test_memory_of_a_linear_recurrence():
    """Its backward pass keeps only the states, and sums the gradient of shared factors."""
    b = jnp.ones((512, 64))
    total = lambda b: jnp.sum(jnp.sin(eqg.linear_recurrence(0.5, b, method="scan")))
    assert temp_bytes(jax.grad(total), b) < 2.5 * b.nbytes
    by_scan = lambda a, b: _by_scan(a, b, jnp.zeros(64))
    shared, constant, of_each = jnp.ones((512, 64)), jnp.ones((1, 64)), jnp.ones((16, 512, 64))
    for a, axis in ((shared, None), (constant, None), (of_each, 0)):
        batch = lambda f, a, x=axis: jnp.sum(
            jnp.sin(jax.vmap(f, (x, 0))(a, jnp.stack([b] * 16)))
        )
        ours, theirs = (
            jax.grad(ft.partial(batch, f)) for f in (eqg.linear_recurrence, by_scan)
        )
        assert temp_bytes(ours, a) < 0.7 * temp_bytes(theirs, a)


@pytest.mark.cost
@pytest.mark.parametrize("reverse", [False, True])
def test_a_linear_recurrence_writes_states_in_the_place_of_terms(reverse):
    """If a step read its term twice, XLA would copy the array in each step."""
    f = ft.partial(eqg.linear_recurrence, reverse=reverse, method="scan")
    gradient = jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b))), (0, 1))
    second = jax.grad(lambda a, b: sum(map(jnp.sum, gradient(a, b))), (0, 1))
    for program in (gradient, second):
        text = jax.jit(program).lower(*jnp.ones((2, 512, 64))).compile().as_text()
        in_loops = text.split("ENTRY")[0].splitlines()
        assert not [line for line in in_loops if " copy(" in line and "[512,64]" in line]
