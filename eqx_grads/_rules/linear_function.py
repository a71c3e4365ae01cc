"""`linear_function`: a linear function in JAX, with its own adjoint."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.interpreters import ad

from .._errors import (
    bad_argument,
    check_function,
    name_of,
    place_of,
    rule_error,
    show_path,
    type_of,
)
from .._jaxprs.current_trace import is_eager
from .._jaxprs.linearity import linear_in, why_nonlinear
from .._jaxprs.varying import vary_tracers_alike
from .._tangent_spaces import is_differentiable, is_none, project_leaves
from .closure_convert import Rebuildable
from .float_args import as_integer
from .linear_primitive import apply_side, Side
from .rule import Rule
from .signature import AS_CALLED, Signature
from .tree_split import as_arrays, FlatCall, OutputSpec, reject_reference, TreeSplit
from .wrapper import AbstractWrapper, P, set_metadata, T, unwrap_method


class LinearFunction(AbstractWrapper[P, T]):
    """A linear function with its adjoint. Made by [`eqx_grads.linear_function`][]."""

    # Static: an optimizer that changed the arrays in one of the two functions would not change
    # those in the other.
    fn: Callable[..., Any] = eqx.field(static=True)
    _rules: "_Adjoint" = eqx.field(static=True)
    _binding: str = eqx.field(static=True)
    _has_rules: ClassVar[bool] = True

    def def_rmatvec(self, rmatvec: Callable[..., Any]) -> Callable[..., Any]:
        """Give the adjoint. Use it as a decorator.

        **Arguments:**

        - `rmatvec`: as for [`eqx_grads.linear_function`][].

        **Returns:**

        `rmatvec`.
        """
        check_function(rmatvec, "rmatvec", "linear_function")
        self._rules.rmatvec = Rule(rmatvec, conventions=_CONVENTIONS)
        return rmatvec

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function with its arguments."""
        rules, signature = self._rules, Signature(self.fn)
        given, options, filled = signature.bind(args, kwargs, rules.convention.fills_defaults)
        rules.check_call(given, signature.names)
        if is_eager(given, options):
            return as_arrays(self.fn(*as_arrays(given), **options))
        others = list(given)
        x, xs = TreeSplit.split(others.pop(rules.argnum), rules.convention.args)
        call = self.fn, rules, tuple(others), options, filled, signature.names
        flat, parameters = FlatCall.of(*call)
        operands = vary_tracers_alike([*xs, *parameters])
        return _Call(flat, x).apply(operands[len(xs) :], operands[: len(xs)])


class _Adjoint(Rebuildable):
    """The two functions. Static data for JAX: compared by identity."""

    captures = ("matvec", "rmatvec")
    convention = AS_CALLED

    def __init__(self, matvec: Callable[..., Any], argnum: int):
        self.matvec = matvec
        self.argnum = argnum
        self.rmatvec: Rule | None = None

    def check_call(self, args, names) -> None:
        name, place = name_of(self.matvec), place_of(self.matvec)
        if self.rmatvec is None:
            raise rule_error(
                f"`{name}` has no adjoint.",
                place,
                do=f"Define one with `@{name}.def_rmatvec`. Without one, remove the decorator, "
                "and JAX transposes the function.",
            )
        if len(args) <= self.argnum:
            raise rule_error(
                f"`{name}` was called without the argument in which it is linear.",
                f"`argnum` is {self.argnum}, and there are {len(args)} arguments",
                place,
                do="Pass it, or give another `argnum`.",
            )
        what = f"`{name}` is linear in an argument, and was given one that"
        do = (
            "Cast it, pass it as another argument, or give as `argnum` the position of the "
            "argument in which the function is linear."
        )
        _check_floating(args[self.argnum], f"`{names[self.argnum]}{{}}`", what, place, do)


def _check_floating(tree, path_format, what, place, do) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not is_differentiable(leaf):
            where = f"at {path_format.format(show_path(path))}: {type_of(leaf)}"
            raise rule_error(f"{what} is not floating or complex.", where, place, do=do)


