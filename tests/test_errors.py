"""What is wrong with a rule is said while it is traced: where, which leaf, what to do."""

import pathlib
import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError
from eqx_grads._rules.wrapper import unwrap_method
from jax.experimental import pallas as pl  # noqa: TID251

from .helpers import fails_with_remat3, REMAT3_HAS_NO_TRANSPOSE


HERE = pathlib.Path(__file__).name
X = jnp.array([1.0, 2.0, 3.0])


def forward(fn, rule, **options):
    decorated = eqg.custom_jvp(fn)
    decorated.def_jvp(rule, **options)
    return decorated


def reverse(fn, fwd, bwd):
    decorated = eqg.custom_vjp(fn)
    decorated.def_fwd(fwd)
    decorated.def_bwd(bwd)
    return decorated


def square(x):
    return x**2


def pair(tree, scale):
    return {"sum": jnp.sum(tree["x"]) * scale, "name": "pair"}


@jax.custom_vjp
def jax_double(t):
    return 2 * t


jax_double.defvjp(lambda t: (2 * t, None), lambda _, ct: (2 * ct,))


def doubled_twice(t):
    step = lambda state: (2 * state[0], state[1] + 1)
    return jax.lax.while_loop(lambda state: state[1] < 2, step, (t, 0))[0]


def stopped_in_scan(t):
    return jax.lax.scan(lambda c, _: (jax.lax.stop_gradient(c), None), t, None, 2)[0]


def fails(fn, *args, match):
    """The same error in every order of transformations, with the place of the rule."""
    loss = lambda *args: sum(
        jnp.sum(leaf) for leaf in jax.tree.leaves(fn(*args)) if eqx.is_inexact_array(leaf)
    )
    for transform in (
        lambda: eqx.filter_grad(lambda args: loss(*args))(args),
        lambda: eqx.filter_jit(eqx.filter_grad(lambda args: loss(*args)))(args),
        lambda: eqx.filter_grad(eqx.filter_jit(lambda args: loss(*args)))(args),
        lambda: eqx.filter_vmap(
            eqx.filter_grad(lambda args: loss(*args)), in_axes=None, axis_size=2
        )(args),
    ):
        with pytest.raises(RuleError, match=match) as info:
            transform()
        assert re.search(rf'{HERE}", line \d+', str(info.value))
        assert len(str(info.value).splitlines()) >= 3


def test_an_error_reads_well():
    def norm(x):
        return {"direction": x / jnp.sqrt(jnp.sum(x**2))}

    def norm_jvp(primals, tangents):
        return norm(*primals), {"direction": jnp.sum(tangents[0])}

    with pytest.raises(RuleError, match="does not fit its output") as info:
        jax.jvp(forward(norm, norm_jvp), (X,), (X,))
    lines = str(info.value).splitlines()
    assert lines[0] == (
        "The forward rule `norm_jvp` of `norm` returned a tangent that does not fit its output."
    )
    assert lines[1] == (
        "  at out['direction']: the output is float32[3], the tangent is float32[]"
    ).replace("float32", str(X.dtype))
    assert re.fullmatch(rf'  in `norm_jvp`, file ".*{HERE}", line \d+', lines[2])
    assert lines[3] == "A tangent has the shape of its value. Did a sum drop an axis?"


class TestMissing:
    def test_no_forward_rule(self):
        with pytest.raises(
            RuleError, match=r"`square` has no forward rule.*\n.*\n.*square.def_jvp"
        ):
            eqg.custom_jvp(square)(1.0)

    def test_no_reverse_rule(self):
        decorated = eqg.custom_vjp(square)
        with pytest.raises(RuleError, match=r"(?s)`square` has no reverse.*def_fwd.*def_bwd"):
            decorated(1.0)
        decorated.def_fwd(lambda x: (x, x))
        with pytest.raises(RuleError, match=r"Define it with `@square.def_bwd`"):
            decorated(1.0)

    def test_not_a_function(self):
        with pytest.raises(RuleError, match=r"can't be called.\n  `fn` is int"):
            unwrap_method(3)  # `custom_jvp(3)`, but for the type check of the tests


