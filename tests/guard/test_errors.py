"""Errors say what is wrong, in the user's names: calls that fail, with words that the error
must have; and calls that are just right, which must raise nothing.

Words are separated by ` | `; `@` stands for the file and the line of the user's function.
"""

import functools as ft
from types import SimpleNamespace

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
from eqx_grads import nn, safe, solvers, ste, surrogates, tangents

from ..reports import record


# As users run it: the checks of types would refuse some arguments first.
pytestmark = pytest.mark.usefixtures("without_type_checks")

KEY, PLACE = jax.random.key(0), 'test_errors.py", line '
ONE, N, LABELS = np.float32(1), np.arange(3), np.arange(4)
X = np.array([1.0, 2.0, 3.0], "float32")
TWO, XS, W, SPIN = (np.ones((n, 3), "float32") for n in (2, 4, 5, 3))
Z, BATCH = X.astype("complex64"), np.stack([XS, XS])
TREE, T = ({"x": X}, ONE), {"a": X, "b": [X, None]}


def named(name, fn):
    assert fn.__name__ in ("<lambda>", name), "It would have this name in other tests too."
    fn.__name__ = fn.__qualname__ = name
    return fn


def types(f, *args):
    """A call that finds types only; nothing is computed."""
    return lambda: eqx.filter_eval_shape(f, *args)


def grad(f, *args):
    floats = lambda out: jax.tree.leaves(eqx.filter(out, eqx.is_inexact_array))
    total = lambda out: sum(jnp.sum(x.real) for x in floats(out))
    return types(eqx.filter_grad(lambda args: total(f(*args))), args or (X,))


jvp = lambda f, x=X: types(lambda x: jax.jvp(f, (x,), (x,)), x)

# ---------------------------------------------------------------- rules


def square(x):
    return x**2


def pair(tree, scale):
    return {"sum": jnp.sum(tree["x"]) * scale, "name": "pair"}


def scaled(x, scale, power=2):
    return x**power * scale


def keyword(x, *, options, power=1):
    return x * options["scale"] ** power


def keyword_only(x, *, scale=ONE):
    return x * scale


def with_rules(decorated, **rules):
    """Errors call each rule by its name here."""
    for name, rule in rules.items():
        if rule is not None:
            getattr(decorated, f"def_{name}")(named(name, rule))
    return decorated


def reverse(bwd=lambda r, ct: (ct,), fwd=None, fn=square):
    fwd = fwd or (lambda *args, **kwargs: (fn(*args, **kwargs), args))
    return with_rules(eqg.custom_vjp(fn), fwd=fwd, bwd=bwd)


def filter_reverse(bwd=lambda r, ct, perturbed, x, *args: ct, fwd=None, fn=square):
    fwd = fwd or (lambda perturbed, x, *args: (fn(x, *args), None))
    return with_rules(eqg.filter_custom_vjp(fn), fwd=fwd, bwd=bwd)


def jax_forward(jvp=lambda p, t: (p[0], t[0]), fn=square, **options):
    decorated = eqg.jax_custom_jvp(fn, **options)
    decorated.defjvp(named("jvp", jvp))
    return decorated


def jax_reverse(bwd=lambda r, ct: (ct,), fwd=lambda *args: (args[0], 0), fn=square, **options):
    decorated = eqg.jax_custom_vjp(fn, **options)
    decorated.defvjp(named("fwd", fwd), named("bwd", bwd))
    return decorated


def jax_terms(*terms):
    decorated = eqg.jax_custom_jvp(square)
    decorated.defjvps(*terms)
    return decorated


def batched(rule):
    return types(jax.vmap(with_rules(forward(lambda p, t: (p[0] ** 2, t[0])), vmap=rule)), TWO)


def of_batch(fn, by_rule):
    f = forward(lambda p, t: (fn(*p), fn(*t)), fn)
    return types(jax.vmap(with_rules(f, vmap=lambda size, flags, x: (by_rule(x), True))), TWO)


def linear(rmatvec=lambda ct: ct, fn=lambda x: 2 * x, argnum=0):
    decorated = eqg.linear_function(named("double", fn), argnum=argnum)
    return with_rules(decorated, rmatvec=rmatvec)


forward = lambda rule, fn=square: with_rules(eqg.custom_jvp(fn), jvp=rule)
tangent = lambda t, fn=square: forward(lambda p, ts: (fn(*p), t(fn(*p), ts[0])), fn)
filter_forward = lambda rule, fn=square: with_rules(eqg.filter_custom_jvp(fn), jvp=rule)
elementwise = lambda derivative, fn=square: eqg.elementwise(fn, derivative)
half = lambda **rules: lambda: with_rules(eqg.custom_vjp(square), **rules)(ONE)
STATIC = lambda tree, scale: ({**pair(tree, scale), "name": "other"}, None)
SYMBOLIC = jax.custom_derivatives.SymbolicZero


class Holder(eqx.Module):
    weight: object
    size: int = eqx.field(static=True, default=3)

    def __call__(self, x):
        return x * self.weight


class Keyless:
    def __init__(self, a):
        self.a = a


jax.tree_util.register_pytree_node(
    Keyless, lambda x: ((x.a,), None), lambda _, children: Keyless(*children)
)


def held_by_argument(a):
    f = forward(lambda p, t: (p[0](p[1]), t[1]), lambda fn, x: fn(x))
    return f(lambda x: x * a, X)


def calls_itself_compiled():
    f = eqg.custom_jvp(Holder(ONE))
    inner = jax.jit(lambda x: f(x))
    f.def_jvp(lambda p, t: (inner(*p), 3 * t[0]))
    return grad(jax.tree.map(lambda x: x + 1, f))()


def stale():
    """A value of an earlier trace, where the library does not look for it."""
    jax.make_jaxpr(lambda a: setattr(stale, "value", a))(ONE)
    types(tangent(lambda y, t: t, lambda x: x * stale.value), X)()


closes_over = lambda a: tangent(lambda y, t: t, lambda x: x * a)(X)
holds = lambda kept, get: types(lambda a: grad(tangent(lambda y, t: t, get(kept(a))))(), ONE)
reads_reference = named("reads_reference", lambda refs: refs["a"][...] * 2)

# ---------------------------------------------------------------- loops, losses, solvers


def scan(f=lambda h, x: (h + x, h), h=X, xs=XS, **options):
    return types(lambda h, xs: eqg.filter_scan(f, h, xs, **options), h, xs)


def grad_scan(f, w=X, xs=XS, h=X, **options):
    return grad(lambda w: eqg.filter_scan(lambda h, x: f(w, h, x), h, xs, **options)[0], w)


def returns(new, h=X):
    """A step that returns another carry."""
    return scan(named("mine", lambda h, x: (new(h), None)), h)


line = lambda a, b: lambda x: a * x + b


def loop(new, h=X):
    return types(lambda h: eqg.filter_while_loop(lambda h: True, named("body", new), h), h)


def cond(one, other, pred=True):
    one, other = named("one", lambda x, a=one: a), named("other", lambda x, b=other: b)
    return types(lambda pred, x: eqg.filter_cond(pred, one, other, x), pred, X)


def recurrence(a=X[:, None], b=SPIN, h0=None):
    return types(eqg.linear_recurrence, a, b, h0)


@jax.custom_vjp
def clipped(h, bound):
    return h


