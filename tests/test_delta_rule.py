"""The gated delta rule against a plain scan of its equation, step by step, in float64."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from .helpers import assert_close, checking_leaks


pytestmark = pytest.mark.versions


def plain(q, k, v, beta, decay, state, delta=True, reverse=False):
    """One head: `S = exp(g) S`, then `S = S + beta k (v - S^T k)^T`, as flash-linear-attention
    publishes the recurrence."""

    def step(s, x):
        q, k, v, beta, g = x
        s = jnp.exp(g) * s
        s = s + beta * jnp.outer(k, v - k @ s if delta else v)
        return s, q @ s

    last, out = jax.lax.scan(step, state, (q, k, v, beta, decay), reverse=reverse)
    return out, last


def ours(*args, **options):
    *args, state = args
    return eqg.gated_delta_rule(*args, state=state, **options)


DECAYS = {
    "near one": lambda n: -1e-3 * n**2,
    "usual": lambda n: -0.3 * n**2,
    "near zero": lambda n: -30.0 - n,
    "both": lambda n: np.where(n > 0, -40.0, -1e-3),
    "none": lambda n: 0 * n,
}


def inputs(steps, *, heads=(), key=4, value=3, decay="usual", beta="any", repeated=False):
    rng = np.random.default_rng(steps)
    normal = lambda *shape: rng.normal(size=(steps, *heads, *shape))
    q, k, v = normal(key), normal(key), normal(value)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    if repeated:
        k[1::2] = k[:1]
    betas = {"any": 1 / (1 + np.exp(-normal())), "zero": np.zeros((steps, *heads))}
    betas["one"] = np.ones((steps, *heads))
    betas["both"] = np.round(betas["any"])
    g = DECAYS[decay](normal())
    return [*map(jnp.asarray, (q, k, v, betas[beta], g, rng.normal(size=(*heads, key, value))))]


def derivatives(fn, args, seed=0):
    """The outputs, and the cotangents of all arguments."""
    out, pull = jax.vjp(fn, *args)
    cts = [jr.normal(jr.key(seed + i), x.shape, x.dtype) for i, x in enumerate(out)]
    return out, pull(tuple(cts))


def assert_same(fn, reference, args, tolerance=1e-10):
    """To the tolerance of the largest entry of each array."""
    got, want = (jax.jit(ft.partial(derivatives, f))(args) for f in (fn, reference))
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        bound = tolerance * max(1e-30, float(jnp.max(jnp.abs(y))))
        assert float(jnp.max(jnp.abs(x - y))) <= bound, (x, y)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "steps", [1, 5, 64, 100, pytest.param(2048, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("decay", DECAYS)
def test_value_and_gradients(steps, decay):
    args = inputs(steps, decay=decay, beta="both" if decay == "both" else "any")
    assert_same(ours, plain, args)


@pytest.mark.parametrize("beta", ["zero", "one", "both"])
@pytest.mark.parametrize("delta", [True, False])
def test_betas_and_repeated_keys(beta, delta):
    args = inputs(70, beta=beta, repeated=True, decay="near one")
    assert_same(ft.partial(ours, delta=delta), ft.partial(plain, delta=delta), args)


@pytest.mark.parametrize("chunk", [1, 2, 7, 33, 100, 1000])
@pytest.mark.parametrize("reverse", [False, True])
def test_any_chunk(chunk, reverse):
    reference = ft.partial(plain, reverse=reverse)
    assert_same(ft.partial(ours, chunk=chunk, reverse=reverse), reference, inputs(100))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lower_precision(dtype):
    """Sums are in single precision: the error is of rounding inputs and outputs."""
    args = [x.astype(dtype) for x in inputs(300, decay="near one", key=16, value=8)[:5]]
    state = inputs(300, key=16, value=8)[5].astype(jnp.float32)
    exact = [x.astype(float) for x in (*args, state)]
    (out, last), pull = jax.vjp(ours, *args, state)
    cts = jnp.ones_like(out), jnp.ones_like(last)
    want, pull_exact = jax.vjp(plain, *exact)
    tolerance = max(1e-5, 2 * float(jnp.finfo(dtype).eps))
    pairs = [(out, want[0]), (last, want[1])]
    pairs += zip(pull(cts), pull_exact(tuple(x.astype(float) for x in cts)), strict=True)
    for x, y in pairs:
        assert jnp.max(jnp.abs(x.astype(float) - y)) <= tolerance * jnp.max(jnp.abs(y))
    assert (out.dtype, last.dtype) == (args[0].dtype, jnp.float32)
    assert eqg.gated_delta_rule(*args[:3], 1.0)[1].dtype == jnp.float32


def test_a_reset():
    """A decay of minus infinity clears the state."""
    *args, decay, state = inputs(40)
    decay = decay.at[17].set(-jnp.inf)
    assert_same(ours, plain, [*args, decay, state])


@pytest.mark.parametrize("inside", [False, True])
def test_batches(inside):
    """As leading axes, under `jax.vmap`, and with shared arguments under `jax.vmap`."""
    args = inputs(40, heads=(2, 3))
    axes = (1, 1, 1, 1, 1, 0)
    over = lambda fn, axes: jax.vmap(fn, axes, (1, 0))
    reference = over(over(plain, axes), axes)
    assert_same(ours if inside else over(over(ours, axes), axes), reference, args)
    shared = [args[0][:, 0], args[1], args[2][:, 0], args[3], args[4][:, 0], args[5][0]]
    axes = (None, 1, None, 1, None, None)
    every = (1, 1, 1, 1, 1, 0)
    assert_same(over(ours, axes), over(over(plain, every), axes), shared)


def test_arguments_broadcast():
    q, k, v, beta, g, state = inputs(40, heads=(2,))
    fn = lambda q, v, g, s: ours(q, k[:, :1], v, 0.7, g, s, scale=0.5)

    def reference(q, v, g, s):
        k2, beta = jnp.broadcast_to(k[:, :1], k.shape), jnp.full(k.shape[:-1], 0.7)
        g, s = jnp.broadcast_to(g, beta.shape), jnp.broadcast_to(s, state.shape)
        out, last = jax.vmap(plain, (1, 1, 1, 1, 1, 0), (1, 0))(q, k2, v, beta, g, s)
        return 0.5 * out, last

    assert_same(fn, reference, [q, v, g[:1, :1], state[0]])
    out, last = eqg.gated_delta_rule(q, k, v, beta)
    want = jax.vmap(plain, (1, 1, 1, 1, 1, 0), (1, 0))(q, k, v, beta, 0 * g, 0 * state)
    assert_close((out, last), want)


@pytest.mark.parametrize("reverse", [False, True])
def test_lengths(reverse):
    """Padding may hold anything, and counts for nothing."""
    args, lengths = inputs(50, heads=(3, 2)), [50, 7, 0]
    fn = lambda *args: ours(*args, lengths=lengths, reverse=reverse)
    bad = [x.at[20:, 1].set(jnp.nan) for x in args[:5]]
    assert_close(derivatives(fn, args)[0], derivatives(fn, [*bad, args[5]])[0])
    cts = derivatives(fn, [*bad, args[5]])[1]
    for i, n in enumerate(lengths):
        part = [*(x[:n, i] for x in args[:5]), args[5][i]]
        rule = lambda *args: ours(*args, reverse=reverse)
        out, last = jax.vmap(ft.partial(plain, reverse=reverse), (1, 1, 1, 1, 1, 0), (1, 0))(
            *part
        )
        got = fn(*bad, args[5])
        assert_close((got[0][:n, i], got[1][i]), (out, last))
        assert not jnp.any(got[0][n:, i])
        assert all(not jnp.any(ct[n:, i]) for ct in cts[:5])
        assert n > 0 or jnp.array_equal(rule(*part)[1], args[5][i])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("of", ["delta rule", "selective scan"])
def test_infinite_cotangents_of_padding(of, reverse):
    """As of a loss that divides by an output: no gradient passes."""
    x, step, a, b, c, state = selective_inputs(float, (2,))
    options = {"lengths": [9, 4], "reverse": reverse}
    if of == "delta rule":
        decay = -jnp.ones((9, 2)).at[4:, 1].set(jnp.nan)
        args = [x, step, b, jnp.ones((9, 2)), decay, state]
        fn = lambda *args: ours(*args, **options)
    else:
        args = [x.at[4:, 1].set(jnp.nan), step, a, b, c, state]
        fn = lambda *args: eqg.selective_scan(*args[:5], state=args[5], **options)
    (out, last), pull = jax.vjp(fn, *args)
    ones = jnp.ones_like(out)
    got = pull((ones.at[4:, 1].set(jnp.inf), last))
    assert_close(got, pull((ones.at[4:, 1].set(0.0), last)))
    assert all(bool(jnp.all(jnp.isfinite(ct))) for ct in got)


@pytest.mark.parametrize("delta", [True, False])
def test_other_modes(delta):
    """Forward mode, and all second orders, against autodiff of the plain scan."""
    args = inputs(11, key=3, value=2)
    ts = tuple(jr.normal(jr.key(i), x.shape, x.dtype) for i, x in enumerate(args))

    def program(fn):
        curved = lambda *args: sum(jnp.sum(jnp.sin(x)) for x in fn(*args))
        forward = lambda *args: jax.jvp(curved, args, ts)[1]
        reverse = lambda *args: sum(map(jnp.vdot, jax.grad(curved, range(6))(*args), ts))
        seconds = [jax.grad(f, range(6))(*args) for f in (forward, reverse)]
        seconds += [jax.jvp(f, tuple(args), ts)[1] for f in (forward, reverse)]
        return jax.jvp(fn, tuple(args), ts)[1], seconds

    run = lambda fn, **options: jax.jit(lambda: program(ft.partial(fn, **options)))()
    assert_close(run(ours, delta=delta, chunk=4), run(plain, delta=delta), tolerance=1e-9)


def test_no_leaks():
    args = inputs(9)
    with checking_leaks():
        jax.jit(jax.grad(lambda *args: jnp.sum(ours(*args)[0]), range(6)))(*args)


@pytest.mark.thorough
def test_the_rule_passes_its_check():
    eqgt.check_rule(ft.partial(ours, chunk=2), *inputs(3, key=2, value=1))


def test_memory_grows_with_the_number_of_chunks():
    """Reverse mode keeps one state per chunk, where the plain scan keeps one per step."""
    shapes = [(1024, 64), (1024, 64), (1024, 64), (1024,), (1024,), (64, 64)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def temporary(fn):
        loss = lambda *args: jnp.sum(fn(*args)[0] ** 2)
        compiled = jax.jit(jax.grad(loss, range(5))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(ours) < 0.2 * temporary(plain)


RULE = {
    "decay": lambda x: eqg.gated_delta_rule(x, x, x, 1.0, 1j),
    "fit together": lambda x: eqg.gated_delta_rule(x, x[:, :1], x, 1.0),
    "`beta` is float64.3,1.": lambda x: eqg.gated_delta_rule(x, x, x, jnp.ones((3, 1))),
    "`v` is float64.2.": lambda x: eqg.gated_delta_rule(x, x, x[0], 1.0),
    "`decay` is float64.3.": lambda x: eqg.gated_delta_rule(*3 * (x[:, None],), 1.0, x[:, 0]),
    "chunk": lambda x: eqg.gated_delta_rule(x, x, x, 1.0, chunk=0),
    "lengths": lambda x: eqg.gated_delta_rule(x, x, x, 1.0, lengths=[3]),
    "`lengths` are from 9 to 9": lambda x: eqg.selective_scan(
        *2 * (x[:, None],), x[:2], *2 * (x[:, None],), lengths=[9]
    ),
    # Only what was given.
    r"`beta` is float64\[\]\n`q` and": lambda x: eqg.gated_delta_rule(x, x, x[0], 1.0),
    r"`c` is float64.3,2.\n`x` and": lambda x: eqg.selective_scan(x, x, x[:1], x, x),
    "state": lambda x: eqg.gated_delta_rule(x, x, x, 1.0, state=jnp.ones((3, 2))),
    "`step` of": lambda x: eqg.selective_scan(x, "x", x, x, x),
    "of `selective_scan` do": lambda x: eqg.selective_scan(x, x, x[:1], x, x),
}


@pytest.mark.parametrize("text", RULE)
def test_errors(text):
    with pytest.raises(eqg.RuleError, match=text):
        RULE[text](jnp.ones((3, 2)))


@pytest.mark.parametrize("shape", [(5, 0, 2), (5, 1, 0)])
def test_no_numbers(shape):
    x = jnp.ones(shape)
    out, pull = jax.vjp(lambda x: eqg.gated_delta_rule(x, x, x, 1.0, chunk=2), x)
    assert [y.shape for y in out] == [shape, (shape[1], shape[2], shape[2])]
    assert pull(out)[0].shape == shape


def test_no_steps():
    out, last = eqg.gated_delta_rule(*(jnp.ones((0, n)) for n in (2, 2, 3)), 1.0)
    assert out.shape == (0, 3)
    assert not jnp.any(last)


# ---------------------------------------------------------------- the selective scan


def s6(x, step, a, b, c, state, reverse=False):
    """Gu and Dao (2023), one example, in a plain scan."""

    def run(h, of):
        x, step, b, c = of
        x, step = x.astype(a.dtype), step.astype(a.dtype)
        h = jnp.exp(step[:, None] * a) * h + (step * x)[:, None] * b[None]
        return h, jnp.real(h @ c)

    last, y = jax.lax.scan(run, state, (x, step, b, c), reverse=reverse)
    return y, last


def selective_inputs(dtype, batch=()):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape)
    a = -np.exp(normal(3, 4)) + (1j * normal(3, 4) if dtype is complex else 0)
    b, c, state = (
        normal(*shape, 4).astype(dtype) for shape in ((9, *batch),) * 2 + ((*batch, 3),)
    )
    args = normal(9, *batch, 3), np.exp(normal(9, *batch, 3)), a, b, c, state
    return [*map(jnp.asarray, args)]


@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("method", ["scan", "associative"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_selective_scan(dtype, method, reverse):
    fn = lambda *args: eqg.selective_scan(
        *args[:5], state=args[5], method=method, reverse=reverse
    )
    assert_same(fn, ft.partial(s6, reverse=reverse), selective_inputs(dtype))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_padded_selective_scan(reverse):
    x, step, a, b, c, state = selective_inputs(float, (2,))
    run = lambda x, step, b, c: eqg.selective_scan(
        x, step, a, b, c, state=state, lengths=[9, 4], reverse=reverse
    )
    y, last = run(*(x.at[4:, 1].set(jnp.nan) for x in (x, step, b, c)))
    for i, n in enumerate([9, 4]):
        part = x[:n, i], step[:n, i], a, b[:n, i], c[:n, i], state[i]
        assert_close((y[:n, i], last[i]), s6(*part, reverse=reverse))
    assert not jnp.any(y[4:, 1])


# ---------------------------------------------------------------- layers

LAYERS = {
    "GatedDeltaNet": lambda **options: eqg.nn.GatedDeltaNet(
        3, 4, heads=2, key_size=4, value_size=3, key=jr.key(0), **options
    ),
    "SelectiveSSM": lambda **options: eqg.nn.SelectiveSSM(3, 4, 6, key=jr.key(0), **options),
    "GRU": lambda **options: eqg.nn.GRU(3, 4, key=jr.key(0), **options),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("time_major", [False, True])
def test_single_steps(name, time_major):
    """Step by step from a state, as in generation, the numbers are the same."""
    layer = LAYERS[name](num_layers=2, time_major=time_major, dtype=jnp.float64)
    xs = jr.normal(jr.key(1), (9, 2, 3))
    in_layout = (lambda x: x) if time_major else (lambda x: jnp.swapaxes(x, 0, 1))
    ys, last = layer(in_layout(xs))
    _, state = layer(in_layout(xs[:5]))
    for t in range(5, 9):
        y, state = eqx.filter_jit(layer.step)(xs[t], state)
        assert_close(y, in_layout(ys)[t], tolerance=1e-12)
    assert_close(state, last, tolerance=1e-12)
    one, _ = layer.step(xs[0, 0])
    assert_close(one, in_layout(ys)[0, 0], tolerance=1e-12)


@pytest.mark.parametrize("name", ["GatedDeltaNet", "SelectiveSSM"])
def test_layers_in_half_precision(name):
    layer = LAYERS[name](dtype=jnp.bfloat16)
    xs = jr.normal(jr.key(1), (40, 3), jnp.bfloat16)
    grads = eqx.filter_grad(lambda layer: jnp.sum(layer(xs)[0].astype(float)))(layer)
    ys, state = layer(xs)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_array(x) else x, layer)
    assert ys.dtype == jnp.bfloat16
    assert all(s.dtype == jnp.float32 for s in state)
    assert_close(ys.astype(jnp.float32), wide(xs.astype(jnp.float32))[0], tolerance=0.02)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", ["GatedDeltaNet", "SelectiveSSM"])
def test_empty_sequences(name):
    layer = LAYERS[name](bidirectional=True)
    ys, state = layer(jnp.ones((0, 3)))
    assert ys.shape == (0, 8)
    assert_close(state, layer(jnp.ones((2, 3)), lengths=0)[1])