class TestForwardRule:
    def test_a_default_is_unpacked(self):
        def scaled(x, scale=None):
            return x

        def rule(primals, tangents):
            (x,), (t_x,) = primals, tangents
            return x, t_x

        with pytest.raises(ValueError, match="unpack") as error:
            jax.jvp(forward(scaled, rule), (X,), (X,))
        match = "`rule` is given.* also one that has its default: `x`, `scale`"
        assert any(re.search(match, note) for note in error.value.__notes__)

    def test_no_pair(self):
        match = "rule `rule` of `square` did not return a pair"

        def rule(primals, tangents):
            return square(*primals)

        fails(forward(square, rule), X, match=match)

    def test_nothing(self):
        def rule(primals, tangents):
            square(*primals)

        fails(forward(square, rule), X, match=r"did not return a pair.\n  it returned None")

    def test_shape(self):
        def rule(primals, tangents):
            return square(*primals), jnp.sum(tangents[0])

        kinds = rf"the output is {X.dtype}\[3\], the tangent is {X.dtype}\[\]"
        match = rf"`rule` of `square`.*\n  at out: {kinds}"
        fails(forward(square, rule), X, match=match)

    def test_dtype(self):
        def rule(primals, tangents):
            return square(*primals), (2 * primals[0] * tangents[0]).astype("float16")

        fails(
            forward(square, rule),
            X,
            match=rf"the tangent is float16\[3\](?s:.)*astype\({X.dtype}\)",
        )

    def test_complex_tangent_of_a_real_output(self):
        def rule(primals, tangents):
            return square(*primals), jax.lax.complex(tangents[0], tangents[0])

        fails(forward(square, rule), X, match=r"the tangent is complex\d+\[3\]")

    def test_integer_tangent(self):
        def rule(primals, tangents):
            return square(*primals), jnp.ones(3, int)

        fails(forward(square, rule), X, match="Return an array of floats")

    def test_structure(self):
        def rule(primals, tangents):
            return pair(*primals), {"total": tangents[1]}

        fails(
            forward(pair, rule),
            {"x": X},
            2.0,
            match=r"(?s)at out: the value is \{.*'sum'.*what was returned for it is \{'total'",
        )

    def test_structure_of_a_part(self):
        def rule(primals, tangents):
            return {"a": (X, X)}, {"a": (tangents[0],)}

        fails(forward(lambda x: {"a": (x, x)}, rule), X, match=r"at out\['a'\]: the value is")

    @pytest.mark.parametrize(
        ("tangent", "match"),
        [
            (lambda x, t: t**2, "raises a tangent to the power 2"),
            (lambda x, t: t * t, r"tangent"),
            (lambda x, t: jnp.sin(t), "applies `sin` to a tangent"),
            (lambda x, t: jnp.clip(t, -1, 1), "applies `"),
            (lambda x, t: 2 * x * t + 1, "adds something that no tangent multiplies"),
            (lambda x, t: 2 * x * t + x, "adds something that no tangent multiplies"),
            (lambda x, t: 2 * x, "returns something that no tangent multiplies"),
            (lambda x, t: x / (1 + t), "divides by a tangent|adds something"),
            (lambda x, t: jnp.outer(t, t)[0], "multiplies a tangent by a tangent"),
            (lambda x, t: jax.jit(jnp.exp)(t), "applies `exp` to a tangent"),
            (lambda x, t: jax.lax.cond(True, jnp.tanh, jnp.negative, t), "applies `tanh`"),
            (
                lambda x, t: jax.lax.scan(lambda c, _: (c * c, None), t, None, 2)[0],
                "multiplies a tangent by a tangent",
            ),
            (lambda x, t: jnp.abs(t), "applies `abs` to a tangent"),
            (lambda x, t: jnp.round(t), "applies `round` to a tangent"),
            (lambda x, t: jnp.where(t > 0, t, 0.0), "applies `gt` to a tangent"),
            (lambda x, t: t.astype(int).astype(t.dtype), "casts a tangent to int"),
            (
                lambda x, t: jax.lax.cond(t[0] > 0, lambda t: t, lambda t: 2 * t, t),
                "applies `gt` to a tangent",
            ),
        ],
    )
    def test_not_linear(self, tangent, match):
        def rule(primals, tangents):
            return square(*primals), tangent(primals[0], tangents[0])

        match = rf"forward rule `rule` of `square` is not linear in its tangents: .*{match}"
        fails(forward(square, rule), X, match=match)
        with pytest.raises(RuleError, match="not linear"):
            jax.jvp(forward(square, rule), (X,), (X,))

    @pytest.mark.parametrize("compile", [lambda f: f, jax.jit])
    @pytest.mark.parametrize(
        ("tangent", "match"),
        [
            (jax.lax.stop_gradient, "applies `stop_gradient` to a tangent"),
            (lambda t: t + jax.lax.stop_gradient(t), "applies `stop_gradient` to a tangent"),
            (jax.jit(jax.lax.stop_gradient), "applies `stop_gradient` to a tangent"),
            (stopped_in_scan, "applies `stop_gradient` to a tangent"),
            (lambda t: jax.lax.top_k(t, 3)[0], "JAX can't transpose it .*top_k"),
            (
                lambda t: jnp.diag(jnp.linalg.cholesky(jnp.diag(t))),
                "JAX can't transpose it .*cholesky",
            ),
            (doubled_twice, "JAX can't transpose it .*while_loop"),
            (jax_double, "JAX can't transpose it .*custom_vjp"),
        ],
    )
    def test_without_a_transpose(self, tangent, match, compile):
        def rule(primals, tangents):
            return square(*primals), tangent(2 * primals[0] * tangents[0])

        f = forward(square, rule)
        match = f"forward rule `rule` of `square` was used in reverse mode.*: .*{match}"
        with pytest.raises(RuleError, match=match):
            compile(jax.grad(lambda x: jnp.sum(f(x))))(X)
        _, t = compile(lambda x: jax.jvp(f, (x,), (x,)))(X)  # as in JAX, forward mode runs
        assert jnp.array_equal(t, tangent(2 * X * X))

    def test_an_operation_without_a_transpose_whose_result_no_tangent_needs(self):
        def rule(primals, tangents):
            top = jax.lax.top_k(primals[0], 3)[0] + 0 * jax.lax.stop_gradient(primals[0])
            return square(*primals), 2 * jnp.flip(top) * tangents[0]

        x = jnp.arange(3.0)
        gradient = jax.grad(lambda x: jnp.sum(forward(square, rule)(x)))
        assert jnp.allclose(gradient(x), 2 * x)

    @pytest.mark.slow
    def test_linear_rules_are_not_accused(self):
        weight = jnp.ones((3, 3))
        maps = [
            lambda x, t: weight @ t,
            lambda x, t: jnp.where(x > 1, t, 0.0),
            lambda x, t: jnp.where(x > 1, t, jnp.zeros(3)) / x,
            lambda x, t: jnp.zeros(3).at[1].set(t[0]),
            lambda x, t: jnp.zeros(3).at[jnp.array([0, 1])].add(t[:2]),
            lambda x, t: jnp.concatenate([t[:1], jnp.zeros(2)]),
            lambda x, t: jnp.cumsum(t) - jnp.flip(t) + jnp.roll(t, 1),
            lambda x, t: jax.lax.scan(lambda c, s: (c + s, c * 2), jnp.zeros(()), t)[1],
            lambda x, t: jax.jvp(square, (x,), (t,))[1],
            lambda x, t: jax.jit(jnp.negative)(t) + x * t,
            lambda x, t: jax.lax.cond(x[0] > 0, lambda t: 2 * t, lambda t: t * x, t),
            lambda x, t: jax.vmap(lambda a, b: a * b)(x, t),
            lambda x, t: jnp.linalg.solve(weight + jnp.eye(3), t),
            lambda x, t: jnp.real(jnp.fft.ifft(jnp.fft.fft(t))).astype(t.dtype),
            lambda x, t: jnp.convolve(t, x, mode="same"),
            lambda x, t: jax.lax.fori_loop(0, 3, lambda i, t: t * x, t),
            lambda x, t: jnp.zeros_like(x),
            lambda x, t: None,
            lambda x, t: t[jnp.argsort(x)],
            lambda x, t: jnp.einsum("i,j->i", t, x),
            lambda x, t: -t + sum(t * i for i in range(3)),
        ]
        for tangent in maps:
            f = forward(
                square, lambda p, ts, tangent=tangent: (square(*p), tangent(p[0], ts[0]))
            )
            jax.jit(lambda x, f=f: jax.jvp(f, (x,), (x,)))(X)
            jax.jvp(f, (X,), (X,))
            jax.grad(lambda x, f=f: jnp.sum(f(x)))(X)

    def test_checkpoint_in_a_linear_rule(self, request):
        fails_with_remat3(request, REMAT3_HAS_NO_TRANSPOSE)
        tangent = lambda x, t: jax.checkpoint(lambda t: x * t)(t)
        f = forward(square, lambda p, ts: (square(*p), tangent(p[0], ts[0])))
        jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(X)
        jax.grad(lambda x: jnp.sum(f(x)))(X)