clipped.defvjp(lambda h, b: (h, b), lambda b, ct: (jnp.clip(ct, -b, b), None))
halved = jax.custom_vjp(lambda h: 1 * h)
halved.defvjp(lambda h: (h, None), lambda _, ct: (eqg.scale_gradient(ct, 0.5),))
one_or = lambda is_on, ct: (jax.lax.cond(is_on, lambda ct: ct, jnp.ones_like, ct),)
chosen = with_rules(eqg.custom_vjp(lambda h: h), fwd=lambda h: (h, h[0] > 0), bwd=one_or)
MATRIX = lambda w, h, x: (SPIN @ h + w * x, None)
# One of the two moves of the carry is its identity.
MOVED = lambda h, k: jnp.concatenate([jnp.zeros(k, h.dtype), h])[1:4]
SHIFTS = lambda w, h, x: (0.5 * MOVED(h, 1) + 0.4 * MOVED(h, 2) + w * x, None)
PRINTS = lambda h, x: (jax.debug.print("{}", h[0]), (h, None))[1]
HEAD = eqg.losses.linear_cross_entropy


def chunked(loss=lambda w, x: jnp.sum(x), *args, axis=0, chunk=2):
    run = eqg.losses.chunked(named("loss", loss), axis=axis, chunk=chunk)
    return types(run, *(args or (X, XS)))


def entropy(x=XS, weight=W, labels=LABELS, **options):
    return types(lambda *args: HEAD(*args, **options), x, weight, labels)


def solved(residual=lambda y, a: y - a, fn=lambda a: a, **options):
    return grad(eqg.implicit(named("residual", residual), **options)(named("solve", fn)))


def singular(f, tags):
    """All is a solution, so that the equation does not determine one."""
    solve = eqg.implicit(lambda y, a: f(y) - f(a), tags=tags)(lambda a: a)
    return lambda: jax.grad(lambda a: jnp.sum(solve(a)))(X)


SIZES = np.array([[1, 1e-6, 0], [1, 2e-6, 0], [0, 0, 1]], "float32")
PROGRESSION = np.arange(1, 10, dtype="float32").reshape(3, 3) / 10
unfinished = eqg.implicit(lambda y, a: {"x": y["x"] ** 2 - a, "z": y["z"] - a})(
    lambda a: {"x": 1.2 * jnp.sqrt(a), "z": a}
)
near = lambda k, a=2.0: lambda: jax.grad(eqg.implicit(lambda y, a: y - a)(lambda a: k * a))(a)


def failing(steps):
    """The solution is finite, and the solver says whether it failed."""
    matrix, gmres = SPIN + np.diag(X), lx.GMRES(1e-5, 1e-5, max_steps=steps)
    decorate = eqg.implicit(lambda y, a: matrix @ y - a, solver=gmres)
    solve = decorate(lambda a: np.linalg.solve(matrix, X))
    return lambda: jax.grad(lambda a: jnp.sum(solve(a)))(X)


# Of a symmetric matrix that need not be definite, and is not formed.
many = eqg.implicit(lambda y, a: jnp.roll(y, 1) + jnp.roll(y, -1) - a, tags=lx.symmetric_tag)(
    lambda a: a
)


def fixed(fn=lambda y: y / 2, y0=X, **options):
    return types(lambda y0: eqg.fixed_point(named("fn", fn), y0, **options), y0)


def in_optimistix(find, adjoint):
    solver = optx.BFGS(1e-5, 1e-5) if find == "minimise" else optx.Newton(1e-5, 1e-5)
    of = lambda y, x: jnp.square(y - x)
    return grad(lambda x: getattr(optx, find)(of, solver, ONE, x, adjoint=adjoint).value, ONE)


def event(condition=lambda t, y: y[0], f=lambda t, y: -y, t=ONE, **options):
    condition, f = named("height", condition), named("field", f)
    return grad(lambda t: eqg.event_time(condition, X, f, t, **options), t)


def jump(f, y=X):
    return grad(lambda t: eqg.jump(None, y, named("field", f), t), ONE)


def host(fn=np.sin, options=None, **rules):
    options = {"out": lambda x, *args, **kwargs: x, **(options or {})}
    function = named("host", lambda *args, **kwargs: fn(*args, **kwargs))
    return with_rules(eqg.host_function(function, **options), **rules)


pulled = lambda **rules: lambda: jax.grad(lambda x: jnp.sum(host(**rules)(x)))(X)
COSINES = lambda p, t: (np.sin(p[0]), np.cos(p[0]) * t[0])
by_columns = lambda n: pulled(options={"max_rule_calls": n}, jvp=COSINES)
pushed = lambda rule: lambda: jax.jvp(host(jvp=rule), (X,), (X,))
double = lambda x, *args: 2 * x
linear_host = eqg.linear_host_function(named("double", double), double)

# ---------------------------------------------------------------- layers


class Cell(eqx.Module):
    new: object

    def __call__(self, x, state):
        return self.new(state)


def run(make, xs=XS, *args, **options):
    return types(lambda xs: make(key=KEY)(xs, *args, **options), xs)


def layer(name, *args, **options):
    return ft.partial(getattr(nn, name), *(args or (3, 4)), **{"dtype": "float32", **options})


def with_cells(make, sizes):
    cells = lambda: (tuple(map(cell, sizes)),)
    return lambda key: eqx.tree_at(lambda layer: layer.cells, make(key=key), cells())


def recurrent(new=lambda s: s, state=X, *args):
    return run(lambda key: nn.Recurrent(Cell(new), initial_state=state), *args)


def model(rules, **options):
    return lambda: nn.quantize_model({"a": linear_layer(), "b": [np.ones(2)]}, rules, **options)


GRU, LSTM, TWO_LAYERS = layer("GRU"), layer("LSTM"), layer("GRU", num_layers=2, dropout=0.5)
BOTH_WAYS = layer("GRU", bidirectional=True)
linear_layer = lambda: eqx.nn.Linear(3, 4, key=KEY)
cell = lambda size=4: eqx.nn.GRUCell(3, size, key=KEY)
quantized = lambda w, x=None: lambda key: nn.Quantized(linear_layer(), w, x)
fsq = lambda levels, **options: lambda key: nn.FSQ(levels, **options)
lif = lambda *args, **options: types(lambda: nn.LIFCell(*args, **options))
at_rest = nn.LIFCell(3, 0.9, dtype="float32")
one_step = lambda x: run(lambda key: at_rest, x, at_rest.initial_state())

