"""How to call functions that need more than their arguments: some make a function, and some
check an argument only when their result is called or differentiated."""

import functools as ft
import inspect

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np

from .domains import floats
from .parameters import KEY, of, only, X, Z


nn = eqg.nn


def graded(op):
    """The gradient of an op, if its argument has one: some options only matter there."""

    @ft.wraps(op)
    def run(x, **options):
        out = op(x, **options)
        return jax.grad(lambda x: jnp.sum(op(x, **options)))(x) if floats(x) else out

    return run


def psum_gradient(x, axis_name):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()

    def fn():
        leaves = jax.tree.leaves(eqg.psum_gradient(x, axis_name))
        return [x for x in leaves if isinstance(x, jax.Array)]

    return jax.shard_map(fn, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False)()


def safe_where(cond, fn, otherwise, substitute):
    return eqg.safe.where(cond, fn, X, otherwise, substitute=substitute)


# ---------------------------------------------------------------- rules


def def_jvp(rule, symbolic_zeros: bool = False):
    f = eqg.custom_jvp(lambda x: jnp.sin(x))
    f.def_jvp(rule, symbolic_zeros=symbolic_zeros)
    return jax.grad(f)(0.3)


def def_bwd(fwd, bwd, symbolic_zeros: bool = False):
    f = eqg.custom_vjp(lambda x: jnp.sin(x))
    f.def_fwd(fwd)
    f.def_bwd(bwd, symbolic_zeros=symbolic_zeros)
    return jax.grad(f)(0.3)


def filter_def_jvp(fn_jvp):
    f = eqg.filter_custom_jvp(lambda x: jnp.sin(x))
    f.def_jvp(fn_jvp)
    return jax.grad(f)(0.3)


def filter_def_bwd(fn_fwd, fn_bwd):
    f = eqg.filter_custom_vjp(lambda x: jnp.sin(x))
    f.def_fwd(fn_fwd)
    f.def_bwd(fn_bwd)
    return jax.grad(f)(0.3)


def add(x, y):
    return x + y


def made(decorator):
    """A decorator, which takes any function: that is called, and given a rule, later."""

    @ft.wraps(decorator, updated=())
    def run(*args, **options):
        decorator(*args, **options)

    return run


def defjvp(jvp, symbolic_zeros: bool = False):
    eqg.jax_custom_jvp(add).defjvp(jvp, symbolic_zeros)


def defvjp(
    fwd,
    bwd,
    symbolic_zeros: bool = False,
    optimize_remat: bool = False,
    generic_batching: bool = False,
):
    eqg.jax_custom_vjp(add).defvjp(fwd, bwd, symbolic_zeros, optimize_remat, generic_batching)


# ---------------------------------------------------------------- control flow and solvers


def bounded_loop(checkpoint):
    cond, body = (lambda x: x < 3.0), (lambda x: 2 * x)
    return eqg.filter_while_loop(cond, body, 1.0, max_steps=4, checkpoint=checkpoint)


@ft.wraps(eqg.fixed_point)
def fixed_point(fn, y0, **options):
    return eqg.fixed_point(fn, y0, **options).value


@ft.wraps(eqg.implicit)
def implicit(residual, **options):
    return eqg.implicit(residual, **options)(jnp.cbrt)


def chunked(loss, axis, chunk, reduction):
    fn = eqg.losses.chunked(loss, axis, chunk, reduction=reduction)
    return fn(jnp.ones(2), Z[:5, :2], jnp.ones(5))


def filter_map(f, chunk, checkpoint: bool = True):
    return eqg.filter_map(f, X, chunk=chunk, checkpoint=checkpoint)


@ft.wraps(eqgt.check_rule)
def check_rule(fn, **options):
    return eqgt.check_rule(fn, X, **options)


def after(maker, *args):
    """A call of the function that `maker` makes."""

    @ft.wraps(maker, updated=())
    def run(*made_with, **options):
        return maker(*made_with, **options)(*args)

    return run


def gradient_after(maker):
    """The gradient of the function that `maker` makes."""

    @ft.wraps(maker, updated=())
    def run(*made_with, **options):
        return jax.grad(lambda x: jnp.sum(maker(*made_with, **options)(x)))(X)

    return run


def spike_of(surrogate):
    """A spike, as a function of the fields of its surrogate."""
    make = lambda **fields: ft.partial(eqg.surrogates.spike, surrogate=surrogate(**fields))
    return ft.wraps(surrogate, updated=())(make)


