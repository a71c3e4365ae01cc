"""Every op and layer over eight devices under `jit`: the numbers of one device, and no more
communication than the same function without a rule."""

import functools as ft
import re

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads.nn._recurrent.states import zero_states
from eqx_grads.testing._subject import is_output
from eqx_grads.testing._without_rules import without_rules
from jax.sharding import PartitionSpec as Spec

from .cases import CASES
from .many_devices import (
    collectives,
    data_of,
    EXPLICIT_MESH,
    is_of_vectors,
    MESH,
    over_batch,
    over_features,
    put,
    subject_of,
)


@pytest.fixture(autouse=True, scope="module")
def _forget():
    yield
    jax.clear_caches()


# `psum_gradient` is for `shard_map`, and has tests there. The arguments of a call on the host
# have to be gathered: see the page "Many devices".
CALLS_THE_HOST = r"host_function|linear_host_function|tap_gradient|watch_gradient"
JITTED = [n for n in CASES if not re.match(rf"psum_gradient|{CALLS_THE_HOST}", n)]

# How many more arrays are summed over the devices than there are replicated parameters.
MORE_SUMS = {
    # The terms of a cotangent are summed one by one.
    "event_time": 2,
    "jump": 3,
    "nn.LIFCell": 1,
    "surrogates.superspike": 6,
    # The condition of the loop, and whether and how a solver failed.
    **{n: 22 for n in CASES if re.match("fixed_point|nn.FixedPoint|implicit", n)},
    # A gradient that is summed in each step, as `jax.lax.scan` does.
    "filter_scan": 4,
    "nn.Recurrent": 8,
    # And the condition of the loop, for each chunk, forward and backward.
    "filter_while_loop": 5,
    # And for each chunk.
    "filter_map": 2,
    "losses.chunked": 9,
    # In forward mode too.
    "nn.FakeQuantize": 1,
    "ste.fake_quantize": 1,
}
# Two tokens at a time can't be distributed over eight devices: tested below.
CHUNKS_OF_TWO = {n for n in CASES if re.match("losses.linear|nn.Linear", n)}


def _some_are_slow(names):
    """Two thirds of the functions that are not layers: most of these work element by element,
    which XLA distributes in one way."""
    names = list(names)
    functions = [n for n in names if not n.startswith("nn.")]
    quick = {*functions[::3], *(n for n in names if n.startswith("nn."))}
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.thorough
@pytest.mark.every(4)
@pytest.mark.parametrize("name", _some_are_slow(n for n in JITTED if n not in CHUNKS_OF_TWO))
def test_each_device_has_its_examples(name):
    """Nothing is gathered or moved, and the gradient of a parameter is summed once."""
    subject = subject_of(CASES[name])
    setting = over_batch(subject.arrays, subject.leaves, data_of(subject))
    args = setting.distributed()
    program = jax.jit(setting.both).lower(*args).compile()
    eqgt.assert_trees_close(program(*args), jax.jit(setting.both)(*setting.args))
    counts = collectives(program)
    assert counts["gathers"] == counts["moves"] == 0
    most = setting.n_replicated + MORE_SUMS.get(name, 0)
    if counts["sums"] > most and "reference" in CASES[name].options:
        # An entry of several calls: no more sums than the function without the library has.
        most = max(most, _sums_of_reference(CASES[name]))
    assert counts["sums"] <= most


def _sums_of_reference(case):
    _, args = case.make()
    subject = subject_of(case._replace(make=lambda: (case.options["reference"], args)))
    setting = over_batch(subject.arrays, subject.leaves, data_of(subject))
    program = jax.jit(setting.both).lower(*setting.distributed()).compile()
    return collectives(program)["sums"]


def _assert_no_more(got, expected, kinds=("gathers", "sums", "moves")):
    got, expected = collectives(got), collectives(expected)
    assert all(got[kind] <= expected[kind] for kind in kinds), (got, expected)


# ---------------------------------------------------------------- against the function alone


# Not functions of vectors of any length.
OF_FIXED_LENGTH = (
    "event_time|jump|fixed_point|nn.FixedPoint|implicit|mask_gradient|nondifferentiable|"
    "nn.FSQ|ste.fsq|ste.vector_quantize|filter_scan: online|nn..*Cell"
)
OVER_FEATURES = [n for n in JITTED if not re.match(OF_FIXED_LENGTH, n)]