class _Call:
    """All of a call but its arrays. JAX keeps it with the program, so it holds no tracer.

    - `flat`: the call without the argument in which the function is linear. Its operands are
        the parameters.
    - `x`: this argument.
    """

    def __init__(self, flat: FlatCall, x: TreeSplit):
        self._flat, self._x = flat, x
        self._name, self._x_name = name_of(flat.fn), flat.names[flat.rules.argnum]

    def apply(self, parameters: Sequence[Any], xs: Sequence[Any]) -> Any:
        types = [list(map(jax.typeof, part)) for part in (parameters, xs)]
        self._x_types = [t.to_tangent_aval() for t in types[1]]
        program = jax.make_jaxpr(self._matvec)(*types)
        for x in program.consts:
            reject_reference(self._flat.fn, x, "a value that it closes over")
        flags = [i >= len(parameters) for i in range(len(program.in_avals))]
        _check_linear(program, flags, self._flat.fn, f"`{self._x_name}`")
        matvec = Side(self._name, self._matvec, program.out_avals)
        rmatvec = Side(self._flat.rules.rmatvec.name, self._rmatvec, self._x_types)
        return self._outputs.tree(apply_side(matvec, rmatvec, parameters, xs))

    def _restore(self, parameters, x):
        fn, rules, args, kwargs = self._flat.restore(parameters)
        return fn, rules, [*args[: rules.argnum], x, *args[rules.argnum :]], kwargs

    def _matvec(self, parameters, xs):
        fn, rules, args, kwargs = self._restore(parameters, self._x.tree(xs))
        out = fn(*args, **kwargs)
        what = f"`{self._name}` returned an output that"
        do = (
            "A linear function returns arrays that can be differentiated. Return "
            "constants from another function."
        )
        _check_floating(out, "out{}", what, place_of(fn), do)
        self._outputs, arrays = OutputSpec.of(out, rules.convention.outputs)
        return arrays

    def _rmatvec(self, parameters, cts):
        """The transpose, which is the conjugate of the adjoint of the conjugate."""
        y = self._outputs.tree(list(map(jnp.conj, cts)))
        _, rules, args, kwargs = self._restore(parameters, y)
        rule = rules.rmatvec
        result = rule(*args, **rule.keywords(kwargs, self._flat.filled))
        x = self._x.tree(list(map(ad.zeros_like_aval, self._x_types)))

        def fail(*where, do):
            what = f"The adjoint `{rule.name}` of `{self._name}` returned a value unlike"
            return rule_error(f"{what} `{self._x_name}`.", *where, rule.place, do=do)

        types, leaves = iter(self._x_types), jax.tree.leaves(x, is_leaf=is_none)
        types = [leaf if leaf is None else next(types) for leaf in leaves]
        found = project_leaves(result, x, types, name=self._x_name, fail=fail)
        return [
            jnp.conj(ad.zeros_like_aval(t) if y is None else y)
            for y, t in zip(found, types, strict=True)
            if t is not None
        ]


def _check_linear(program, flags, fn, x) -> None:
    """Raise if the function is seen not to be linear in the flagged inputs."""
    reason = why_nonlinear(linear_in(program, flags))
    if reason is not None:
        # The words are those for a function of tangents.
        reason = reason.replace("no tangent multiplies", f"{x} does not multiply")
        raise rule_error(
            f"`{name_of(fn)}` is not linear in {x}: {reason.replace('a tangent', x)}.",
            place_of(fn),
            do="Add constants outside of the function. Give a function that is not linear a "
            "rule with `eqx_grads.custom_vjp`.",
        )