# Functions that are only called later: no other kind will do.
only("custom_jvp", "rule", lambda primals, ts: (jnp.sin(*primals), 2 * ts[0]))
only("filter_custom_jvp", "fn_jvp", lambda primals, ts: (jnp.sin(*primals), 2 * ts[0]))
only("custom_vjp", "fwd", lambda x: (jnp.sin(x), x))
only("custom_vjp", "bwd", lambda x, ct: (2 * ct,))
only("filter_custom_vjp", "fn_fwd", lambda perturbed, x: (jnp.sin(x), None))
only("filter_custom_vjp", "fn_bwd", lambda residuals, ct, perturbed, x: 2 * ct)
only("", "fun", add)
only("event_time", "condition", lambda t, y: y[0])
only("", "f", lambda t, y: jnp.stack([y[1], -2.0 * jnp.ones(())]))
only("", "residual", lambda y, a: y**3 - a)
only("fixed_point", "fn", lambda y: jax.tree.map(lambda y: 0.5 * jnp.sin(y) + 1, y))
only("nn.FixedPoint", "cell", lambda x, z: 0.5 * jnp.cos(z) + jnp.sum(x))
only("losses", "loss", lambda w, xs, ys: jnp.sum(jnp.tanh(xs @ w - ys) ** 2))
only("host_function", "fn", lambda x: np.sin(x))
only("", "matvec rmatvec", lambda x: 2 * x)
only("gradient_flow", "loss", lambda model: jnp.sum(jnp.sin(model(X))))
only("", "loss", lambda model: jnp.sum(jnp.sin(model)))
LINEAR_RULE = eqg.custom_jvp(lambda x: 2 * x)
LINEAR_RULE.def_jvp(lambda primals, ts: (LINEAR_RULE(*primals), 2 * ts[0]))
only("testing", "fn", LINEAR_RULE)
SQUARE = lambda out, x: 2 * x
# One, or a list with one for each argument; zero is a constant.
_DERIVATIVE = lambda x: x is SQUARE or (isinstance(x, list) and x in ([0], [SQUARE]))
of("", "derivative", SQUARE, _DERIVATIVE)
BOUNCE = lambda t, y: y * jnp.array([1.0, -0.8])
of("jump", "reset", BOUNCE, lambda x: x is None or x is BOUNCE)


GRADED = (
    *("scale_gradient", "reverse_gradient", "mask_gradient", "clip_gradient", "probe"),
    *("clip_gradient_norm", "normalize_gradient", "zero_nonfinite_gradient", "noise_gradient"),
    *("cast_gradient", "on_backward", "tap_gradient", "watch_gradient"),
)
MAKERS = (
    *("custom_jvp", "custom_vjp", "custom_gradient", "filter_checkpoint", "filter_custom_jvp"),
    *("filter_custom_vjp", "jax_custom_jvp", "jax_custom_vjp"),
)
SURROGATES = (
    *("atan", "gaussian", "leaky", "multi_gaussian", "rectangle", "sigmoid", "superspike"),
    "triangle",
)
# What a partial function is given is right.
partial = ft.partial
LAYER = eqx.nn.Linear(3, 2, key=KEY)
CALLS = {
    **{name: graded(getattr(eqg, name)) for name in GRADED},
    **{name: made(getattr(eqg, name)) for name in MAKERS},
    **{
        f"surrogates.{name}": gradient_after(spike_of(getattr(eqg.surrogates, name)))
        for name in SURROGATES
    },
    "psum_gradient": psum_gradient,
    "zero_safe": gradient_after(eqg.zero_safe),
    "safe.where": safe_where,
    "tangents.add": lambda a, b: eqg.tangents.add(a, b),
    "tangents.dot": lambda a, b: eqg.tangents.dot(a, b),
    "tangents.linear": lambda fn, t: eqg.tangents.linear(fn, t),
    "tangents.of": lambda module, weight: eqg.tangents.of(module, weight=weight),
    "custom_jvp.def_jvp": def_jvp,
    "custom_vjp.def_bwd": def_bwd,
    "filter_custom_jvp.def_jvp": filter_def_jvp,
    "filter_custom_vjp.def_bwd": filter_def_bwd,
    "jax_custom_jvp.defjvp": defjvp,
    "jax_custom_vjp.defvjp": defvjp,
    "elementwise": gradient_after(eqg.elementwise),
    "with_gradient_of": gradient_after(eqg.with_gradient_of),
    "filter_while_loop": partial(eqg.filter_while_loop, init=jnp.ones(2), checkpoint=None),
    "filter_while_loop-bounded": bounded_loop,
    "filter_map": filter_map,
    "filter_cond": lambda pred, true_fun, false_fun: eqg.filter_cond(
        pred, true_fun, false_fun, X
    ),
    "jump": partial(eqg.jump, y=jnp.array([0.0, -2.0])),
    "implicit": gradient_after(implicit),
    "fixed_point": fixed_point,
    "nn.FixedPoint": after(nn.FixedPoint, X),
    "host_function": after(partial(eqg.host_function, out=lambda x: x), X),
    "linear_function": after(eqg.linear_function, X),
    "linear_host_function": after(partial(eqg.linear_host_function, out=None), X),
    "explain_nan": partial(eqg.explain_nan, model=X),
    "explain_gradient": partial(eqg.explain_gradient, model=X),
    "explain_zero": partial(eqg.explain_zero, model=X),
    "explain_memory": partial(eqg.explain_memory, model=X),
    "gradient_flow": partial(eqg.gradient_flow, model=LAYER),
    "testing.check_gradients": partial(eqgt.check_gradients, model=X),
    "testing.assert_trees_close": partial(eqgt.assert_trees_close, got=X, expected=X),
    "testing.numerical_jacobian": lambda fn: eqgt.numerical_jacobian(fn, X),
    "testing.check_rule": check_rule,
    "testing.check_forward": lambda fn: eqgt.check_forward(fn, X),
    "testing.check_linear": lambda fn: eqgt.check_linear(fn, X),
    "nn.GradientReversal": lambda x, strength: nn.GradientReversal(strength)(x),
    "nn.GradientProbe": lambda x, slot: nn.GradientProbe(slot)(x),
    "nn.GRU-from-state": lambda xs, state: nn.GRU(2, 3, key=KEY)(xs, state),
    "nn.LIFCell-shape": lambda hidden_size, beta: nn.LIFCell(hidden_size, beta),
    "losses.chunked": chunked,
    "losses.linear_cross_entropy": partial(eqg.losses.linear_cross_entropy, axis_name=None),
}