class TestValue:
    """The value that a rule returns is held against the function's, as far as types go."""

    @pytest.mark.parametrize(
        ("value", "match"),
        [
            (lambda x: (square(x),), "the structures differ"),
            (lambda x: jnp.sum(x), r"out differs(?s:.)*`square` returns float\d+\[3\]"),
            (lambda x: square(x).astype("float16"), r"out differs(?s:.)*returns float16\[3\]"),
            (lambda x: 3, "out is an array in one of them only"),
        ],
    )
    def test_differs(self, value, match):
        def rule(primals, tangents):
            out = value(*primals)
            return out, jax.tree.map(lambda o: None, out)

        def fwd(x):
            return value(x), x

        fails(forward(square, rule), X, match=f"`rule` of `square` returned another.*{match}")
        bwd = lambda x, ct: (None,)
        fails(
            reverse(square, fwd, bwd), X, match=f"`fwd` of `square` returned another.*{match}"
        )

    def test_static_output(self):
        def fwd(tree, scale):
            return {**pair(tree, scale), "name": "other"}, None

        f = reverse(pair, fwd, lambda _, ct: (None, None))
        fails(
            f, {"x": X}, 2.0, match=r"out\['name'\] is 'pair' in one and 'other' in the other"
        )

    def test_a_function_that_looks_at_values_can_be_used_eagerly(self):
        def branch(x):
            return jnp.sin(x) if x > 0 else jnp.cos(x)

        f = forward(branch, lambda p, t: (branch(*p), 2 * t[0] if p[0] > 0 else 3 * t[0]))
        assert (jax.grad(f)(1.0), jax.grad(f)(-1.0)) == (2.0, 3.0)