OWN_SUMS = {
    # The derivative is that of another function on purpose, and is computed from these: the
    # norm of the cotangent, with its largest element so that no square overflows.
    "clip_gradient_norm": 2,
    "normalize_gradient": 2,
    # A softmax with a temperature, which the function that stands for it leaves out.
    "ste.reinmax": 2,
    # It bisects, with one sum for each of 80 steps; its reference takes 20 steps of Newton's
    # method, with three for each. The derivative has a softmax besides.
    "ste.top_k": 24,
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize("name", OVER_FEATURES)
def test_features_over_devices(name, mode):
    case = CASES[name]
    subject = subject_of(case)
    if not is_of_vectors(subject):
        pytest.skip("no vector")
    setting = over_features(subject.arrays, subject.leaves)
    args = setting.distributed()
    derive = getattr(setting, mode)
    program = jax.jit(derive).lower(*args).compile()
    eqgt.assert_trees_close(program(*args), jax.jit(derive)(*setting.args))
    plain = over_features(_plain(case, subject), subject.leaves)
    expected = collectives(jax.jit(getattr(plain, mode)).lower(*args).compile())
    got = collectives(program)
    assert got["gathers"] <= expected["gathers"]
    assert got["moves"] <= expected["moves"]
    assert got["sums"] <= expected["sums"] + OWN_SUMS.get(name, 0)


def _plain(case, subject):
    """The value of the function, with the derivative of the function that stands for it."""
    reference = case.options.get("reference")
    plain = without_rules(subject.arrays)
    if reference is None or -1 in subject.groups:
        return plain

    def with_derivative_of_reference(*leaves):
        _, args = subject.tree(leaves)
        smooth = [x for x in jax.tree.leaves(reference(*args)) if is_output(x)]
        values = map(jax.lax.stop_gradient, plain(*leaves))
        pairs = zip(values, smooth, strict=False)
        return [y + (s - jax.lax.stop_gradient(s)) for y, s in pairs]

    return with_derivative_of_reference


# ---------------------------------------------------------------- recurrent layers


TIME, BATCH, IN, HIDDEN = 6, 16, 16, 32


def _layer(name, **options):
    return lambda key: getattr(eqg.nn, name)(IN, HIDDEN, time_major=True, key=key, **options)


def _any_cell(checkpoint):
    def make(key):
        cell = eqx.nn.GRUCell(IN, HIDDEN, key=key)
        return eqg.nn.Recurrent(cell, checkpoint=checkpoint, time_major=True)

    return make


LAYERS = {
    "GRU": _layer("GRU"),
    "GRU that keeps states": _layer("GRU", keep="states"),
    "LSTM": _layer("LSTM"),
    "RNN": _layer("RNN"),
    "Recurrent": _any_cell("auto"),
    "Recurrent, replayed": _any_cell("replay"),
    "Recurrent, in chunks": _any_cell(2),
    "LIF": _layer("LIF", beta=0.9),
    "LIF, adaptive": _layer("LIF", beta=0.9, rho=0.5, learn=("beta", "rho")),
    "LIF, current": _layer("LIF", beta=0.9, alpha=0.5),
    "LI": _layer("LI", beta=0.9),
    "LIF, recurrent": _layer("LIF", beta=0.9, recurrent=True),
}
# Over time at once: no cell of one step.
LINEAR_LAYERS = {
    "LRU": lambda key: eqg.nn.LRU(IN, IN, HIDDEN, time_major=True, key=key),
    "S5": lambda key: eqg.nn.S5(IN, IN, HIDDEN, time_major=True, key=key),
    "MinGRU": _layer("MinGRU"),
    "MinLSTM": _layer("MinLSTM"),
}
OTHERS = {
    "LSTM with a projection": _layer("LSTM", proj_size=16),
    "two layers in two directions": _layer("GRU", num_layers=2, bidirectional=True),
    "learned state": _layer("GRU", learn_initial_state=True),
    "GatedDeltaNet": lambda key: eqg.nn.GatedDeltaNet(
        IN, HIDDEN, heads=2, key_size=4, time_major=True, key=key
    ),
    "SelectiveSSM": lambda key: eqg.nn.SelectiveSSM(
        IN, HIDDEN, 2 * IN, time_major=True, key=key
    ),
}
QUICK = ("GRU", "LSTM", "LIF")


def _quick_first(names):
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


# How `(time, batch, in)`, the weights and the outputs are distributed.
SETTINGS = {
    "batch": (Spec(None, "i"), Spec(), Spec(None, "i")),
    "features": (Spec(None, None, "i"), Spec(), Spec()),
    "hidden": (Spec(), Spec("i"), Spec(None, None, "i")),
}


def _of_cell(layer):
    """The layer as a `jax.lax.scan` of its cell."""
    cell = layer.cells[0][0]
    zero = layer.initial_state
    zero = zero_states("", layer.cells) if zero is None else zero

    def run(xs):
        step = lambda h, x: (lambda new: (new, jax.tree.leaves(new)[0]))(jax.vmap(cell)(x, h))
        first = jax.tree.map(lambda s: jnp.broadcast_to(s[None], (BATCH, *s.shape)), zero)
        return jax.lax.scan(step, first, xs)[1]

    return run


def _of_layer(layer):
    return lambda xs: layer(xs)[0]


def _without_rules(layer):
    return lambda xs: without_rules(lambda xs: [layer(xs)[0]])(xs)[0]


def _programs(static, run):
    """In forward mode and in reverse mode, of the parameters and the inputs."""

    def outputs(params, xs):
        return run(eqx.combine(params, static))(xs)

    def forward(params, xs, _):
        return jax.jvp(outputs, (params, xs), (params, xs))

    def reverse(params, xs, ct):
        ys, pull_back = jax.vjp(outputs, params, xs)
        return ys, pull_back(ct)

    return jax.jit(forward), jax.jit(reverse)


def _arguments(make, setting):
    """Of one device, and of many; and what is no array."""
    of_xs, of_weight, of_ys = SETTINGS[setting]
    params, static = eqx.partition(make(jr.key(0)), eqx.is_inexact_array)
    xs = jr.normal(jr.key(1), (TIME, BATCH, IN))
    ys = jax.eval_shape(lambda p: eqx.combine(p, static)(xs)[0], params)
    ct = jr.normal(jr.key(2), ys.shape)
    is_wide = lambda x: x.ndim > 0 and x.shape[0] % 8 == 0
    weights = jax.tree.map(lambda x: put(x, of_weight if is_wide(x) else Spec()), params)
    return (params, xs, ct), (weights, put(xs, of_xs), put(ct, of_ys)), static


# What a backward pass computes again needs the sums over features again.
RECOMPUTED = {"GRU that keeps states", "Recurrent, replayed", "Recurrent, in chunks"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    ["batch", *(pytest.param(s, marks=pytest.mark.slow) for s in ("features", "hidden"))],
)
@pytest.mark.parametrize("name", _quick_first([*LAYERS, *LINEAR_LAYERS]))
def test_no_more_than_a_scan(name, setting):
    one, many, static = _arguments({**LAYERS, **LINEAR_LAYERS}[name], setting)
    forward, reverse = _programs(static, _of_layer)
    plain = _of_cell if name in LAYERS else _without_rules
    _, plain_reverse = _programs(static, plain)
    program = reverse.lower(*many).compile()
    eqgt.assert_trees_close(program(*many), reverse(*one), tolerance=1e-5)
    eqgt.assert_trees_close(forward(*many), forward(*one), tolerance=1e-5)
    expected = plain_reverse.lower(*many).compile()
    if setting == "batch":
        got = collectives(program)
        assert got["gathers"] == got["moves"] == 0
        # A scan sums the gradient of each parameter in each step.
        assert got["sums"] <= collectives(expected)["sums"]
        if name != "Recurrent" and name != "Recurrent, in chunks":
            assert got["sums"] <= len(jax.tree.leaves(one[0]))
    elif name in RECOMPUTED:
        got, expected = collectives(program), collectives(expected)
        assert got.total() <= 2 * expected.total()
    else:
        _assert_no_more(program, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", _quick_first([*LAYERS, *LINEAR_LAYERS, *OTHERS]))
def test_batch_over_an_explicit_axis(name):
    """Types say how arrays are distributed, and that of the carry of a loop never changes."""
    make = {**LAYERS, **LINEAR_LAYERS, **OTHERS}[name]
    (params, xs, ct), _, static = _arguments(make, "batch")
    forward, reverse = _programs(static, _of_layer)
    expected = reverse(params, xs, ct), forward(params, xs, ct)
    with jax.set_mesh(EXPLICIT_MESH):
        spec = Spec(None, "i")
        many = params, put(xs, spec, EXPLICIT_MESH), put(ct, spec, EXPLICIT_MESH)
        got = reverse(*many), forward(*many)
        assert jax.typeof(got[0][0]).sharding.spec == Spec(None, "i", None)
    eqgt.assert_trees_close(got, expected, tolerance=1e-5)


# ---------------------------------------------------------------- calls of the host


def _on_host(x, vmap_method):
    of_host = eqg.host_function(_sine, out=lambda x: x, vmap_method=vmap_method)
    return of_host(x)


def _sine(x):
    return np.sin(x)


def _as_callback(x, vmap_method):
    return jax.pure_callback(_sine, jax.typeof(x), x, vmap_method=vmap_method)


def _nothing(x):
    del x


def _tapped(x):
    return jax.vjp(lambda x: eqg.tap_gradient(x, _nothing), x)[1](x)


def _debugged(x):
    jax.debug.callback(_nothing, x)
    return x


@pytest.mark.parametrize("batched", [False, True])
def test_calls_of_the_host_gather_as_a_callback_does(batched):
    x = put(jnp.ones((16, 3)), Spec("i"))
    of_method = [ft.partial(fn, vmap_method="sequential") for fn in (_on_host, _as_callback)]
    for fn, plain in (of_method, (_tapped, _debugged)):
        fns = [jax.vmap(f) if batched else f for f in (fn, plain)]
        _assert_no_more(*(jax.jit(f).lower(x).compile() for f in fns))


# ---------------------------------------------------------------- a loss in chunks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "chunk"), [(128, 32), (128, 48), pytest.param(96, 20, marks=pytest.mark.slow)]
)
def test_chunks_of_tokens_are_not_gathered(tokens, chunk):
    """The tokens of a chunk are distributed as all are, also if the chunk has to be shorter."""
    x, weight = jr.normal(jr.key(0), (tokens, 8)), jr.normal(jr.key(1), (24, 8))
    labels = jnp.arange(tokens) % 24

    def loss(weight, x, labels):
        return eqg.losses.linear_cross_entropy(x, weight, labels, chunk=chunk)

    of_weight = jax.jit(jax.value_and_grad(loss, (0, 1)))
    args = weight, put(x, Spec("i")), put(labels, Spec("i"))
    program = of_weight.lower(*args).compile()
    eqgt.assert_trees_close(program(*args), of_weight(weight, x, labels))
    counts = collectives(program)
    assert counts["gathers"] == counts["moves"] == 0
    # The gradient of the weight, for each of at most twice as many chunks as needed.
    assert counts["sums"] <= 3 + 2 * (-(-tokens // chunk))


# ---------------------------------------------------------------- the count itself


@pytest.mark.thorough
def test_collectives_are_counted():
    def program(w, xs):
        step = lambda total, x: (total + jax.nn.tanh(x @ w), None)
        return jax.lax.scan(step, jnp.zeros((8, 8)), xs)[0]

    w, xs = put(jnp.ones((8, 8)), Spec("i")), put(jnp.ones((5, 8, 8)), Spec(None, None, "i"))
    in_loop = collectives(jax.jit(program).lower(w, xs).compile())
    assert in_loop["sums"] == 5
    assert in_loop["gathers"] == 0
    gather = jax.jit(lambda x: x, out_shardings=jax.NamedSharding(MESH, Spec()))
    assert collectives(gather.lower(w).compile())["gathers"] == 1
    move = jax.jit(lambda x: x, out_shardings=jax.NamedSharding(MESH, Spec(None, "i")))
    assert collectives(move.lower(w).compile())["moves"] > 0
