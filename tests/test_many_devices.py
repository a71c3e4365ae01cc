"""Every op and layer over eight devices under `jit`: the numbers of one device, and no more
communication than the same function without a rule."""

import collections
import re

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec

from .cases import CASES
from .guard.contract import Flat, numbers


pytestmark = pytest.mark.versions

MESH = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
EXPLICIT_MESH = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Explicit,))


def put(tree, spec, mesh=MESH):
    return jax.device_put(tree, NamedSharding(mesh, spec))


@pytest.fixture(autouse=True, scope="module")
def _forget():
    yield
    jax.clear_caches()


# ---------------------------------------------------------------- collectives

_KINDS = {"all-gather": "gathers", "all-reduce": "sums", "reduce-scatter": "sums"}
_KINDS |= dict.fromkeys(("all-to-all", "collective-permute", "collective-broadcast"), "moves")
_COLLECTIVE = re.compile(rf"[\s)]({'|'.join(_KINDS)})(?:-start)?\(([^)]*)\)")
_CALLED = re.compile(
    r"(?:calls|to_apply|true_computation|false_computation|body|condition)=%?([\w.\-]+)"
)


def collectives(compiled):
    """How many arrays a run of a compiled program `gathers`, `sums` over devices, and `moves`
    between devices.

    Those in the body of a loop count once for each step, where XLA knows how many there are.
    """
    bodies, entry, name = {}, "", ""
    for line in compiled.as_text().splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith(" "):
            name = header.group(2)
            entry = name if header.group(1) else entry
        bodies.setdefault(name, []).append(line)
    counts = collections.Counter()

    def visit(name, times):
        for line in bodies.get(name, ()):
            for kind, operands in _COLLECTIVE.findall(line):
                counts[_KINDS[kind]] += times * max(operands.count("%"), 1)
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            steps = times * int(known.group(1)) if known and " while(" in line else times
            called = _CALLED.findall(line)
            for names in re.findall(r"branch_computations=\{([^}]*)\}", line):
                called += [name.strip().lstrip("%") for name in names.split(",")]
            for other in called:
                visit(other, steps)

    visit(entry, 1)
    return counts


# ---------------------------------------------------------------- ops

# `psum_gradient` is for `shard_map`, and has tests there. The arguments of a call on the host
# have to be gathered: see the page "Many devices". Two tokens at a time can't be distributed
# over eight devices: tested below.
LEFT_OUT = r"psum_gradient|host_function|linear_host_function|tap_gradient|watch_gradient"
LEFT_OUT += r"|losses.linear|nn.Linear"
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


def _over_batch(fn, args):
    """The op and its derivatives in both modes of eight examples of the first argument, one on
    each device; the arguments of the program, where they are, and how many are replicated."""
    flat = Flat(fn, args)
    n_of_each = [len(jax.tree.leaves(eqx.filter(arg, eqx.is_inexact_array))) for arg in args]
    n_data = next(n for n in n_of_each if n)
    axes = [0 if i < n_data else None for i in range(len(flat.leaves))]
    factors = np.linspace(1.0, 0.9, 8)
    many = lambda x: jnp.stack([x * factor.astype(x.dtype) for factor in factors])
    leaves = [many(x) if axis == 0 else x for x, axis in zip(flat.leaves, axes, strict=True)]
    batch = jax.vmap(flat, in_axes=axes)

    def both(leaves, ts, cts):
        out, pull_back = jax.vjp(batch, *leaves)
        return jax.jvp(batch, leaves, ts), out, pull_back(cts)

    specs = [Spec("i") if axis == 0 else Spec() for axis in axes]
    arrays = leaves, numbers(1, leaves), numbers(2, jax.eval_shape(batch, *leaves))
    where = specs, specs, [Spec("i")] * len(arrays[2])
    placed = [list(map(put, *pair)) for pair in zip(arrays, where, strict=True)]
    return jax.jit(both), arrays, placed, axes.count(None)