# ---------------------------------------------------------------- layers

LAYERS = {
    "GRU": nn.GRU(2, 3, num_layers=2, dropout=0.5, key=KEY), "LSTM": nn.LSTM(2, 3, key=KEY),
    "RNN": nn.RNN(2, 3, key=KEY), "RNNCell": nn.RNNCell(2, 3, key=KEY),
    "Recurrent": nn.Recurrent(nn.RNNCell(2, 3, key=KEY)),
    "Outputs": nn.Outputs(nn.GRU(2, 3, key=KEY)), "LRU": nn.LRU(2, 2, 3, key=KEY),
    "S5": nn.S5(2, 1, 4, key=KEY),
    "GatedDeltaNet": nn.GatedDeltaNet(2, 3, heads=2, key_size=2, key=KEY),
    "SelectiveSSM": nn.SelectiveSSM(2, 3, 4, state_size=2, key=KEY),
    "MinGRU": nn.MinGRU(2, 3, key=KEY), "MinLSTM": nn.MinLSTM(2, 3, key=KEY),
    "LIF": nn.LIF(2, 3, 0.9, key=KEY),
    "LIF-all": nn.LIF(2, 3, 0.9, alpha=0.5, rho=0.8, recurrent=True, key=KEY),
    "LI": nn.LI(2, 3, 0.9, key=KEY), "LIFCell": nn.LIFCell(3, 0.9),
    "LIFCell-all": nn.LIFCell(3, 0.9, alpha=0.5, rho=0.8, recurrent=True, key=KEY),
    "FakeQuantize": nn.FakeQuantize(4), "LSQ": nn.LSQ(4, scale=0.2), "FSQ": nn.FSQ((5, 5, 5)),
    "VectorQuantizer": nn.VectorQuantizer(4, 3, key=KEY), "Binary": nn.Binary(),
    "Ternary": nn.Ternary(),
}  # fmt: skip
for _name, _layer in LAYERS.items():
    CALLS[f"nn.{_name}()"] = _layer
    for _method in ("quantize", "updated", "decode", "fit"):
        if hasattr(_layer, _method) and not isinstance(_layer, nn.Binary | nn.Ternary):
            CALLS[f"nn.{_name}.{_method}"] = getattr(_layer, _method)
# Not fitted yet.
CALLS["nn.FakeQuantize.fit"] = nn.FakeQuantize(4, learn_scale=True).fit
CALLS["nn.LSQ.fit"] = nn.LSQ(4).fit

# What the signatures of layers leave out.
STACK = (
    "num_layers", "bidirectional", "dropout", "learn_initial_state", "reverse", "time_major",
)  # fmt: skip
MORE = {
    "nn.LI": ["alpha", "learn", "use_bias", "dtype", *STACK],
    "nn.LIF": [*inspect.signature(nn.LIFCell).parameters, *STACK],
}
# Another word for their arguments, which errors may use.
CALLED = {
    "tangents": "tangent", "probe": "slot", "nn.GradientProbe": "slot",
    "nn.GradientReversal": "`s`", "nn.GRU-from-state": "`state`", "nn.Recurrent": "`cells`",
}  # fmt: skip
# Records, reports and states of cells, which the library makes; errors; abstract classes; and
# what Optimistix calls.
NOT_CALLED = {
    *("RuleError", "HostFunction", "LinearFunction", "LinearHostFunction", "MemoryAdvice"),
    *("MemoryReport", "NaNReport", "NonFinite", "Residual", "ZeroGradient", "ZeroReport"),
    *("Symptom", "SymptomReport", "nn.AbstractQuantizer", "nn.LIFState"),
    *("nn.QuantizationReport", "safe.EighResult", "safe.SVDResult"),
    *("surrogates.AbstractSurrogate", "testing.GradientCheckError", "testing.GradientFault"),
    *("testing.GradientReport", "testing.LeafVerdict", "testing.Report"),
    *("testing.RuleCheckError", "solvers.AbstractFixedPointAdjoint", "solvers.OneStepAdjoint"),
    # They have the arguments of `check_forward`, and each call takes seconds.
    *("testing.check_adjoint", "testing.check_leaks", "testing.check_residuals"),
    *("testing.check_reverse", "testing.check_transforms"),
    "plot_gradient_flow",  # raises Matplotlib's errors
}
