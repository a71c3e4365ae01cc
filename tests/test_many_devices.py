"""Every op and layer over eight devices under `jit`: the numbers of one device, and no more
communication than the same function without a rule."""

import re

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads.nn._recurrent.states import zero_states
from eqx_grads.testing._without_rules import without_rules
from jax.sharding import PartitionSpec as Spec

from .cases import CASES
from .many_devices import (
    collectives,
    data_of,
    EXPLICIT_MESH,
    MESH,
    over_batch,
    put,
    subject_of,
)


pytestmark = pytest.mark.versions


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
    """Two thirds of the functions that are not layers: most work element by element,
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
    "LSTM": _layer("LSTM"),
    "Recurrent": _any_cell("auto"),
    "Recurrent, replayed": _any_cell("replay"),
    "LIF": _layer("LIF", beta=0.9, rho=0.5, learn=("beta", "rho")),
}
# Over time at once: no cell of one step.
LINEAR_LAYERS = {
    "LRU": lambda key: eqg.nn.LRU(IN, IN, HIDDEN, time_major=True, key=key),
    "MinGRU": _layer("MinGRU"),
}
OTHERS = {
    "two layers in two directions": _layer("GRU", num_layers=2, bidirectional=True),
    "GatedDeltaNet": lambda key: eqg.nn.GatedDeltaNet(
        IN, HIDDEN, heads=2, key_size=4, time_major=True, key=key
    ),
    "SelectiveSSM": lambda key: eqg.nn.SelectiveSSM(
        IN, HIDDEN, 2 * IN, time_major=True, key=key
    ),
}
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
    """Arguments on one device, and on many; and arguments that are not arrays."""
    of_xs, of_weight, of_ys = SETTINGS[setting]
    params, static = eqx.partition(make(jr.key(0)), eqx.is_inexact_array)
    xs = jr.normal(jr.key(1), (TIME, BATCH, IN))
    ys = jax.eval_shape(lambda p: eqx.combine(p, static)(xs)[0], params)
    ct = jr.normal(jr.key(2), ys.shape)
    is_wide = lambda x: x.ndim > 0 and x.shape[0] % 8 == 0
    weights = jax.tree.map(lambda x: put(x, of_weight if is_wide(x) else Spec()), params)
    return (params, xs, ct), (weights, put(xs, of_xs), put(ct, of_ys)), static


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", [*LAYERS, *LINEAR_LAYERS])
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
        if name != "Recurrent":
            assert got["sums"] <= len(jax.tree.leaves(one[0]))
    else:
        got, expected = collectives(program), collectives(expected)
        # Replay computes again, and needs the sums over features again.
        times = 2 if name == "Recurrent, replayed" else 1
        assert got.total() <= times * expected.total()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYERS, *LINEAR_LAYERS, *OTHERS])
def test_batch_over_an_explicit_axis(name):
    """Types say how arrays are distributed, and the type of the carry of a loop never
    changes."""
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


# ---------------------------------------------------------------- explicit axes


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", [*LAYERS, *LINEAR_LAYERS])
def test_weights_over_an_explicit_axis(name, axis):
    """They are gathered, and their gradients are sharded as they are."""
    (params, xs, ct), _, static = _arguments({**LAYERS, **LINEAR_LAYERS}[name], "batch")
    forward, reverse = _programs(static, _of_layer)
    expected = reverse(params, xs, ct), forward(params, xs, ct)
    is_wide = lambda x: x.ndim > axis and x.shape[axis] % 8 == 0
    spec_of = lambda x: Spec(*(None,) * axis, "i") if is_wide(x) else Spec()
    with jax.set_mesh(EXPLICIT_MESH):
        weights = jax.tree.map(lambda x: put(x, spec_of(x), EXPLICIT_MESH), params)
        batch = Spec(None, "i")
        many = weights, put(xs, batch, EXPLICIT_MESH), put(ct, batch, EXPLICIT_MESH)
        got = reverse(*many), forward(*many)
    eqgt.assert_trees_close(got, expected, tolerance=1e-5)
    grads, _ = got[0][1]
    for grad, weight in zip(jax.tree.leaves(grads), jax.tree.leaves(weights), strict=True):
        assert grad.sharding.is_equivalent_to(weight.sharding, weight.ndim)


def test_zeros_of_a_distributed_array_are_no_term_without_a_tangent():
    """They are a `reshard` of zero."""
    x = put(jnp.array(2.0), Spec())
    f = eqg.custom_jvp(lambda x: (jnp.sin(x), jnp.sign(x)))

    @f.def_jvp
    def f_jvp(primals, tangents):
        zero = jnp.zeros_like(primals[0])
        return f(*primals), (zero + jnp.cos(primals[0]) * tangents[0], zero)

    gradient = jax.jit(jax.grad(lambda x: sum(f(x))))
    eqgt.assert_trees_close(gradient(x), jnp.cos(2.0))


def test_a_cotangent_that_is_sharded_otherwise_than_its_value():
    @eqg.custom_vjp
    def matvec(w, x):
        return w @ x

    matvec.def_fwd(lambda w, x: (matvec(w, x), (w, x)))
    matvec.def_bwd(lambda r, ct: (jnp.outer(ct, r[1]), ct @ r[0]))
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(matvec(w, x) ** 2), (0, 1)))
    w, x = jr.normal(jr.key(0), (3, 8)), jr.normal(jr.key(1), (8,))
    expected = jax.grad(lambda w, x: jnp.sum((w @ x) ** 2), (0, 1))(w, x)
    with jax.set_mesh(EXPLICIT_MESH):
        got = gradient(w, put(x, Spec("i"), EXPLICIT_MESH))
    eqgt.assert_trees_close(got, expected, tolerance=1e-5)


# ---------------------------------------------------------------- a loss in chunks


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "chunk"), [(128, 32), (128, 48), (96, 20)])
def test_chunks_of_tokens_are_not_gathered(tokens, chunk):
    """The tokens of a chunk are distributed as all tokens, even if the chunk has to be
    shorter."""
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