@pytest.mark.thorough
@pytest.mark.every(6)
@pytest.mark.parametrize("name", [n for n in CASES if not re.match(LEFT_OUT, n)])
def test_each_device_has_its_examples(name):
    """Nothing is gathered or moved, and the gradient of a parameter is summed once."""
    fn, args = CASES[name].make()
    run, arrays, placed, n_replicated = _over_batch(fn, args)
    program = run.lower(*placed).compile()
    eqgt.assert_trees_close(program(*placed), run(*arrays))
    counts = collectives(program)
    assert counts["gathers"] == counts["moves"] == 0
    most = n_replicated + MORE_SUMS.get(name, 0)
    if counts["sums"] > most and "reference" in CASES[name].options:
        # An entry of several calls: no more sums than the function without the library has.
        run, _, placed, _ = _over_batch(CASES[name].options["reference"], args)
        most = max(most, collectives(run.lower(*placed).compile())["sums"])
    assert counts["sums"] <= most


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [32, 48])
def test_chunks_of_tokens_are_not_gathered(chunk):
    """The tokens of a chunk are distributed as all tokens, even if the chunk has to be
    shorter."""
    x, weight = jr.normal(jr.key(0), (128, 8)), jr.normal(jr.key(1), (24, 8))
    labels = jnp.arange(128) % 24
    loss = lambda w, x, y: eqg.losses.linear_cross_entropy(x, w, y, chunk=chunk)
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    args = weight, put(x, Spec("i")), put(labels, Spec("i"))
    program = run.lower(*args).compile()
    eqgt.assert_trees_close(program(*args), run(weight, x, labels))
    counts = collectives(program)
    assert counts["gathers"] == counts["moves"] == 0
    # The gradient of the weight, for each of at most twice as many chunks as needed.
    assert counts["sums"] <= 3 + 2 * (-(-128 // chunk))


# ---------------------------------------------------------------- recurrent layers

TIME, BATCH, IN, HIDDEN = 6, 16, 16, 32


def _layer(name, *args, **options):
    make = getattr(eqg.nn, name)
    return lambda: make(IN, *(args or (HIDDEN,)), time_major=True, key=jr.key(0), **options)


def _any_cell(checkpoint):
    cell = lambda: eqx.nn.GRUCell(IN, HIDDEN, key=jr.key(0))
    return lambda: eqg.nn.Recurrent(cell(), checkpoint=checkpoint, time_major=True)


LAYERS = {
    "GRU": _layer("GRU"),
    "LSTM": _layer("LSTM"),
    "Recurrent": _any_cell("auto"),
    "Recurrent, replayed": _any_cell("replay"),
    "LIF": _layer("LIF", beta=0.9, rho=0.5, learn=("beta", "rho")),
}
# Over time at once, or of more than one cell: no cell of one step.
OTHERS = {
    "LRU": _layer("LRU", IN, HIDDEN),
    "MinGRU": _layer("MinGRU"),
    "two layers in two directions": _layer("GRU", num_layers=2, bidirectional=True),
    "GatedDeltaNet": _layer("GatedDeltaNet", heads=2, key_size=4),
    "SelectiveSSM": _layer("SelectiveSSM", HIDDEN, 2 * IN),
}
XS = jnp.asarray(np.random.default_rng(1).normal(size=(TIME, BATCH, IN)))


def _of_cell(layer):
    """The layer as a `jax.lax.scan` of its cell."""
    cell = layer.cells[0][0]
    first = jax.tree.map(jnp.zeros_like, jax.eval_shape(layer, XS)[1])

    def run(xs):
        step = lambda h, x: (lambda new: (new, jax.tree.leaves(new)[0]))(jax.vmap(cell)(x, h))
        return jax.lax.scan(step, first, xs)[1]

    return run


def _programs(static, run):
    """In forward mode and in reverse mode, of the parameters and the inputs."""
    outputs = lambda params, xs: run(eqx.combine(params, static))(xs)

    def reverse(params, xs, ct):
        ys, pull_back = jax.vjp(outputs, params, xs)
        return ys, pull_back(ct)

    forward = lambda params, xs, _: jax.jvp(outputs, (params, xs), (params, xs))
    return jax.jit(forward), jax.jit(reverse)


def _arguments(layer):
    params, static = eqx.partition(layer, eqx.is_inexact_array)
    run = lambda layer: lambda xs: layer(xs)[0]
    ct = jr.normal(jr.key(2), jax.eval_shape(run(layer), XS).shape)
    return (params, XS, ct), static, run


# How the inputs `(time, batch, in)`, the weights and the outputs are distributed.
SETTINGS = {
    "batch": (Spec(None, "i"), Spec(), Spec(None, "i")),
    "features": (Spec(None, None, "i"), Spec(), Spec()),
    "hidden": (Spec(), Spec("i"), Spec(None, None, "i")),
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_more_than_a_scan(name, setting):
    of_xs, of_weight, of_ys = SETTINGS[setting]
    one, static, run = _arguments(LAYERS[name]())
    is_wide = lambda x: x.ndim > 0 and x.shape[0] % 8 == 0
    weights = jax.tree.map(lambda x: put(x, of_weight if is_wide(x) else Spec()), one[0])
    many = weights, put(XS, of_xs), put(one[2], of_ys)
    forward, reverse = _programs(static, run)
    program = reverse.lower(*many).compile()
    eqgt.assert_trees_close(program(*many), reverse(*one), tolerance=1e-5)
    eqgt.assert_trees_close(forward(*many), forward(*one), tolerance=1e-5)
    got = collectives(program)
    expected = collectives(_programs(static, _of_cell)[1].lower(*many).compile())
    if setting == "batch":
        assert got["gathers"] == got["moves"] == 0
        # A scan sums the gradient of each parameter in each step.
        assert got["sums"] <= expected["sums"]
        if name != "Recurrent":
            assert got["sums"] <= len(jax.tree.leaves(one[0]))
    else:
        # Replay computes again, and needs the sums over features again.
        times = 2 if name == "Recurrent, replayed" else 1
        assert got.total() <= times * expected.total()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYERS, *OTHERS])
def test_explicit_axes(name):
    """A batch over an axis, and weights too, which are gathered. Their gradients are sharded as
    they are."""
    (params, xs, ct), static, run = _arguments((LAYERS | OTHERS)[name]())
    forward, reverse = _programs(static, run)
    expected = reverse(params, xs, ct), forward(params, xs, ct)
    is_wide = lambda x, axis: x.ndim > axis and x.shape[axis] % 8 == 0
    with jax.set_mesh(EXPLICIT_MESH):
        batch = lambda x: put(x, Spec(None, "i"), EXPLICIT_MESH)
        for axis in (None, 0, 1) if name in LAYERS else (None,):
            spec_of = lambda x, axis=axis: (
                Spec() if axis is None or not is_wide(x, axis) else Spec(*(None,) * axis, "i")
            )
            weights = jax.tree.map(lambda x, f=spec_of: put(x, f(x), EXPLICIT_MESH), params)
            many = weights, batch(xs), batch(ct)
            got = reverse(*many), forward(*many)
            eqgt.assert_trees_close(got, expected, tolerance=1e-5)
            assert jax.typeof(got[0][0]).sharding.spec == Spec(None, "i", None)
            pairs = zip(*map(jax.tree.leaves, (got[0][1][0], weights)), strict=True)
            assert all(g.sharding.is_equivalent_to(w.sharding, w.ndim) for g, w in pairs)


@pytest.mark.parametrize("name", ["MinGRU", "two layers in two directions"])
def test_types_over_explicit_axes(name):
    """Without running it, and with weights over the axis of the batch."""
    args, static, run = _arguments(OTHERS[name]())
    with jax.set_mesh(EXPLICIT_MESH):
        over = lambda spec: lambda x: put(x, spec, EXPLICIT_MESH)
        weights = jax.tree.map(over(Spec("i")), args[0])
        xs, ct = map(over(Spec(None, "i")), args[1:])
        ys, (grads, _) = jax.eval_shape(_programs(static, run)[1], weights, xs, ct)
        assert ys.sharding.spec == Spec(None, "i", None)
        expected = jax.tree.map(lambda w: jax.typeof(w).sharding, weights)
        assert eqx.tree_equal(jax.tree.map(lambda g: g.sharding, grads), expected)