class TestReverseRule:
    def check(self, bwd, match, fn=square, args=(X,)):
        fails(reverse(fn, lambda *args: (fn(*args), args), bwd), *args, match=match)

    def test_forward_rule_without_residuals(self):
        def fwd(x):
            return square(x)

        match = "forward pass `fwd` of `square` did not return a pair"
        fails(reverse(square, fwd, lambda r, ct: (ct,)), X, match=match)

    def test_number_of_cotangents(self):
        def bwd(residuals, ct):
            return ct, ct

        match = r"`bwd` of `square` did not return one cotangent.*\n  `square` has 1: `x`"
        self.check(bwd, match)

    def test_not_a_tuple(self):
        def bwd(residuals, ct):
            return ct

        self.check(bwd, r"(?s)did not return one cotangent.*`return \(ct,\)`")

    def test_nothing(self):
        def bwd(residuals, ct):
            pass

        self.check(bwd, r"(?s)did not return one cotangent.*returned None")

    def test_structure(self):
        def bwd(residuals, ct):
            return {"y": X}, None

        match = r"(?s)`bwd` of `pair`.*at tree: the value is \{'x'.*is \{'y'"
        self.check(bwd, match, pair, ({"x": X}, 2.0))

    def test_shape(self):
        def bwd(residuals, ct):
            return {"x": jnp.ones(4, X.dtype)}, None

        match = rf"at tree\['x'\]: the value is {X.dtype}\[3\], the cotangent is {X.dtype}\[4\]"
        self.check(bwd, match, pair, ({"x": X}, 2.0))

    def test_smaller_than_the_argument(self):
        def bwd(residuals, ct):
            return (jnp.sum(ct),)

        self.check(bwd, rf"at x: the value is {X.dtype}\[3\], the cotangent is {X.dtype}\[\]")

    def test_integer(self):
        def bwd(residuals, ct):
            return (jnp.ones(3, int),)

        self.check(bwd, r"at x: (?s:.)*Return an array of floats")

    def test_not_an_array(self):
        def bwd(residuals, ct):
            return ("no",)

        self.check(bwd, r"Return an array, or `None` for zero")

    def test_leaf_that_can_not_be_differentiated(self):
        def bwd(residuals, ct):
            return ct, 1.5

        fn = lambda x, name: x
        self.check(bwd, r"at name: (?s:.)*can't be differentiated: return `None`", fn, (X, "n"))

    def test_float_cotangent_of_an_integer(self):
        """It would be dropped, and could be other than zero."""

        def bwd(residuals, ct):
            return ct, ct

        fn = lambda x, n: x
        n = jnp.arange(3)
        self.check(bwd, r"at n: (?s:.)*can't be differentiated: return `None`", fn, (X, n))

    def test_module_leaf(self):
        mlp = eqx.nn.MLP(3, 1, 2, 1, key=jax.random.key(0))

        def bwd(residuals, ct):
            wrong = eqx.tree_at(lambda m: m.layers[0].bias, mlp, jnp.ones(5))
            return eqx.filter(wrong, eqx.is_inexact_array), None

        fn = lambda model, x: model(x)
        self.check(
            bwd,
            r"at model.layers\[0\].bias: the value is \w+\[2\], the cotangent",
            fn,
            (mlp, X),
        )