# fmt: off
WRONG = [
    # no rules, or other methods
    (lambda: eqg.custom_jvp(square)(ONE), "`square` has no forward | @"), (half(),
     "`square` has no complete | @"), (half(fwd=lambda x: x), "with `@square.def_bwd`."),
    (half(bwd=lambda r: r), "with `@square.def_fwd`."), (lambda: eqg.custom_jvp(3),
     "`fn` of `custom_jvp` | it is int (3)"), (lambda: eqg.custom_jvp(square,
     nondiff_argnums=(0,)), "`custom_jvp` was given an"),
    (lambda: eqg.custom_jvp(square).defjvp, "no attribute `defjvp`"),
    (lambda: eqg.custom_vjp(square).defvjp, "`custom_vjp` has no"),
    (grad(reverse(fwd=lambda perturbed, x: (x, x))), "the rule `fwd` | `perturbed` if"),
    (grad(reverse(lambda residuals, ct, perturbed: (ct,))), "'perturbed' | as Equinox does"),
    (grad(lambda x: forward(lambda p, t: p, keyword)(x,
     options={"scale": ONE}), X), "the rule `jvp` | 'options'"),
    # forward rules
    (grad(forward(lambda p, t: p[0])), "a pair | float32[3]"),
    (grad(forward(lambda p, t: (p[0], t[0], 1))), "`out, t_out`"),
    (jvp(forward(lambda p, t: p[0]), X[:2]), "float32[2]"),
    (grad(tangent(lambda y, t: jnp.sum(t))), "the tangent is float32[] | @"),
    (grad(tangent(lambda y, t: t.astype("float16"))), "the tangent is float16[3]"),
    (grad(forward(lambda p, t: (pair(*p), {"total": t[1]}), pair), *TREE),
     "'pair', 'sum': float32[]}"), (grad(forward(lambda p, t: ((p[0], N), (t[0], t[0])),
     lambda x: (x, N))), "at out[1]:"), (jvp(tangent(lambda y, t: t**2)), "power 2 | @"),
    (jvp(tangent(lambda y, t: y * t + 1)), "adds something that no"),
    (grad(tangent(lambda y, t: jax.lax.stop_gradient(t))), "`jvp` of `square` was | @"),
    (grad(forward(lambda p, t: (p[0] ** 2 + t[0], t[0]))), "at out | @ | `square("),
    (grad(forward(lambda p, t: ((p[0] ** 2,), (t[0],)))), "`jvp` of `square` | @"),
    (grad(forward(lambda p, t: (jnp.sum(p[0]), jnp.sum(t[0])))), "`square` returns float32[3]"),
    (grad(forward(lambda p, t: (eqx.Partial(lambda: p), None), lambda x: lambda: x)),
     "traced value | @"),
    # reverse rules
    (grad(reverse(fwd=lambda x: x)), "returned float32[3] | @"),
    (grad(reverse(fwd=lambda x: (x, x, x))), "`out, residuals`"),
    (grad(reverse(lambda r, ct: (ct, ct))), "`square` has 1: `x` | @"),
    (grad(reverse(lambda r, ct: ct), X[:1]), "one cotangent | `return (ct,)`"),
    (grad(reverse(lambda r, ct: ({"y": X}, None), fn=pair), *TREE),
     "at tree: the value is {'x' | @"), (grad(reverse(lambda r, ct: ({"a": {"y": ct}},),
     fn=lambda tree: tree["a"]["x"]), {"a": {"x": X}}), "at tree['a']: the value is {'x'"),
    (grad(reverse(lambda r, ct: ({"x": jnp.ones(4)}, None),
     fn=pair), *TREE), "the cotangent is float | [4]"), (grad(reverse(lambda r, ct: (N,))),
     "at x:"), (grad(reverse(lambda r, ct: (ct, 1.5), fn=lambda x, name: x), X, "n"),
     "at name:"), (grad(reverse(lambda r, ct: (ct, ct), fn=lambda x, n: x), X, N), "at n:"),
    (grad(reverse(lambda r, ct: (Holder(X[:2]), None), fn=lambda m, x: m(x)), Holder(X), X),
     "the cotangent is float32[2]"), (grad(reverse(fwd=STATIC, fn=pair), *TREE),
     "`fwd` of `pair` returned | @"),
    # values that are not arguments
    (grad(lambda s: reverse(fn=keyword)(X, options={"scale": s}), ONE),
     "at `options['scale']` | @"), (grad(closes_over, ONE), "at `a`, held by `<lambda>` | @"),
    (grad(held_by_argument, ONE), "at `a` | @"), (holds(lambda a: SimpleNamespace(a=a),
     lambda space: lambda x: x * space.a), "at `space`"), (holds(lambda a: type("Config", (),
     {"a": a}), lambda config: lambda x: x * config.a), "at `config`"),
    (types(lambda x: forward(lambda p, t: p, reads_reference)({"a": jax.new_ref(x)}), X),
     "was given a reference | is Ref"), (types(lambda t: jax.linear_transpose(
     tangent(lambda y, t: t), X)(t), X), "`square` was transposed, and"),
    (calls_itself_compiled, "`Holder` inside a"),
    (grad(lambda x: eqg.nondifferentiable({"a": N, "b": [x]})["b"]), "at x['b'][0]"),
    *((of(lambda x: eqg.nondifferentiable(x, "the rate")), "the rate was differentiated")
      for of in (grad, jvp)),
    (lambda: eqg.explain_zero(lambda x: jax.pure_callback(np.sin, x,
     x), ONE), "`<lambda>` has no derivative | `pure_callback`"),
    # shorthands, batching rules
    (grad(eqg.custom_gradient(square)), "it returned float32[3] | @"),
    (grad(eqg.custom_gradient(square), TWO[:, 0]), "a value and a | float32[2]"),
    (grad(elementwise(lambda y, x: x, lambda x: (x, x))), "(float32[3], float32[3]) | @"),
    (jvp(elementwise(lambda y, x: x, lambda x: N)), "not return one array of floats"),
    (grad(elementwise(lambda y, x: (x, x))), "2 partial derivatives | @"),
    (grad(elementwise(lambda y, x: TWO)), "number 0 of `square` | @"),
    (lambda: elementwise(3), "`derivative` of `elementwise`"),
    (grad(elementwise(lambda x: x)), "positional argument | as `derivative(out, *args)`"),
    (grad(eqg.custom_gradient(lambda x: (x, lambda: x))), "called as `gradient(ct)`"),
    (lambda: jax.grad(lambda m: jnp.sum(linear(lambda self, y: self.weight * y, lambda self, x:
     self.weight * x)(m, X)))(Holder(X)), "'weight' | or another by `argnum`"),
    (grad(elementwise((None, lambda out, x, y: jax.lax.complex(y, y)), lambda x, y: x * y), X,
     X), "tangent to a real output"), (grad(elementwise(lambda y, x: 2 * x.real, lambda x: (
     x.real**2)), Z), "a complex tangent to a"), (lambda: eqg.replace_gradient({"a": X}, [X]),
     "the surrogate is ["), (lambda: eqg.replace_gradient({"a": X}, {"a": X[:2]}),
     "the surrogate float32[2]"), (lambda: linear(None)(X), "`double` has no adjoint. | @"),
    (lambda: linear()({"a": N}), "at `x['a']`: int | @"), (grad(linear(fn=lambda x: (x, N))),
     "at out[1]: int | @"), (lambda: jax.grad(lambda x: jnp.sum(
     linear(lambda ct: {"a": ct})(x)))(X), "value is float32[3] | {'a': | @"),
    (grad(linear(fn=lambda x: x + 1)), "`double` is not linear in | @"), (grad((lambda r:
     linear(fn=lambda x: x * r[...]))(jax.new_ref(X))), "`double`, a function | is Ref"),
    (lambda: eqg.linear_function(square, argnum=-1), "`argnum` of | it is -1"),
    (lambda: eqg.linear_function(lambda self, x: self * x), "method, and | @ | `argnum=1`"),
    (batched(lambda size, flags, x: x), "float32[2,3] | @"),
    (stale, "no longer valid"),
    (batched(lambda size, flags, x: (x, True, x)), "`vmap` of `square` did not"),
    (batched(lambda size, flags, x: (x, (True, False))), "`vmap` of `square` did | @"),
    (batched(lambda size, flags, x: (jnp.sum(x, 1), True)), "without the batch axis | @"),
    *((of_batch(*fns), words) for *fns, words in (
        (lambda x: (x, "s"), lambda x: (x, "t"), "out[1]: `<lambda>` returns str ('s'), and"),
        (lambda x: (x, x), lambda x: (x, None), "out[1]: `<lambda>` returns float32[3], and"),
        (lambda x: (x, None), lambda x: (x, x), "out[1]: `<lambda>` returns None, and"),
        (lambda x: Holder(x), lambda x: Holder(x, 4), "out.size: `<lambda>` returns 3, and"))),
    # the conventions of others
    (lambda: eqg.jax_custom_jvp(square, nondiff_args=0), "`jax_custom_jvp` has no option `n"),
    (lambda: eqg.jax_custom_jvp(square)(X), "@ | `@square.defjvp`"),
    (lambda: eqg.jax_custom_vjp(square)(X), "@ | `square.defvjp(fwd, b"),
    (lambda: eqg.jax_custom_jvp(scaled, nondiff_argnums=(0, -4)), "they hold -4 | @"),
    (lambda: jax_reverse(nondiff_argnums=(1, 4), fn=lambda *args: args[0])(X, X),
     "and there are 2 arguments | @"), (lambda: jax_forward(fn=scaled)(X),
     "to the | 'scale' | @"), (lambda: jax_forward(fn=keyword_only)(X, scale=ONE),
     "@ | `eqx_grads.custom_jvp`"),
     (grad(jax_reverse(fwd=lambda x: (x, x, x))),
     "`fwd` of `square` did not"), (grad(jax_reverse(lambda r, ct: ct), X[:1]),
     "did not return one cotangent"), (grad(jax_reverse(lambda r, ct: ({"b": ct},),
     lambda x: (x["a"], x), lambda x: x["a"]), {"a": X}), "is {'a': float32[3]} | @"),
    (grad(lambda p: jax_reverse(lambda p, r, ct: (ct, ct),
     fn=scaled, nondiff_argnums=2)(X, X, p), ONE), "with respect to an argument"),
    (grad(filter_reverse(fn=lambda x, tree: x), X, {"a": [N, X]}), "at `tree['a'][1]`"),
    (grad(lambda s: filter_reverse(fn=keyword_only)(X, scale=s), ONE), "`scale`"),
    (grad(filter_reverse(fwd=lambda perturbed, x: (x,) * 3)), "did not return a pair"),
    (grad(filter_reverse(fwd=lambda x: (x, x))), "fwd(perturbed, vjp_arg"),
    (grad(filter_reverse(bwd=lambda r, ct: ct)), "grad_out, perturbed, vjp_arg"),
    # control flow
    (scan(lambda h, x: h), "float32[3] | @"), (scan(lambda h, x: (h, x, x)), "`carry, y`"),
    (scan(lambda h, x: h, X[:2]), "it returned float32[2]"), (returns(lambda h: {"a": h}),
     "carry: it was float32[3] | @"), (returns(lambda h: {"a": [h["a"][0]]}, {"a": [X, X]}),
     "at carry['a'][1]: it was"), (returns(lambda h: {"a": (h["a"][0], {"c": X})},
     {"a": (X, {"b": X})}), "at carry['a'][1]['b']: it was"), (returns(lambda h: h[:2]),
     "float32[3], and is float32[2]"), (returns(lambda h: h.astype("float16")),
     "float32[3], and is float16[3]"), (returns(lambda h: [h[0], "b"], [X, "a"]),
     "str ('a'), and is str ('b')"), (returns(lambda h: (h[0], N), (X, X)),
     "it was float32[3], and is int"), (returns(lambda h: ("no", h[1]), (X, X)),
     "at carry[0]: | str ('no')"), (scan(xs={"a": XS, "b": ONE}), "`xs['b']` is float32[]"),
    (returns(lambda h: (h[0], line(1, 3)), (X, line(1, 2))), "at carry[1]"),
    (cond([X] * 6, [ONE] * 6), "at out[4]: `one` returns float32[3], and `other` float32[]"),
    (cond({"a": X}, {"a": "no"}), "float32[3], and `other` str ('no')"),
    (scan(xs={"a": XS, "b": XS[:3]}), "`xs['b']` is float32[3,3]"), (scan(xs=None),
     "takes `length=`"), (scan(online=True, checkpoint=2), "is 2, `truncate` is None"),
    (scan(online="e-prop", truncate=3), "is None, `truncate` is 3"), (scan(checkpoint="replay",
     unroll=2), "`unroll` is given"), (scan(PRINTS, checkpoint="replay"),
     "can't replay these steps"), (scan(PRINTS, online=True), "These steps can't run in an"),
    (grad(lambda x: eqg.filter_scan(lambda h, x: (h * x[0], h), X, (x, XS), online=True), XS),
     "float32[4,3] of `xs`"), (grad_scan(MATRIX, online=True), "carry depends on other | @"),
    (grad_scan(SHIFTS, online=True), "on other elements of carry"), (grad_scan(
     lambda w, h, x: (w * jnp.conj(h), None), X + 1j, h=X + 1j, online=True), "by `conj`"),
    (grad_scan(lambda w, h, x: (h + jnp.cumsum(w), None), online=True),
     "enters it by `cumsum` | @"), (grad_scan(lambda w, h, x: (clipped(h * w, 1), None),
     online=True), "the backward rule of | @"), (grad_scan(
     lambda w, h, x: (halved(h * w), None), online=True), "scale_gradient`, which has a rule"),
    (grad_scan(lambda w, h, x: (chosen(h * w), None), online=True), "is not seen to be linear"),
    (scan(carry_gradient=lambda h: h[:2]), "`carry_gradient` of"), (loop(lambda h: h[:2]),
     "and is float32[2] | @"), (cond({"a": X},
     {"b": X}), "at out['b']: | @"), (cond({"a": [X, (X,)]}, {"a": [X, [X]]}),
     "out['a'][1]: `one` returns ("), (cond(Holder(X), Holder(X, 4)), "one` returns 3, and"),
    (cond(X, X.astype("float16")), "and `other` float16[3]"), (cond(X, X, X > 0),
     "bool[3] | `jnp.where`"), (cond(X, X, np.complex64(1)), "it is complex64[]"),
    (recurrence(a=[X]), "`a` of `linear_recurrence` is"), (recurrence(b=XS[:2], h0=X),
     "`h0` is float32[3]"), (recurrence(h0=XS[:2]), "`h0` is float32[2,3]"), (recurrence(ONE,
     ONE), "is float32[], `h0` is None"),
    # gradient ops and tangents
    (lambda: eqg.scale_gradient({"a": X}, XS), "x['a'] is float32[3]"),
    (lambda: eqg.scale_gradient(X, 1j), "x is float32[3]"), (lambda: eqg.scale_gradient(X, "2"),
     "str ('2')"), (lambda: eqg.clip_gradient(X, 2.0, 1.0), "`min` is 2.0, `max` is 1.0"),
    (lambda: eqg.clip_gradient(Z, -1j, 1.0), "`clip_gradient` was given a"),
    (lambda: eqg.clip_gradient(X, jnp.array([0.0, 2.0, 0.0]), 1.0), "that exceeds `max`"),
    (lambda: eqg.nn.FixedPoint(lambda x, z: z, (3, 0)), "`shape` of `FixedPoint` | it is 0"),
    (lambda: eqg.testing.check_rule(jnp.sin, ONE, tolerance=-1.0), "of `check_rule` is not"),
    (lambda: eqg.testing.check_rule(jnp.sin, ONE, reference=3), "`reference` of `check_rule`"),
    (lambda: eqg.clip_gradient({"a": X}, 0.0, XS), "x['a']"),
    (lambda: eqg.noise_gradient([X], key=KEY, stddev=XS), "`stddev` of | x[0] is float32[3]"),
    (lambda: eqg.clip_gradient_norm({"a": XS, "b": X}, 1.0, axis=1),
     "that `x['b']` does not have"), (lambda: eqg.reversal_schedule(X - 1.5),
     "`progress` is array([-0.5"), (lambda: eqg.mask_gradient({"a": X}, {"b": X > 1}),
     "different structure than `x`"), (lambda: eqg.mask_gradient({"a": X}, {"a": X}),
     "x['a']: `mask` is float32[3]"), (lambda: eqg.mask_gradient([X, X], [True, XS > 1]),
     "x[1] is"), (lambda: eqg.psum_gradient(X, "batch"), "`psum_gradient` was given the"),
    (grad(lambda x: eqg.on_backward(x, named("show", lambda ct: ct[:2]))),
     "the result is float32[2] | @"), (grad(lambda x: eqg.on_backward({"a": x},
     lambda ct: {"a": ct["a"] > 0})), "at gradient['a']:"), (grad(lambda x: eqg.on_backward(x,
     lambda ct: jax.lax.complex(ct, ct))), "result is complex64[3]"),
    (grad(eqg.zero_safe(named("branch", lambda x: x if x[0] > 0 else -x))),
     "`zero_safe` can't trace | @"), (lambda: tangents.add(T, {"a": X}),
     "Tangents of different"), (lambda: tangents.add(X, X[:2]), "float32[3] | float32[2]"),
    (lambda: tangents.scale(X, XS), "the factor float32[4,3]"), (lambda: tangents.scale(X, 1j),
     "float32[3]"), (lambda: tangents.scale(N, X), "int | `scale(t, s)`"),
    (lambda: tangents.scale(X, "s"), "The factor `s` of a tangent"),
    (lambda: tangents.where(XS > 0, X, None), "the tangent float32[3]"),
    (lambda: tangents.of(Holder(X), bias=X), "`bias`, which is not a field"),
    (lambda: tangents.of(ONE, leaf=X), "`leaf`, which is not a field | are: none"),
    (lambda: tangents.of(Holder(X), size=3), "`size`, which is a static"),
    (lambda: tangents.of(Keyless(X), a=X), "`a`, which is not a | `register_pytree_with_keys`"),
    (lambda: tangents.project(X[:2], X), "the cotangent is float32[2]"),
    (lambda: tangents.project(T, {"a": X, "b": [XS, N]}), "the value is float32[4,3]"),
    (lambda: tangents.project(X, N), "can't be differentiated:"),
    (lambda: tangents.materialize(T, {"a": X[:2], "b": None}), "the tangent is float32[2]"),
    (lambda: tangents.materialize(X, Z), "The tangent of a real value"),
    # losses
    (chunked(axis=(None, 0, 0)), "and `axis` is (None, 0, 0)"), (chunked(axis=(None, 2)),
     "float32[4,3], its axis is 2"), (chunked(lambda x: jnp.sum(x), XS), "`(axis,)`"),
    (chunked(lambda x, y: x[0, 0], XS, XS[:3], axis=(0, 0)), "float32[4,3], its axis is 0"),
    (chunked(lambda w, x: x), "it returned float32[2,3] | @"),
    (chunked(lambda w, x: jnp.sum(x).astype("complex64")), "it returned complex64[]"),
    (entropy(labels=XS[:, 0]), "`labels` is float32[4]"), (entropy(labels=LABELS[:3]),
     "float32[5,3], `labels` is int"), (entropy(weight=W[:, :2]), "`weight` is float32[5,2]"),
    (entropy(weight=W[:0]), "`weight` is float32[0,3]"), (entropy(bias=X),
     "`bias` is float32[3]"), (entropy(label_smoothing=1.5), "from zero to one | it is 1.5"),
    (entropy(z_loss=-0.1), "`z_loss` of | it is -0.1"), (entropy(axis_name="model"),
     "`axis_name` of | it is 'model'"),
    # solvers and the host
    (lambda: eqg.implicit(square)(3), "is int (3)"), (solved(has_aux=True), "float32[3] | @"),
    (solved(fn=lambda a: (a, a, a), has_aux=True), "did not return a pair"),
    (solved(lambda y: y), "included: 1 | @"), (solved(lambda y, a: y[:2]), "float32[2] | @"),
    (near(1.03), "more than 1 %"), (near(np.nan), "is not small at"),
    (fixed(solver=3), "The `solver` of `fixed_point`"),
    (in_optimistix("minimise", solvers.OneStepAdjoint()), "the solver is `BFGS`, and `OneStep"),
    (lambda: eqg.fixed_point(named("fn", lambda y: 2 * y), 1.0), "iterates became infinite"),
    *((singular(f, tags), "is singular at the solution to") for f, tags in (
      (lambda y: TWO[0] * jnp.sum(y), ()), (lambda y: TWO[0] * jnp.sum(y), lx.symmetric_tag),
      (lambda y: X * y - y, ()), (lambda y: PROGRESSION @ y, ()))),
    (lambda: jax.vmap(jax.grad(lambda a: unfinished(a)["x"]))(X), "at residual['x']: | 1 %"),
    *((solved(residual, lambda a: (a, X, 3)), words) for residual, words in (
        (lambda y, a: (y[0] - a,), "at residual[1]: the solution is float32[3]"),
        (lambda y, a: (y[0], jax.lax.complex(y[1], y[1]), y[2]), "the residual complex64[3]"),
        (lambda y, a: [y[0] - a, y[1], 3], "the residual ["))),
    (failing(1), "did not reach its"),
    (solved(lambda y, a: jnp.sum(y)), "Is this an objective? Give"),
    (solved(lambda y, a: y > a), "the residual None | @"), (fixed(lambda y: (y, y, y),
     has_aux=True), "`fn` did not return a | @"), (fixed(has_aux=True), "float32[3]"),
    (fixed(lambda y: y["a"], {"a": X}), "and returned float32[3] | @"),
    (fixed(lambda y: {"a": y["a"][:2]}, {"a": X}), "and returned float32[2] | @"), (fixed(y0=[X,
     N]), "y0[1] is int"), (fixed(y0=()), "`y0` is ()"), (fixed(max_steps=0), "is 0"),
    (lambda: solvers.PhantomAdjoint(5, tau=1.5), "it is 1.5"),
    (lambda: solvers.PhantomAdjoint(0), "not an integer of at least 1"),
    (lambda: solvers.Anderson(1e-3, 1e-3, history=0), "it is 0"), (event(t=X),
     "`t` of `event_time` is not one real"),
    (event(where=X > 0), "`where` of `event_time` is not"),
    (event(lambda t, y: y), "float32[3] | @"), (event(lambda t, y: y[0] < 0), "bool[] | @"),
    (event(lambda t, y: None), "None | below zero"),
    (event(lambda t, y: jnp.float32(1)), "`height`, the `condition` | @"),
    (event(f=lambda t, y: y[:2]), "derivative is float32[2] | @"),
    (jump(f=lambda t, y: {"a": y}), "`field`, the `f` of `jump`,"),
    (jump(f=lambda t, y: {"a": y["a"][0]}, y={"a": X}), "derivative is float32[] | @"),
    (lambda: eqg.host_function(square), "has to know what `square` | @"),
    (grad(host()), "`host` was | @"), (lambda: eqg.explain_memory(jnp.sum, X,
     compiled=2), "The `compiled`"), (grad(eqg.host_function(lambda x: x, out=lambda x: x)),
     "`def_bwd` or `def_jvp` of the function at line | @"),
    (grad(lambda s: host(bwd=lambda r, ct: (ct,))(X, scale=s), ONE), "at `scale` | @"),
    (grad(jax.grad(lambda x: jnp.sum(host(bwd=lambda r, ct: (ct,))(x) ** 2))),
     "The rule `bwd` was | of `host`"), (types(host(), KEY), "key<fry>[] | @"),
    (types(eqg.host_function(square, out=lambda: X), X), "`out` of `square` has | @"),
    (types(host(options={"out": lambda x: x + 1}), X), "`out` of `host` computes | @"),
    (types(host(options={"out": lambda x: KEY}), X), "does not say what is returned"),
    *((types(host(options={"out": kind}), X), "`host` does not say what | dtype alone")
      for kind in (int, float, complex, np.float32, jnp.float32, np.dtype("float32"),
      lambda x: x.shape)),
    (by_columns(2), "takes 3 calls | `max_rule_calls` is 2"),
    *((ft.partial(host, options=options), words) for options, words in (
        ({"finite_difference": "forward"}, "`finite_difference` of"),
        ({"max_rule_calls": -1}, "`max_rule_calls` of"),
        ({"step": 1e-3}, "useful without `finite_difference`"),
        *(({"finite_difference": "central", "step": step}, "`step` of `host_function` is not")
          for step in (0.0, "no", (1e-3, np.inf))))),
    (types(lambda a: host(lambda x: x * a)(X), ONE), "at `a`"),
    (lambda: jax.jvp(lambda a: host(lambda x, y: x * a)(a, X), (X,), (X,)), "at `a`"),
    (lambda: host(lambda x: {"a": x})(X), "promised float32[3] | {'a'"),
    (lambda: host(lambda x: x[:2])(X), "returned float32[2]"),
    (lambda: host(lambda x: x * 1j)(X), "`host` returned a different dtype"),
    (lambda: host(lambda x: 99 * np.int16(x))(np.int8([9])), "int8[1], returned int16[1]"),
    (pulled(bwd=lambda r, ct: ct), "`host` has 1: `args[0]`"),
    (pulled(bwd=lambda r, ct: ({"a": ct},)), "a cotangent that does not have the struct"),
    (pushed(lambda p, t: (p[0], p[0][:1])), "at the tangent of out: promised "),
    (pulled(bwd=lambda r, ct: (ct[:2],)), "`bwd` of `host` | float32[2]"),
    (pulled(bwd=lambda r, ct: (ct,), fwd=lambda x: x), "`fwd` of `host` did not"),
    (lambda: jax.vmap(host(lambda x: x / "x", options={"vmap_method": "expand_dims"}))(TWO),
     "called with float32[2,3], under `vmap` of float32[3]"),
    *((call(eqg.host_function(lambda: X / "x", out=X)), "called with no arrays")
      for call in (lambda f: f, jax.jit)),
    (pushed(lambda p, t: p[0]), "`jvp` of `host` did not"), (lambda: linear_host(N),
     "at `x`: int | @"), (grad(linear_host, X, X), "`double` was | @"),
    # safe, ste, surrogates
    (lambda: safe.pairwise_distance(XS, XS[:, :2]), "`y` is float32[4,2]"),
    (lambda: safe.arctan2(X, XS[:, 0]), "do not broadcast together"), (lambda: safe.arctan2(X,
     Z), "not an array of real numbers"), (lambda: safe.eigh(XS), "`a` is float32[4,3]"),
    (lambda: safe.svd(X), "`a` is float32[3]"), (lambda: safe.logsumexp(X, b=W[:, :2]),
     "`b` is float32[5,2]"), (lambda: safe.norm(XS, ord=1), "is 1.0, the axes are (0, 1)"),
    (lambda: safe.norm(X, ord="fro"), "`ord` is str ('fro')"),
    (lambda: safe.logsumexp(X, where=XS > 0), "`where` is bool[4,3]"),
    (lambda: safe.logsumexp(X, where=X), "`where` is float32[3]"),
    (lambda: safe.norm(XS, axis=(1, -1)), "`axis` is (1, -1)"), (lambda: safe.where(X, jnp.log,
     X, 0.0), "`cond` is float32[3] | `x > 0`"), (lambda: safe.where(X > 0, jnp.log, X, 0.0,
     substitute=1j), "is float32[3]"), (lambda: safe.where(X > 0, lambda x: (x, x), X, 0.0),
     "function of `safe.where` | @"), (lambda: safe.where(X > 0, jnp.log, X, XS),
     "float32[4,3]"), (lambda: safe.where(XS > 0, jnp.log, X, 0.0), "bool[4,3]"),
    (lambda: ste.vector_quantize(XS, W[:, :2]), "`codebook` is float32[5,2]"),
    (lambda: ste.vector_quantize(XS, W[:0]), "`codebook` is float32[0,3]"), (lambda: ste.fsq(XS,
     (8, 5)), "`levels` is (8, 5)"), (lambda: ste.fsq(X, (8, 5, 1)),
     "`levels` of | it is (8, 5, 1)"),
    (lambda: ste.bernoulli(X, key=KEY), "is 1.0, the largest 3.0"),
    (lambda: ste.bernoulli(-X, key=KEY), "is -3.0, the largest -1.0"), (lambda: ste.clip(X, 2.0,
     1.0), "`min` is 2.0, `max` is 1.0"), (lambda: ste.clip(X, XS, 5.0),
     "float32[3] | float32[4,3]"), (lambda: ste.top_k(X, 4),
     "and `x` has 3 along its axis"), (lambda: ste.top_k(X, 0), "`k` is 0, and `x` has 3"),
    (lambda: ste.fake_quantize(X, ONE, zero_point=128.0), "integers are from -128 to 127"),
    (lambda: ste.fake_quantize(X, ONE, bits=25), "`bits` of | it is 25"),
    (lambda: ste.fake_quantize(X, ONE, bits=1), "`bits` of | it is 1"),
    (grad(lambda v: surrogates.spike(v, surrogates.atan(XS))), "array is float32[3]"),
    (grad(lambda v: surrogates.spike(v, named("mine", lambda v: v[:2]))),
     "array is float32[3], the"), (grad(lambda a: surrogates.spike(X, Holder(a)), ONE),
     "at surrogate.weight"),
    # layers
    (run(layer("GRU", dtype="int32")), "The `dtype` of `GRU`"),
    (lambda: nn.Recurrent(eqx.nn.GRUCell), "The `cell` of `Recurrent`"),
    (lambda: nn.Recurrent([[cell], [cell] * 3]), "is not a cell, or layers"),
    (lambda: nn.Recurrent(None), "it is None"), (run(lambda key: nn.Recurrent([cell(),
     square])), "`Recurrent` does not know the"),
    (types(lambda x: eqg.explain_nan(lambda m: jnp.sum(m * x), X, x), X), "a transformed"),
    (run(GRU, X), "`xs` is float32[3]"), (run(GRU, [XS, XS]),
     "`xs` is list | jnp.stack"), (run(GRU, XS[:, :2]), "and `input_size` is 3"),
    (run(layer("RNN"), XS.astype("complex64")), "`xs` is complex64"), (run(GRU, BATCH,
     lengths=np.array([1, 2, 3])), "int | [3] | batch of 2"), (run(GRU, XS,
     lengths=np.array([1])), "one sequence of 4 steps"), (run(GRU, BATCH,
     lengths=np.array([1, 5])), "array([1, 5])"), (run(GRU, BATCH, W[:1]),
     "float32[1,3], and has to be float32[2,4]"), (run(LSTM, XS, (X, "no")), "'no'"), (run(GRU,
     XS, np.ones(4, bool)), "bool[4], and has to be float32[4]"), (run(TWO_LAYERS),
     "The `key` of `GRU`"), (run(layer("GRU", dropout=0.5)), "`dropout` of `GRU` | it is 0.5"),
    (run(layer("LSTM", num_layers=2, dropout=1.5)), "it is 1.5"),
    (run(layer("LRU", 3, 4, 4, r_min=0.9, r_max=0.5)), "`r_min` is 0.9, `r_max` is 0.5"),
    (run(layer("S5", 3, 4, 6, blocks=2)),
     "`state_size` of `S5` | it is 6"), (run(layer("S5", 3, 4, 4, min_step=1.0, max_step=0.1)),
     "`S5` needs"), (run(with_cells(BOTH_WAYS, (4, 2))), "(4,), (2,)"),
    (recurrent(lambda s: (s, s)), "it was given float32[3]"), (recurrent(lambda s: s[:2]),
     "and returned float32[2]"), (recurrent(state=None), "`Recurrent` does not know the"),
    (run(layer("LIF", None, 3, beta=0.9), XS[:, :2]), "and `input_size` is 3"),
    (run(layer("LIF", beta=0.9),
     XS.astype("complex64")), "`xs` is complex64"), (lambda: nn.LIF(3, 4, beta=0.9),
     "The `key` of `LIFCell`"), (lif(3, 0.9, learn="rho"), "The `learn` of `LIFCell`"), (lif(3,
     0.9, rho=0.9, threshold=None), "The `threshold` of `LIFCell` | do not spike"), (lif(3,
     1.5), "is 1.5 | exp(-dt / tau)"), (lif(3, X[:2] / 4), "and there are (3,) neurons"),
    (lif((2, 0), 0.9), "The `hidden_size` of `LIFCell` | it is 0"), (lif((2, 3), 0.9,
     input_size=2), "not a number of neurons | (2, 3)"), (one_step(XS), "of shape (3,)"),
    (one_step(Z), "`x` is complex64[3]"), (run(lambda key: at_rest, X, X), "not a state of"),
    (run(quantized(lambda w: w[:2]), X),
     "`<lambda>` was given float32"), (run(quantized(None, lambda x: x > 0), X),
     "returned bool[3]"), (run(quantized(None, nn.LSQ(4)), X), "The `input_quantizer` of"),
    (lambda: nn.Quantized(cell()), "`GRUCell`, its weight is a `NoneType`"),
    (lambda: nn.FakeQuantize(8, scale=0.0),
     "the smallest is 0.0"), (lambda: nn.LSQ(8)(X), "and called with float32[3]"),
    (lambda: nn.LSQ(8).fit(X[:0]), "float32[0]"), (lambda: nn.LSQ(8, channel_axis=1).fit(X),
     "`channel_axis` is 1"), (lambda: nn.LSQ(8, scale=1.0).encode(X * np.nan),
     "`LSQ.encode` was given"), (lambda: nn.FSQ((3, 5), axis=0), "it is 0"),
    (run(fsq((3, 5)), XS), "is -1, and the size is 2"), (run(layer("VectorQuantizer", 5, 3,
     decay=1.0), XS), "`decay` of `VectorQuantizer`"),
    (model({eqx.nn.Linear: (None, nn.LSQ(4))}), "`['a']`"), (model({eqx.nn.Conv: nn.LSQ(4)}),
     "`['a']`: Linear"), (model({"['b'][0]": nn.LSQ(4)}), "there is `['b'][0]`: an array"),
    (model({eqx.nn.Linear: nn.LSQ}), "does not say how to quantize: rule 0, Linear"),
    (model({3: nn.LSQ(4)}), "which layers it is for: rule 0, 3"),
    (model({eqx.nn.Linear: nn.LSQ(4)}, call=square), "a `call`, and no batch"),
    (model({eqx.nn.Linear: nn.LSQ(4)}, calibrate=X), "a batch, and nothing to calibrate"),
    (lambda: nn.to_integers(linear_layer()), "the model itself: not quantized"),
]
RIGHT = [
    # forward rules
    grad(forward(lambda p, t: [p[0] ** 2, t[0]])), grad(forward(lambda p, t: (p[0] ** 2,
     None))), grad(tangent(lambda y, t: jnp.where(y > 1, t, 0.0) / y)),
    jvp(forward(lambda p, t: (p[0] ** 2 + 0 * t[0], t[0]))),
    jvp(tangent(lambda y, t: jax.lax.top_k(y, 3)[0] * t)), grad(forward(lambda p, t: ((p[0], N),
     (t[0], N)), lambda x: (x, N))), grad(forward(lambda p, t: (pair(*p),
     {"sum": t[1], "name": None}), pair), *TREE),
    # reverse rules
    grad(reverse(fwd=lambda x: [square(x), x])), grad(reverse(lambda r, ct: [ct])),
    grad(reverse(lambda r, ct: (ct.astype("float16"),))),
    grad(lambda x: x * reverse(fn=jnp.argmax)(x).astype(x.dtype)),
    grad(reverse(lambda r, ct: (jnp.stack([ct, ct]),))), grad(reverse(lambda r, ct: (ct, N),
     fn=lambda x, n: x), X, N), grad(reverse(lambda r, ct: (ct, "m"), fn=lambda x, name: x), X,
     "n"), lambda: eqg.custom_vjp(square).def_bwd(lambda residuals, ct, *, perturbed: (ct,)),
    # values that are not arguments
    grad(lambda s: reverse(fn=keyword)(X * s, options={"scale": ONE}), ONE),
    grad(lambda a: closes_over(jax.lax.stop_gradient(a)), ONE),
    grad(lambda a: forward(lambda p, t: (p[0] ** 2, a * t[0]))(X), ONE),
    grad(lambda a: forward(lambda p, t: (p[0](p[1]), t[1]), lambda f, x: f(x))(Holder(a), X),
     ONE), holds(Holder, lambda holder: lambda x: x * holder.weight),
    holds(lambda a: {"a": [a]}, lambda kept: lambda x: x * kept["a"][0]),
    types(lambda t: jax.linear_transpose(tangent(lambda y, t: 2 * t, lambda x: 2 * x), X)(t),
     X), types(lambda x: forward(lambda p, t: p, reads_reference)({"a": x}), X),
    # shorthands, batching rules
    grad(eqg.custom_gradient(lambda x: [x, lambda ct: ct])),
    grad(elementwise([lambda y, x: np.float32(2)])), grad(elementwise(lambda y, x: X[:1])),
    grad(elementwise(lambda y, x: y, lambda x: x * 1j), X.astype("complex64")),
    lambda: eqg.replace_gradient(X, X.astype("float16")), grad(linear(lambda b, ct: ct,
     fn=lambda a, x: x, argnum=1), N, X), grad(linear(lambda ct: ct.astype("float16"))),
    batched(lambda size, flags, x: [x**2, True]), batched(lambda size, flags, x: (x[0] ** 2,
     False)),
    # the conventions of others
    grad(jax_forward()), grad(jax_forward(fn=keyword_only)),
    grad(jax_forward(lambda s, n, p, t: (p[0], t[0]), scaled, nondiff_argnums=(-2,),
     nondiff_argnames="power"), X, 2),
    lambda: jax_reverse(fn=lambda *args: args[0], nondiff_argnums=(0,))(X, X),
    grad(lambda n: jax_forward(lambda n, p, t: (p[0], t[0]), scaled, nondiff_argnums=2)(X, X,
     n), ONE), grad(jax_terms(lambda t, out, x: t)),
    grad(jax_reverse(lambda r, ct: [SYMBOLIC(jax.typeof(X))])),
    grad(jax_reverse(lambda r, ct: (ct,), lambda x: [x["a"], x], lambda x: x["a"]), {"a": X}),
    grad(filter_reverse(lambda r, ct, *args: {"a": ct}, fn=lambda x, tree: x["a"]), {"a": X},
     {"b": N}), grad(filter_reverse(fwd=lambda perturbed, x: [x, x])),
    grad(filter_reverse(fn=scaled, fwd=lambda perturbed, x, s, p: (x, s)), X, 3, 2),
    grad(filter_forward(lambda p, t: [p[0], None])),
    # control flow
    scan(lambda h, x: [h + x, None]), scan(lambda h, x: (h + 0.5, None), 1.0, xs=None,
     length=np.int32(0)), scan(lambda h, x: ((h[0] + 1, *h[1:]), None), (1, jnp.sin, "a", X)),
    scan(lambda h, x: (h, None), (X, X), carry_gradient=lambda h: eqg.scale_gradient(h, 2.0)),
    scan(carry_gradient=lambda h: jax.lax.stop_gradient(h)), scan(online="e-prop"),
    scan(checkpoint="replay", unroll=1), grad_scan(lambda w, h, x: (h * w + x, None),
     online=True), grad_scan(MATRIX, online="e-prop"),
    grad(lambda h: eqg.filter_scan(lambda h, x: (2 * h, x), h, XS, online=True)[0], X), cond((X,
     "a", 1), (X + 1, "a", 1), np.int32(1)), recurrence(a=X, b=XS, h0=ONE), recurrence(a=ONE,
     b=X),
    # gradient ops and tangents
    lambda: eqg.scale_gradient({"a": XS, "n": N}, X), lambda: eqg.scale_gradient(Z,
     np.complex64(1j)), lambda: eqg.clip_gradient(X, 1.0, 1.0),
    lambda: eqg.clip_gradient_norm({"a": XS, "n": ONE.astype(int)}, 0.0, axis=(0, -1)),
    lambda: eqg.normalize_gradient(XS, axis=-2, eps=0.0), lambda: eqg.reversal_schedule(0.0),
    lambda: eqg.mask_gradient([X, {"b": X}], [X > 1, False]),
    lambda: jax.vmap(lambda x: eqg.psum_gradient(x, ("i",)), axis_name="i")(X),
    lambda: tangents.add(T, {"a": None, "b": None}, None),
    lambda: tangents.scale(XS, X), lambda: tangents.where(X > 1, XS, None),
    lambda: tangents.of(Holder(X), weight=None), lambda: tangents.project(XS, X),
    lambda: tangents.project({"a": XS, "b": None}, T), lambda: tangents.materialize(Z, X),
    # losses
    chunked(lambda w, x: jnp.sum(x), axis=(None, -2), chunk=5),
    chunked(lambda w, t: jnp.sum(t["a"]), X, {"a": XS, "b": XS.T}, axis=(None, {"a": 0,
     "b": 1})), entropy(bias=W[:, 0], chunk=1, ignore_index=None, label_smoothing=1,
     z_loss=3.0), entropy(X, labels=LABELS[0], reduction="none"),
    # solvers and the host
    *(ft.partial(eqg.implicit, square, tolerance=n) for n in (0.0, N[0], ONE)), solved(),
    solved(fn=lambda a: (a, None), has_aux=True),
    solved(lambda y, a, scale=1: {"y": y["y"] - a, "n": None}, lambda a: {"y": a,
     "n": 3}), fixed(lambda y: [y / 2, N], has_aux=True, max_steps=1),
    lambda: solvers.PhantomAdjoint(1, tau=1.0), event(t=ONE, where=np.bool_(True)),
    grad(lambda t: eqg.event_time(lambda t, y: y[0], X, lambda t, y: -y, t)[0], np.float16(1)),
    event(lambda t, y: t), jump(f=lambda t, y: {"a": y["a"], "n": None}, y={"a": X, "n": 3}),
    jump(lambda t, y: Keyless(Keyless(-y.a.a)), Keyless(Keyless(X))),
    near(1.005), near(1.03, jnp.bfloat16(2)), failing(9),
    fixed(lambda y: None if y.weak_type else y, 0.0),
    types(jax.grad(lambda a: jnp.sum(many(a))), np.ones(257, "float32")),
    *(in_optimistix(*pair) for pair in (("fixed_point", solvers.OneStepAdjoint()),
      ("minimise", solvers.ImplicitAdjoint()))),
    types(host(), X), by_columns(3), types(host(options={"out": 1.0}), X),
    pulled(options={"finite_difference": "central", "step": (1e-3,)}),
    pulled(fn=lambda x: x > 0, options={"finite_difference": "central"}),
    pulled(bwd=lambda r, ct: (ct + 1j,)),
    types(host(options={"out": Holder}), X),
    types(lambda x: host(options={"out": lambda x, **n: np.ones(n["n"])})(x, n=3), X),
    grad(lambda s: host(bwd=lambda r, ct: (ct,))(X * s, scale=X), ONE),
    pulled(bwd=lambda r, ct: [ct], fwd=lambda x: [x, None]), grad(linear_host, X, N),
    # safe, ste, surrogates
    lambda: safe.eigh(SPIN), lambda: safe.svd(XS), lambda: safe.norm(XS, axis=-1, ord=np.inf),
    lambda: safe.where(XS[:, :1] > 0, jnp.log, XS, XS[:1]), lambda: safe.where(X > 0, jnp.log,
     X, np.float16(0), substitute=np.float16(1)), lambda: ste.fsq(X, (2, 2,
     2**29 - 1)), lambda: ste.clip(X, 1.0, 1.0), lambda: ste.top_k(X, 3),
    lambda: ste.fake_quantize(X, ONE, zero_point=127.0),
    grad(lambda v: surrogates.spike(v, lambda v: jnp.float16(1))),
    grad(lambda v: surrogates.spike(v, surrogates.atan(X))), grad(lambda v: surrogates.spike(v,
     Holder(ONE))),
    # layers
    run(GRU, BATCH, lengths=[0, 4]), run(GRU, BATCH, lengths=np.ones(2, "int8")), run(GRU,
     XS[:0], np.ones(4, "float32"), lengths=0), run(TWO_LAYERS, inference=True),
    run(layer("GRU", num_layers=2, dropout=1), key=KEY), run(layer("LSTM", proj_size=3)),
    run(layer("LRU", 3, 4, 4, r_min=0.0, r_max=1.0)), run(layer("S5", 3, 4, 4, blocks=2,
     min_step=0.1, max_step=0.1)), run(with_cells(BOTH_WAYS, (4, 4))),
    recurrent(lambda s: s, None, BATCH, XS[:2]), recurrent(lambda s: s.astype("float16")),
    run(layer("LIF", None, 3, beta=0.9), XS), lif(3, np.array([0.0, 1.0, 0.5])), lif((2, 3),
     XS[:1] / 4), one_step(N), run(quantized(lambda w: w), X), run(fsq((3, 5,
     5), axis=-2), XS[:3]), lambda: nn.FSQ((3, 5), axis=-2).decode(N),
    run(layer("VectorQuantizer", 5, 3, decay=0.0), XS), model({eqx.nn.Linear: (None,
     nn.LSQ(4, scale=1.0))}), model([(eqx.nn.Linear, nn.LSQ(4))]),
    # whatever the dtypes, the keywords and the sizes
    lambda: jax.grad(forward(lambda p, t: (p[0], t[0]), lambda x: x if x > 0 else -x))(2.0),
    grad(forward(lambda p, t, **options: (p[0], t[0]), keyword_only)),
    grad(lambda x: eqg.replace_gradient(x, jax.lax.complex(x, x))),
    grad(lambda h: eqg.filter_scan(lambda h, x: ((h[0], h[1] * h[0][0]), x), (h, 1.0), XS,
     checkpoint="replay")[0], X.astype("float16")),
    types(lambda h: eqg.filter_while_loop(lambda h: h[0] < 9, lambda h: (
     h[0] * h[1][0], h[1]), (1.0, h), max_steps=9), X.astype("float16")),
    *(singular(lambda y, m=m: m @ y, ()) for m in (SIZES, SIZES.T)),
]
# fmt: on


def _has(text, word):
    return word in text or (word == "@" and PLACE in text)


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_error(call, words):
    with pytest.raises((eqg.RuleError, AttributeError, TypeError, RuntimeError)) as info:
        call()
    text = "\n".join([str(info.value), *getattr(info.value, "__notes__", [])])
    # Without the stack of an error at run time, and without a note of JAX.
    record(text.partition("\n----")[0].rpartition("RuntimeError: ")[2])
    missing = [word for word in words.split(" | ") if not _has(text, word)]
    assert not missing, f"{missing} not in\n{text}"


@pytest.mark.parametrize("call", RIGHT)
def test_barely_right(call):
    call()