def linear_function(
    matvec: Callable[..., Any] | None = None,
    rmatvec: Callable[..., Any] | None = None,
    *,
    argnum: int | None = None,
) -> Any:
    r"""Give a linear function its own adjoint.

    Use it for a function that JAX can trace and can't transpose, such as a kernel or a foreign
    function. Also use it if you can transpose a function better than JAX does. For code that
    JAX can't trace, use [`eqx_grads.linear_host_function`][].

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        @eqg.linear_function
        def differences(x):
            return x[1:] - x[:-1]

        @differences.def_rmatvec
        def differences_rmatvec(y):
            zero = jnp.zeros(1)
            return jnp.concatenate([zero, y]) - jnp.concatenate([y, zero])

        x = jnp.array([1.0, 3.0, 2.0])
        print(jax.grad(lambda x: jnp.sum(differences(x) ** 2))(x))
        print(jax.linear_transpose(differences, x)(jnp.array([1.0, 0.0]))[0])
        ```

        ```text
        [-4.  6. -2.]
        [-1.  1.  0.]
        ```

    **Arguments:**

    - `matvec`: a function that is linear in one of its arguments. This argument and the output
        may be any PyTrees of floating or complex arrays. All other arguments are parameters.
    - `rmatvec`: its adjoint. It is called as `matvec` is, with a tree like the output instead
        of the linear argument, and returns a tree like the linear argument. `None` is zero. For
        a complex map it is the adjoint $A^H y$, as in `scipy.sparse.linalg.LinearOperator`, and
        not the transpose. For a symmetric map, give `matvec` again. Or define it later with
        `def_rmatvec`.
    - `argnum`: the position of the linear argument, the first one by default. A method of a
        Module has the parameters in `self`, and needs `argnum=1`.

    **Returns:**

    The function with its adjoint, an [`eqx_grads.LinearFunction`][]. Without `matvec`, a
    decorator.

    **Derivative:**

    With respect to the linear argument, the forward rule is $\dot y = A \dot x$ and the reverse
    rule $\bar x = A^T \bar y$. Both modes and all orders; `jax.linear_transpose` accepts the
    function, so that a rule may apply it to tangents.

    With respect to a parameter, or a value that the two functions close over, the derivative is
    JAX's derivative of `matvec` or `rmatvec`. This also holds in mixed second derivatives: in
    reverse over reverse mode, JAX transposes `matvec`. Where JAX can't differentiate a
    parameter, pass `jax.lax.stop_gradient` of it, or call the linear function in the rules of
    an [`eqx_grads.custom_vjp`][].

    A call does not check that the adjoint is right: [`eqx_grads.testing.check_rule`][] does.

    **Raises:**

    [`eqx_grads.RuleError`][] if the linear argument or the output is not floating or complex.
    A transformation raises it if `matvec` is not linear, or if `rmatvec` does not return the
    structure and shapes of the linear argument.
    """
    if matvec is None:
        return lambda matvec: linear_function(matvec, rmatvec, argnum=argnum)
    fn, binding = unwrap_method(matvec, "matvec", "linear_function")
    rules = _Adjoint(fn, _as_argnum(argnum, fn))
    function = LinearFunction(fn=fn, _rules=rules, _binding=binding)
    set_metadata(function, fn)
    if rmatvec is not None:
        function.def_rmatvec(rmatvec)
    return function


def _as_argnum(argnum, fn):
    if argnum is None and Signature(fn).by_position[:1] == ["self"]:
        what = (
            f"`{name_of(fn)}` is a method, and may be linear in `self` or in another argument."
        )
        do = "Give `argnum=1` for the first argument after `self`, or `argnum=0` for `self`."
        raise rule_error(what, place_of(fn), do=do)
    number = 0 if argnum is None else as_integer(argnum)
    if number is None or number < 0:
        do = "Give an integer: 0 is the first argument, 1 is the first one after `self`."
        what = "the position of an argument"
        raise bad_argument("linear_function", "argnum", what, argnum, do)
    return number


_CONVENTIONS = (
    "`rmatvec` is called as `matvec` is, with a value like the output instead of the "
    "argument in which the function is linear: the first one, or another by `argnum`."
)