class TestNotDifferentiable:
    @pytest.mark.parametrize("make", ["jvp", "vjp"])
    def test_keyword_only(self, make):
        fn = lambda x, *, options: x * options["scale"]
        if make == "jvp":
            f = forward(fn, lambda p, t, *, options: (fn(*p, options=options), t[0]))
        else:
            fwd = lambda x, *, options: (fn(x, options=options), None)
            f = reverse(fn, fwd, lambda _, ct: (ct,))
        loss = lambda s: f(2.0, options={"scale": s})
        match = r"with respect to a keyword-only argument.\n  at `options\['scale'\]`"
        for transform in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
            with pytest.raises(RuleError, match=match):
                transform(1.0)
        stopped = lambda s: loss(jax.lax.stop_gradient(s))
        assert jax.grad(stopped)(1.0) == 0.0

    @pytest.mark.parametrize("order", ["grad", "jit(grad)", "grad(jit)", "jvp"])
    def test_closed_over(self, order):
        def loss(scale):
            f = forward(lambda x: x * scale, lambda p, t: (p[0] * scale, t[0] * scale))
            return f(2.0)

        transform = {
            "grad": jax.grad(loss),
            "jit(grad)": jax.jit(jax.grad(loss)),
            "grad(jit)": jax.grad(jax.jit(loss)),
            "jvp": lambda x: jax.jvp(loss, (x,), (x,)),
        }[order]
        match = (
            r"with respect to a value that it closes over.\n  at `scale`, held by `<lambda>`"
        )
        with pytest.raises(RuleError, match=match):
            transform(1.0)

    def test_closed_over_module(self):
        linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))

        def loss(model):
            f = forward(lambda x: model(x), lambda p, t: (model(*p), t[0]))
            return jnp.sum(f(X))

        with pytest.raises(RuleError, match=r"at `model.weight`, held by `<lambda>`"):
            eqx.filter_grad(loss)(linear)


def test_a_rule_error_is_what_jax_and_equinox_raise():
    assert issubclass(RuleError, TypeError)
    assert issubclass(RuleError, ValueError)


