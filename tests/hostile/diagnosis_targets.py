"""Targets that take functions: rules, control flow, solvers, host functions, diagnoses,
checks."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optimistix as optx
from eqx_grads import solvers

from .domains import (
    anything,
    between,
    bools,
    broadcasting,
    broadcasting_to,
    either,
    flag,
    function,
    inexact,
    integer,
    integers,
    is_none,
    not_negative,
    number,
    numbers,
    one_of,
    optional,
    reals,
    scalar,
    shaped,
    sine,
    size,
    tree_of,
)
from .op_targets import FLAG, X
from .targets import NOT_CALLED, target


YES = (True, flag)


def good(fn):
    """An argument that has to be this function: no other kind will do."""
    return fn, lambda x: x is fn


def _sum_of_sines(x):
    return jnp.sum(jnp.sin(x))


# ---------------------------------------------------------------- rules


def _made(decorator):
    """A decorator, which takes any function: that is called, and given a rule, later."""

    def run(fn):
        return eqx.filter(decorator(fn), False)

    return run


for _name in (
    "custom_jvp",
    "custom_vjp",
    "custom_gradient",
    "filter_checkpoint",
    "filter_custom_jvp",
    "filter_custom_vjp",
):
    target(_name, _made(getattr(eqg, _name)), fn=(jnp.sin, callable))


def _def_jvp(rule, symbolic_zeros):
    f = eqg.custom_jvp(lambda x: jnp.sin(x))
    f.def_jvp(rule, symbolic_zeros=symbolic_zeros)
    return jax.grad(f)(0.3)


def _rule(primals, tangents):
    return jnp.sin(*primals), 2 * tangents[0]


target("custom_jvp.def_jvp", _def_jvp, rule=good(_rule), symbolic_zeros=FLAG)


def _fwd(x):
    return jnp.sin(x), x


def _bwd(residuals, ct):
    return (2 * ct,)


def _def_bwd(fwd, bwd, symbolic_zeros):
    f = eqg.custom_vjp(lambda x: jnp.sin(x))
    f.def_fwd(fwd)
    f.def_bwd(bwd, symbolic_zeros=symbolic_zeros)
    return jax.grad(f)(0.3)


target("custom_vjp.def_bwd", _def_bwd, fwd=good(_fwd), bwd=good(_bwd), symbolic_zeros=FLAG)


def _filter_def_jvp(fn_jvp):
    f = eqg.filter_custom_jvp(lambda x: jnp.sin(x))
    f.def_jvp(fn_jvp)
    return jax.grad(f)(0.3)


def _filter_def_bwd(fn_fwd, fn_bwd):
    f = eqg.filter_custom_vjp(lambda x: jnp.sin(x))
    f.def_fwd(fn_fwd)
    f.def_bwd(fn_bwd)
    return jax.grad(f)(0.3)


def _filter_fwd(perturbed, x):
    return jnp.sin(x), None


def _filter_bwd(residuals, grad_out, perturbed, x):
    return 2 * grad_out


target("filter_custom_jvp.def_jvp", _filter_def_jvp, fn_jvp=good(_rule))
target(
    "filter_custom_vjp.def_bwd",
    _filter_def_bwd,
    fn_fwd=good(_filter_fwd),
    fn_bwd=good(_filter_bwd),
)


def _derivative(out, x):
    return 2 * x


def _derivatives(x):
    """One, or a list with one for each argument; zero is a constant."""
    return x is _derivative or (isinstance(x, list) and x in ([0], [_derivative]))


def _elementwise(fn, derivative, setup):
    return jax.grad(lambda x: jnp.sum(eqg.elementwise(fn, derivative, setup=setup)(x)))(X)


target(
    "elementwise",
    _elementwise,
    fn=(jnp.sin, sine),
    derivative=(_derivative, _derivatives),
    setup=(None, is_none),
)


def _with_gradient_of(fn, surrogate_fn):
    return jax.grad(lambda x: jnp.sum(eqg.with_gradient_of(fn, surrogate_fn)(x)))(X)


target("with_gradient_of", _with_gradient_of, fn=(jnp.sin, sine), surrogate_fn=(jnp.sin, sine))

# ---------------------------------------------------------------- control flow


def _step(carry, x):
    return carry, None  # takes anything


def _four_steps(x):
    """Arrays with four slices, and other leaves."""
    is_array = lambda x: hasattr(x, "dtype") and not isinstance(x, jax.ShapeDtypeStruct)
    given = [leaf for leaf in jax.tree.leaves(x) if is_array(leaf)]
    return all(
        isinstance(leaf, jax.Array | np.ndarray) and np.shape(leaf)[:1] == (4,)
        for leaf in given
    )


def _same(carry):
    return carry


target(
    "filter_scan",
    eqg.filter_scan,
    f=good(_step),
    init=(jnp.ones(2), anything),
    xs=(jnp.ones((4, 2)), _four_steps),
    length=(4, optional(integer(4, 4))),
    reverse=FLAG,
    unroll=(1, either(flag, integer(0, 10**40))),
    checkpoint=(None, either(one_of(None, "auto", "sqrt", "replay"), size)),
    truncate=(None, optional(size)),
    online=(False, either(flag, one_of("e-prop"))),
    carry_gradient=(None, optional(lambda x: x is _same)),
)
target(
    "filter_while_loop",
    lambda **functions: eqg.filter_while_loop(init=jnp.ones(2), **functions),
    cond_fun=good(lambda x: jnp.sum(x) < 3.0),
    body_fun=good(lambda x: 2 * x),
    max_steps=(None, optional(integer(0))),
)
target(
    "filter_while_loop: bounded",
    lambda checkpoint: eqg.filter_while_loop(
        lambda x: x < 3.0, lambda x: 2 * x, 1.0, max_steps=4, checkpoint=checkpoint
    ),
    checkpoint=("sqrt", optional(either(size, one_of("sqrt")))),
)
target(
    "filter_map",
    lambda f, chunk, checkpoint: eqg.filter_map(f, X, chunk=chunk, checkpoint=checkpoint),
    f=(jnp.sin, sine),
    chunk=(None, optional(size)),
    checkpoint=FLAG,
)


def _cond(pred, true_fun, false_fun):
    return eqg.filter_cond(pred, true_fun, false_fun, X)


target(
    "filter_cond",
    _cond,
    pred=(True, scalar(either(reals, bools))),
    true_fun=(jnp.sin, sine),
    false_fun=(jnp.sin, sine),
)


def _one_axis_more(b):
    """`a` is `(4, 2)`, and `h0` is `(2,)`."""
    fits = broadcasting(numbers, 4, 2)(b)
    return (fits and np.broadcast_shapes(np.shape(b), (4, 2))[1:] == (2,)) or (
        fits and np.ndim(b) > 2
    )


target(
    "linear_recurrence",
    eqg.linear_recurrence,
    a=(jnp.full((4, 2), 0.5), broadcasting(numbers, 4, 2)),
    b=(jnp.ones((4, 2)), _one_axis_more),
    h0=(jnp.ones(2), optional(broadcasting_to(numbers, 2))),
    reverse=FLAG,
    method=("auto", one_of("auto", "scan", "associative")),
)


REAL = either(reals, bools)


def _rows(x):
    """`(time, ..., 2)`, where time is 4 or broadcasts to 4."""
    fits = REAL(x) and np.ndim(x) > 0 and np.shape(x)[-1] == 2
    return fits and broadcasting(REAL, 4)(np.ones(np.shape(x)[:-1]))


_STEPS = (None, optional(scalar(between(0, 4, integers))))
target(
    "gated_delta_rule",
    eqg.gated_delta_rule,
    q=(jnp.full((4, 2), 0.5), _rows),
    k=(jnp.full((4, 2), 0.5), _rows),
    v=(jnp.full((4, 2), 0.5), _rows),
    beta=(jnp.full(4, 0.5), broadcasting(REAL, 4)),
    decay=(jnp.full(4, -0.5), optional(broadcasting(REAL, 4))),
    state=(jnp.ones((2, 2)), optional(broadcasting_to(REAL, 2, 2))),
    lengths=_STEPS,
    delta=FLAG,
    chunk=(2, optional(integer(1, 2**62))),
    reverse=FLAG,
    scale=(0.5, optional(scalar(REAL))),
)
target(
    "selective_scan",
    eqg.selective_scan,
    x=(jnp.ones((4, 2)), shaped(REAL, 4, 2)),
    step=(jnp.ones((4, 2)), shaped(REAL, 4, 2)),
    a=(-jnp.ones((2, 3)), shaped(numbers, 2, 3)),
    b=(jnp.ones((4, 3)), shaped(numbers, 4, 3)),
    c=(jnp.ones((4, 3)), shaped(numbers, 4, 3)),
    state=(
        jnp.ones((2, 3)),
        optional(either(scalar(numbers), shaped(numbers, 2, 3))),
    ),
    lengths=_STEPS,
    reverse=FLAG,
    method=("auto", one_of("auto", "scan", "associative")),
)

# ---------------------------------------------------------------- solvers


def _height(t, y):
    return y[0]


def _fall(t, y):
    return jnp.stack([y[1], -2.0 * jnp.ones(())])


def _bounce(t, y):
    return y * jnp.array([1.0, -0.8])


# Nothing is called before something is differentiated.
_STATE = (jnp.array([0.0, -2.0]), anything)
_TIME = (1.0, scalar(reals))
target(
    "event_time",
    eqg.event_time,
    condition=good(_height),
    y=_STATE,
    f=good(_fall),
    t=_TIME,
    where=(True, scalar(bools)),
)
target(
    "jump",
    ft.partial(eqg.jump, y=jnp.array([0.0, -2.0])),
    reset=(_bounce, optional(lambda x: x is _bounce)),
    f=good(_fall),
    t=_TIME,
)


def _residual(y, a):
    return y**3 - a


def _implicit(residual, solver, tags, has_aux, tolerance):
    options = {"solver": solver, "tags": tags, "has_aux": has_aux, "tolerance": tolerance}
    solve = eqg.implicit(residual, **options)(jnp.cbrt)
    return jax.grad(lambda a: jnp.sum(solve(a)))(jnp.array([1.0, 8.0]))


target(
    "implicit",
    _implicit,
    residual=good(_residual),
    solver=(None, is_none),
    tags=((), lambda x: isinstance(x, tuple | list | dict | set) and not len(x)),
    has_aux=FLAG,
    tolerance=(0.01, optional(number(0))),
)


def _cell(y):
    return jax.tree.map(lambda y: 0.5 * jnp.sin(y) + 1, y)


target(
    "fixed_point",
    lambda fn, y0, **options: eqg.fixed_point(fn, y0, **options).value,
    fn=good(_cell),
    y0=(jnp.zeros(3), lambda x: tree_of(inexact)(x) and len(jax.tree.leaves(x)) > 0),
    solver=(None, is_none),
    backward=(
        "implicit",
        one_of("implicit", "fixed_point", "neumann", "phantom", "one_step"),
    ),
    max_steps=(256, optional(integer(1))),
    throw=YES,
    has_aux=FLAG,
    options=(None, lambda x: x is None or isinstance(x, dict)),
    tags=((), lambda x: isinstance(x, tuple | list | dict | set) and not len(x)),
)


def _layer_cell(x, z):
    return 0.5 * jnp.cos(z) + jnp.sum(x)


def _shape_of_x(x):
    sizes = x if isinstance(x, tuple | list | range) else (x,)
    return all(size(n) for n in sizes)


target(
    "nn.FixedPoint",
    lambda **options: eqg.nn.FixedPoint(**options)(X),
    cell=good(_layer_cell),
    shape=(3, _shape_of_x),
    solver=(None, is_none),
    backward=(
        "implicit",
        one_of("implicit", "fixed_point", "neumann", "phantom", "one_step"),
    ),
    max_steps=(256, optional(integer(1))),
    throw=YES,
)
target(
    "solvers.Anderson",
    solvers.Anderson,
    rtol=(1e-3, scalar(not_negative)),
    atol=(1e-3, scalar(not_negative)),
    norm=(optx.max_norm, function),
    history=(5, size),
    mixing=(1.0, scalar(not_negative)),
    ridge=(1e-5, scalar(not_negative)),
)
target("solvers.NeumannAdjoint", solvers.NeumannAdjoint, k=(5, integer(0, 10**40)))
target(
    "solvers.PhantomAdjoint", solvers.PhantomAdjoint, k=(5, size), tau=(0.5, number(1e-30, 1))
)
target(
    "solvers.FixedPointAdjoint",
    solvers.FixedPointAdjoint,
    solver=(None, is_none),
    max_steps=(256, optional(integer(1))),
    throw=YES,
)
target("solvers.ImplicitAdjoint", solvers.ImplicitAdjoint, linear_solver=(None, is_none))

# ---------------------------------------------------------------- on the host


def _np_sin(x):
    return np.sin(x)


def _steps(x):
    """One relative step, or a tree of them."""
    return all(number(1e-300, 1e300)(step) for step in jax.tree.leaves(x))


def _host(fn, finite_difference, step, max_rule_calls, vmap_method, out=lambda x: x):
    function = eqg.host_function(
        fn,
        out=out,
        finite_difference=finite_difference,
        step=step,
        max_rule_calls=max_rule_calls,
        vmap_method=vmap_method,
    )
    return function(X)


VMAP_METHOD = (
    "sequential",
    one_of(
        *("sequential", "sequential_unrolled", "expand_dims", "broadcast_all"),
        *("legacy_vectorized",),
    ),
)
target(
    "host_function",
    _host,
    fn=good(_np_sin),
    finite_difference=("central", one_of("central", "complex", None)),
    step=(1e-3, lambda x: x is None or _steps(x)),
    max_rule_calls=(256, integer(0, 10**40)),
    vmap_method=VMAP_METHOD,
)


def _linear_host(matvec, rmatvec, vmap_method):
    return eqg.linear_host_function(matvec, rmatvec, vmap_method=vmap_method)(X)


def _twice(x):
    return 2 * x


target(
    "linear_host_function",
    _linear_host,
    matvec=good(_twice),
    rmatvec=good(_twice),
    vmap_method=VMAP_METHOD,
)


def _linear(matvec, rmatvec, argnum):
    return eqg.linear_function(matvec, rmatvec, argnum=argnum)(X)


target(
    "linear_function",
    _linear,
    matvec=good(_twice),
    rmatvec=good(_twice),
    argnum=(0, integer(0, 0)),
)


def _add(parameters, x):
    return parameters + x


def _add_bwd(residuals, ct):
    return ct, ct


_ADD = eqg.host_function(_add, out=lambda parameters, x: x)
_ADD.def_fwd(lambda parameters, x: (parameters + x, None))
_ADD.def_bwd(_add_bwd)


# ---------------------------------------------------------------- diagnoses and checks


def _seed(x):
    return integer(0, 10**40)(x)


def _seeds(x):
    several = isinstance(x, tuple | list | range)
    return len(x) > 0 and all(_seed(s) for s in x) if several else _seed(x)


_LOSS = {"loss": good(_sum_of_sines)}
target(
    "explain_nan",
    ft.partial(eqg.explain_nan, model=X),
    **_LOSS,
    threshold=(None, optional(number(0))),
    seconds=(60.0, number(0)),
    is_eager=True,
)
target("explain_gradient", ft.partial(eqg.explain_gradient, model=X), **_LOSS, is_eager=True)
target("explain_zero", ft.partial(eqg.explain_zero, model=X), **_LOSS, is_eager=True)
target(
    "explain_memory",
    ft.partial(eqg.explain_memory, model=X),
    **_LOSS,
    compiled=FLAG,
    is_eager=True,
)


def _of_a_layer(layer):
    return jnp.sum(jnp.sin(layer(X)))


target(
    "gradient_flow",
    ft.partial(eqg.gradient_flow, model=eqx.nn.Linear(3, 2, key=jr.key(0))),
    loss=good(_of_a_layer),
    where=(None, is_none),
    is_eager=True,
)
target(
    "testing.check_gradients",
    ft.partial(eqgt.check_gradients, model=X),
    **_LOSS,
    skip=((), lambda x: isinstance(x, tuple | list | dict | set) and not len(x)),
    tolerance=(None, optional(number(0))),
    seed=(0, _seed),
    raises=(True, flag),
    is_eager=True,
)
target(
    "GradientStatistics",
    eqg.GradientStatistics,
    n=(
        3,
        lambda x: (
            integer(0, 10**6)(x) or (isinstance(x, tuple) and all(integer(0)(n) for n in x))
        ),
    ),
)
target(
    "testing.assert_trees_close",
    ft.partial(eqgt.assert_trees_close, X, X),
    tolerance=(1e-3, optional(number(0))),
    entrywise=(True, flag),
    scale=(0.0, scalar(not_negative)),
    is_eager=True,
)
target(
    "testing.random_tangent",
    eqgt.random_tangent,
    primal=(X, anything),
    seed=(0, _seed),
    is_eager=True,
)
target(
    "testing.numerical_jacobian",
    lambda fn: eqgt.numerical_jacobian(fn, X),
    fn=(jnp.sin, sine),
    is_eager=True,
)
_linear_rule = eqg.custom_jvp(lambda x: 2 * x)
_linear_rule.def_jvp(lambda primals, tangents: (_linear_rule(*primals), 2 * tangents[0]))


def _tuples(x):
    return isinstance(x, tuple | list) and all(isinstance(args, tuple | list) for args in x)


_CHECK = {"fn": (_linear_rule, lambda x: x is _linear_rule)}
target(
    "testing.check_rule",
    lambda fn, **options: eqgt.check_rule(fn, X, **options),
    **_CHECK,
    checks=(("primal",), lambda x: x is None or (isinstance(x, tuple) and x == ("primal",))),
    skip=((), lambda x: isinstance(x, tuple | list | dict | set) and not len(x)),
    reference=(None, is_none),
    nonlinear=FLAG,
    nondifferentiable=((), lambda x: isinstance(x, tuple | list | dict | set) and not len(x)),
    order=(2, size),
    at=((), _tuples),
    max_residual_bytes=(None, optional(integer(0, 10**40))),
    tolerance=(None, optional(number(0))),
    seed=(0, _seeds),
    raises=(True, flag),
    is_eager=True,
)


def _check(check):
    return lambda fn: check(fn, X)


for _name in ("check_forward", "check_linear"):
    target(
        f"testing.{_name}",
        _check(getattr(eqgt, _name)),
        **_CHECK,
        is_eager=True,
    )

# Records, reports and states of cells, which the library makes; errors; abstract classes; and
# what Optimistix calls.
NOT_CALLED |= {
    *("RuleError", "HostFunction", "LinearFunction", "LinearHostFunction", "MemoryAdvice"),
    "MemoryReport",
    *("NaNReport", "NonFinite", "Residual", "ZeroGradient", "ZeroReport"),
    *("Symptom", "SymptomReport"),
    *("nn.AbstractQuantizer", "nn.LIFState"),
    *("nn.QuantizationReport", "safe.EighResult", "safe.SVDResult"),
    "surrogates.AbstractSurrogate",
    *("testing.GradientCheckError", "testing.GradientFault", "testing.GradientReport"),
    *("testing.LeafVerdict", "testing.Report", "testing.RuleCheckError"),
    *("solvers.AbstractFixedPointAdjoint", "solvers.OneStepAdjoint"),
    # They have the arguments of `check_forward`, and each call takes seconds.
    *("testing.check_adjoint", "testing.check_leaks", "testing.check_residuals"),
    *("testing.check_reverse", "testing.check_transforms"),
    "plot_gradient_flow",  # raises Matplotlib's errors
}