def test_the_user_s_own_error_goes_through():
    def rule(primals, tangents):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        jax.grad(forward(square, rule))(1.0)


def test_wrong_call():
    f = forward(square, lambda p, t: (square(*p), t[0]))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        f()
    with pytest.raises(
        TypeError, match=r"too many positional arguments in the call of `square\(x\)`"
    ):
        f(1.0, 2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        f(1.0, y=2.0)


# ----------------------------------------------------------- conventions of other libraries


@pytest.mark.parametrize(
    ("decorator", "name", "hint"),
    [
        (eqg.custom_jvp, "defjvp", "def_jvp`.*method of `eqx_grads.jax_custom_jvp"),
        (
            eqg.custom_vjp,
            "defvjp",
            "def_fwd` and `def_bwd`.*method of `eqx_grads.jax_custom_vjp",
        ),
        (eqg.custom_jvp, "defvjp", "Use `eqx_grads.custom_vjp` with"),
        (eqg.custom_jvp, "def_fwd", "Use `eqx_grads.custom_vjp`"),
    ],
)
def test_a_method_of_another_decorator(decorator, name, hint):
    with pytest.raises(AttributeError, match=f"no attribute `{name}`.*{hint}"):
        getattr(decorator(square), name)


@pytest.mark.parametrize("name", ["nondiff_argnums", "nondiff_argnames"])
@pytest.mark.parametrize("decorator", ["custom_jvp", "custom_vjp"])
def test_an_option_of_jax(decorator, name):
    with pytest.raises(RuleError, match=f"JAX's `{name}` .* of `eqx_grads.jax_{decorator}`"):
        getattr(eqg, decorator)(square, **{name: (0,)})


class TestRulesOfEquinox:
    """`eqx.filter_custom_vjp` passes `perturbed` by position."""

    match = "takes `perturbed` by position, as rules(?s:.*)eqx_grads.filter_custom_vjp"

    @pytest.mark.parametrize("rest", ["", ", scale", ", *args"])
    def test_fwd(self, rest):
        f = eqg.custom_vjp(lambda x, scale: x * scale)
        with pytest.raises(RuleError, match=self.match):
            f.def_fwd(eval(f"lambda perturbed, x{rest}: (x, None)"))

    @pytest.mark.parametrize("rest", ["", ", x, scale", "=None", ", *args"])
    def test_bwd(self, rest):
        f = eqg.custom_vjp(lambda x, scale: x * scale)
        with pytest.raises(RuleError, match=self.match):
            f.def_bwd(eval(f"lambda residuals, ct, perturbed{rest}: ct"))

    def test_a_parameter_of_that_name(self):
        """By keyword it is an option of a rule, and a function may have such an argument."""
        f = eqg.custom_vjp(lambda perturbed, x: perturbed * x)
        f.def_fwd(lambda perturbed, x: (perturbed * x, (perturbed, x)))
        f.def_bwd(
            lambda residuals, ct, *, perturbed: (ct * residuals[1], 5 * ct * residuals[0])
        )
        assert [float(ct) for ct in jax.grad(f, (0, 1))(2.0, 3.0)] == [3.0, 10.0]


def test_a_rule_that_differentiates_its_own_function():
    class Scaled(eqx.Module):
        weight: jax.Array

        @eqg.custom_jvp
        def __call__(self, x):
            return jnp.sin(self.weight * x)

        @__call__.def_jvp
        def rule(primals, tangents):
            return eqx.filter_jvp(lambda self, x: self(x), primals, tangents)

    with pytest.raises(RecursionError, match="recursion") as error:
        jax.grad(Scaled(jnp.array(2.0)))(1.0)
    [note] = [n for n in error.value.__notes__ if "is called inside itself" in n]
    assert "move the body into one without a rule" in note


def test_a_reverse_rule_of_which_a_half_is_missing():
    @eqg.custom_vjp
    def square(x):
        return x**2

    with pytest.raises(RuleError, match="`square` has no reverse rule"):
        jax.grad(square)(1.0)
    square.def_fwd(lambda x: (x**2, x))
    with pytest.raises(RuleError, match="`square` has `def_fwd`, but no `def_bwd`"):
        jax.grad(square)(1.0)


@pytest.mark.parametrize(
    "rules", ["filter_custom_vjp", "jax_custom_vjp", "jax_custom_jvp", "custom_gradient"]
)
def test_rules_of_other_conventions_are_not_told_of_those_of_this_library(rules):
    if rules == "custom_gradient":
        decorated = eqg.custom_gradient(lambda x: (jnp.sin(x), lambda ct: ct.missing))
    else:
        decorated = getattr(eqg, rules)(jnp.sin)
    if rules == "filter_custom_vjp":
        decorated.def_fwd(lambda perturbed, x: (jnp.sin(x), x))
        decorated.def_bwd(lambda residuals, ct, perturbed, x: ct.missing)
    elif rules == "jax_custom_vjp":
        decorated.defvjp(lambda x: (jnp.sin(x), x), lambda residuals, ct: (ct.missing,))
    elif rules == "jax_custom_jvp":
        decorated.defjvp(lambda primals, tangents: (primals[0], tangents.missing))
    with pytest.raises(AttributeError, match="missing") as error:
        jax.grad(decorated)(1.0)
    assert not [n for n in getattr(error.value, "__notes__", ()) if "called as" in n]


def _accumulate(x, out):
    @pl.when(pl.program_id(0) == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    out[...] += jnp.sum(x[...])


def kernel_sum(x):
    """JAX's forward mode of a kernel with a grid is a bare `AssertionError`."""
    blocks = {"in_specs": [pl.BlockSpec((2,), lambda i: (i,))]}
    blocks["out_specs"] = pl.BlockSpec((1,), lambda i: (0,))
    out = jax.ShapeDtypeStruct((1,), x.dtype)
    return pl.pallas_call(_accumulate, out, grid=(2,), interpret=True, **blocks)(x)


def host_sum(x):
    out = jax.ShapeDtypeStruct((1,), x.dtype)
    return jax.pure_callback(lambda x: np.sum(x, keepdims=True), out, x)


class TestForwardModeOfTheFunctionItself:
    @pytest.mark.parametrize(
        ("fn", "reason"), [(kernel_sum, "AssertionError"), (host_sum, "ValueError: Pure callb")]
    )
    @pytest.mark.parametrize(
        "derive",
        [
            lambda f, x: jax.jvp(f, (x,), (x,)),
            lambda f, x: jax.jacfwd(f)(x),
            lambda f, x: jax.jit(jax.jacfwd(f))(x),
            lambda f, x: jax.linearize(f, x)[1](x),
            lambda f, x: jax.hessian(lambda x: jnp.sum(f(x) ** 2))(x),
            lambda f, x: jax.vmap(lambda t: jax.jvp(f, (x,), (t,)))(jnp.ones((2, 4))),
            lambda f, x: jax.jvp(
                lambda x: jax.lax.scan(lambda c, _: (f(c) * c, None), x, None, 2), (x,), (x,)
            ),
        ],
    )
    def test_says_so_and_names_the_way_out(self, fn, reason, derive):
        f = reverse(fn, lambda x: (f(x), x), lambda x, ct: (jnp.broadcast_to(ct, x.shape),))
        x = jnp.arange(4.0)
        assert jnp.array_equal(jax.grad(lambda x: jnp.sum(f(x)))(x), jnp.ones(4))
        match = rf"(?s)Forward mode of `{fn.__name__}` diff.*{reason}.*`def_jvp` of `eqx_grads"
        with pytest.raises(RuleError, match=match):
            derive(f, x)
        f.def_jvp(lambda primals, tangents: (f(*primals), jnp.sum(*tangents, keepdims=True)))
        derive(f, x)

    def test_an_error_that_names_its_cause_stays_and_gets_a_note(self):
        fn = lambda x: eqg.nondifferentiable(x, "the key")
        f = reverse(fn, lambda x: (x, None), lambda _, ct: (ct,))
        with pytest.raises(RuleError, match="the key was differentiated") as caught:
            jax.jvp(f, (1.0,), (1.0,))
        assert "differentiates the function itself" in caught.value.__notes__[0]
