"""`jax_custom_jvp` and `jax_custom_vjp`: called as JAX's are, on the rules of this library.

JAX has no keyword-only arguments for rules, and no methods: all arguments are resolved to
positions, and the rules get the arguments of `nondiff_argnums` first. Here these arguments are
the configuration of a call, so that they may be, or capture, traced values.
"""

import abc
import collections
import functools as ft
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple

import jax
from jax.core import Tracer
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, zero_from_primal
from jax.interpreters import ad

from .. import tangents
from .._errors import (
    check_flags,
    check_function,
    is_pair,
    name_of,
    place_of,
    rule_error,
    RuleError,
    type_of,
)
from .._errors.trees import mirror, prefix_leaves
from .._rules.call import call_with_rules
from .._rules.closure_convert import Opaque
from .._rules.custom_jvp import ForwardRules
from .._rules.custom_vjp import ReverseRules
from .._rules.float_args import as_integer
from .._rules.object_parts import Rebuildable
from .._rules.rule import AbstractRules, Rule
from .._rules.signature import JAX, Signature, signature_of
from .._rules.wrapper import P, reduce_by_name, T
from .._tangent_spaces import is_arraylike, is_differentiable, is_none


class MissingRuleError(RuleError, AttributeError):
    """The error of a call of a function without rules: JAX raises an `AttributeError`."""


class AbstractJaxDecorated(Rebuildable, abc.ABC, Generic[P, T]):
    """A function with rules that is called as JAX's are. Like JAX's, it is a leaf of a PyTree,
    compared by identity, and does not bind as a method.

    - `mode`, `how`: of an error before there are rules: which are missing, and how to give
        them.
    - `stops`: whether an argument of `nondiff_argnums` has the derivative zero, silently.
    """

    captures = ("_fn", "_rules")
    mode: ClassVar[str]
    how: ClassVar[str]
    stops: ClassVar[bool]
    _rules: AbstractRules

    def __init__(
        self,
        fun: Callable[P, T],
        nondiff_argnums: int | Iterable[int],
        nondiff_argnames: str | Iterable[str],
        rules: AbstractRules,
    ):
        check_function(fun, "fun", type(self).__name__)
        ft.update_wrapper(self, fun)
        self.fun = fun
        self._arity = _arity(fun)
        self.nondiff_argnums = _argnums(self, nondiff_argnums, nondiff_argnames)
        self._rules = rules
        self._fn = WithNondiff(fun, self.nondiff_argnums) if self.nondiff_argnums else fun
        self._has_rules = False
        self.symbolic_zeros = False

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._has_rules:
            raise _missing_rule(self)
        values = _by_position(self, args, kwargs)
        if not self.nondiff_argnums:
            return call_with_rules(self._fn, self._rules, values, {})
        diff = tuple(x for i, x in enumerate(values) if i not in self.nondiff_argnums)
        fixed = [values[i] for i in self.nondiff_argnums]
        if self.stops:
            is_traced = lambda x: isinstance(x, Tracer)
            stop = lambda x: jax.lax.stop_gradient(x) if is_traced(x) else x
            fixed = jax.tree.map(stop, fixed)
        # Ordered, as a `dict` is sorted when JAX puts it together again.
        names = map(Signature(self.fun).names.__getitem__, self.nondiff_argnums)
        nondiff = collections.OrderedDict(zip(names, fixed, strict=True))
        return call_with_rules(self._fn, self._rules, diff, {"nondiff": nondiff})

    def __getattr__(self, name: str) -> Any:
        # As in JAX: `f.def_vmap`, if the function is a `jax.custom_batching.custom_vmap`.
        if name.startswith("def"):
            return getattr(self.fun, name)
        raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`.")

    def __reduce__(self):
        return reduce_by_name(self, self.fun)

    def __repr__(self):
        return f"<eqx_grads.{type(self).__name__} of {name_of(self.fun)}>"


class WithNondiff(Rebuildable):
    """A function of the arguments that are differentiated, and of the others as `nondiff`."""

    captures = ("_fun",)

    def __init__(self, fun: Callable[..., Any], argnums: Sequence[int]):
        self._fun = fun
        self._argnums = argnums
        self.__qualname__ = name_of(fun)
        self.__wrapped__ = fun  # for the file and the line in errors
        # Without default values.
        parameters = enumerate(signature_of(fun).parameters.values())
        kept = [p.replace(default=p.empty) for i, p in parameters if i not in argnums]
        self.__signature__ = inspect.Signature(kept)

    def __call__(self, /, *args: Any, nondiff: collections.OrderedDict[str, Any]) -> Any:
        return self._fun(*merge(args, self._argnums, nondiff))


def merge(args: Sequence[Any], argnums: Sequence[int], nondiff: Any) -> list[Any]:
    """All arguments by position."""
    merged = list(args)
    for i, value in zip(argnums, nondiff.values(), strict=True):
        merged.insert(i, value)  # they are in ascending order
    return merged


def _argnums(decorated, argnums, argnames) -> tuple[int, ...]:
    """The positions that `nondiff_argnums` and `nondiff_argnames` name, in ascending order."""
    names, positions = Signature(decorated.fun).by_position, set()
    by_name = [names.index(x) if x in names else str(x) for x in _as_tuple(argnames)]
    for x in (*_as_tuple(argnums), *by_name):
        i = as_integer(x)
        if i is not None and i < 0:  # from the end, as JAX allows it
            i += decorated._arity or 0
        if i is None or i < 0:
            raise rule_error(
                f"The `nondiff_argnums` of `{name_of(decorated.fun)}` are not positions.",
                f"they hold {x!r:.60}; the parameters are {', '.join(names)}",
                place_of(decorated.fun),
                do="Count the arguments from 0. `nondiff_argnames` are parameters that can be "
                "passed by position.",
            )
        positions.add(i)
    return tuple(sorted(positions))


def _as_tuple(x) -> tuple[Any, ...]:
    is_several = isinstance(x, Iterable) and not isinstance(x, str | jax.Array)
    return tuple(x) if is_several else (x,)


def _arity(fun) -> int | None:
    """How many arguments the function has, if there is only one way to pass them all."""
    if isinstance(fun, ft.partial):
        return None
    signature = Signature(fun)
    return len(signature.by_position) if signature.is_by_position else None


def _by_position(decorated, args, kwargs) -> tuple[Any, ...]:
    """All arguments by position, with default values."""
    if not kwargs and len(args) == decorated._arity:
        return args
    fun, nondiff = decorated.fun, decorated.nondiff_argnums
    # The parameters that a `functools.partial` was given are not arguments of the call.
    signature = Signature(_anything if isinstance(fun, ft.partial) else fun)
    values, reason, cause = (), "", None
    try:
        values, by_keyword, filled = signature.bind(args, kwargs, True)
    except TypeError as error:
        reason, cause = str(error), error
    else:
        if passed := [name for name in by_keyword if name not in filled]:
            reason = "The following keyword arguments could not be resolved to positions: "
            reason += ", ".join(passed)
        elif any(i >= len(values) for i in nondiff):
            reason = f"`nondiff_argnums` is {nondiff}, and there are {len(values)} arguments"
    if reason:  # after the sentence of JAX, which its users search for
        raise rule_error(
            f"The input arguments to the {_in_jax(decorated)}-decorated function "
            f"{name_of(fun)} could not be resolved to positional-only arguments:\n{reason}",
            place_of(fun),
            do=_AS_IN_JAX,
        ) from cause
    return values


_AS_IN_JAX = (
    "Call it as the undecorated function is called. As in JAX, keyword-only arguments can't be "
    "passed, and a decorated function does not bind as a method: pass `self` first. With "
    "`eqx_grads.custom_jvp` or `eqx_grads.custom_vjp`, keyword-only parameters are "
    "configuration, and methods bind."
)


def _anything(*args, **kwargs):
    del args, kwargs


def _in_jax(decorated: AbstractJaxDecorated) -> str:
    return type(decorated).__name__.removeprefix("jax_")


def _missing_rule(decorated: AbstractJaxDecorated) -> MissingRuleError:
    """The error of a call without rules; its first sentence is the sentence of JAX."""
    name, mode = name_of(decorated.fun), decorated.mode
    what = (
        f"No {mode} defined for {_in_jax(decorated)} function {name} using def{mode.lower()}."
    )
    how = decorated.how.format(name)
    return MissingRuleError(f"{what}\n  {place_of(decorated.fun)}\nDefine one with `{how}`.")


class jax_custom_jvp(AbstractJaxDecorated[P, T]):
    """Replace `jax.custom_jvp`, with the rules of this library: change `jax.custom_jvp` to
    `eqg.jax_custom_jvp`, and leave the rest unchanged.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        @eqg.jax_custom_jvp
        def f(x, y):
            return jnp.sin(x) * y

        @f.defjvp
        def f_jvp(primals, tangents):
            x, y = primals
            t_x, t_y = tangents
            return f(x, y), jnp.cos(x) * y * t_x + jnp.sin(x) * t_y

        print(jax.grad(f)(0.0, 3.0))
        ```

        ```text
        3.0
        ```

    Code for `jax.custom_jvp` works in the same way, with these exceptions:

    - The library does not compute the terms of arguments that are not being differentiated.
        JAX multiplies these terms by zeros, and the product is NaN where the factor is NaN.
    - Python and NumPy integers stay what they are; in JAX they are arrays under `jit`.

    These work too: traced values that the function, its rules or the arguments of
    `nondiff_argnums` close over. Arguments may have leaves that are not arrays, such as an
    `eqx.Module`; their tangents are `None` there. The flag `jax_custom_jvp3` is accepted.

    **Arguments:**

    - `fun`: a function. As in JAX, it does not bind as a method.
    - `nondiff_argnums`, `nondiff_argnames`: the positions, or the names, of arguments that
        are not differentiated. A rule gets them first. Their derivative is zero.

    **Derivative:**

    The forward rule is yours (see `defjvp`). The reverse rule is its transpose. Both modes and
    all orders are available. For higher orders, JAX differentiates your rule. Unlike
    [`eqx_grads.custom_jvp`][], this decorator accepts a rule that is not linear in its
    tangents: forward mode returns what the rule returns.
    """

    mode, how, stops = "JVP", "@{}.defjvp", True
    _rules: ForwardRules

    def __init__(
        self,
        fun: Callable[P, T],
        nondiff_argnums: int | Iterable[int] = (),
        nondiff_argnames: str | Iterable[str] = (),
    ):
        rules = ForwardRules(JAX)
        AbstractJaxDecorated.__init__(self, fun, nondiff_argnums, nondiff_argnames, rules)
        self.jvp: Callable[..., Any] | None = None

    def defjvp(
        self, jvp: Callable[..., Any], symbolic_zeros: bool = False
    ) -> Callable[..., Any]:
        """Give the forward rule, as for `jax.custom_jvp.defjvp`.

        **Arguments:**

        - `jvp`: called as `jvp(*nondiff, primals, tangents)`; returns `out, t_out`. The
            tangent of an integer is of the dtype `jax.dtypes.float0`. Any part of `t_out` may
            be `None`, which means zero.
        - `symbolic_zeros`: whether the tangents of arguments that are not being
            differentiated are `jax.custom_derivatives.SymbolicZero`s.

        **Returns:**

        `jvp`.
        """
        check_function(jvp, "jvp", "defjvp")
        rule = ft.partial(_forward_rule, jvp, symbolic_zeros)
        forward = Rule(rule, symbolic_zeros, surely_linear=True, name=name_of(jvp), source=jvp)
        self._rules.set_jvp(forward)
        self.jvp, self.symbolic_zeros, self._has_rules = jvp, symbolic_zeros, True
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Give one function for each argument, as for `jax.custom_jvp.defjvps`.

        **Arguments:**

        - `*jvps`: called as `jvp(t, out, *primals)`, where `t` is the tangent of one
            argument; each returns a term of the tangent of the output. `None` is zero.
        """
        if self.nondiff_argnums:
            raise rule_error(
                f"`{name_of(self.fun)}` has `nondiff_argnums`, and was given `defjvps`.",
                place_of(self.fun),
                do="Use `defjvp`.",
            )
        for jvp in jvps:
            if jvp is not None:
                check_function(jvp, "jvps", "defjvps")
        fn: Any = self
        name = f"{name_of(self)}.defjvps"

        def sum_of_terms(primals, ts):
            if len(jvps) != len(primals):
                raise rule_error(
                    f"`{name}` was not given one function for each argument.",
                    f"it was given {len(jvps)}, and there are {len(primals)} arguments",
                    place_of(self.fun),
                    do="Give `None` for an argument whose derivative is zero.",
                )
            out = fn(*primals)
            pairs = zip(jvps, ts, strict=True)
            terms = [term(t, out, *primals) for term, t in pairs if term is not None]
            return out, tangents.add(*terms) if terms else None

        sum_of_terms.__qualname__ = name
        self.defjvp(sum_of_terms)


def _forward_rule(jvp, symbolic_zeros, primals, tangents, *, nondiff=None):
    """A rule of JAX's form as one of this library's."""
    values = () if nondiff is None else nondiff.values()
    leaves, treedef = jax.tree.flatten(primals, is_leaf=is_none)
    ts = [
        zero_from_primal(x, symbolic_zeros) if t is None and is_arraylike(x) else t
        for x, t in zip(leaves, jax.tree.leaves(tangents, is_leaf=is_none), strict=True)
    ]
    return jvp(*values, primals, jax.tree.unflatten(treedef, ts))


class jax_custom_vjp(AbstractJaxDecorated[P, T]):
    """Replace `jax.custom_vjp`, with the rules of this library: change `jax.custom_vjp` to
    `eqg.jax_custom_vjp`, and leave the rest unchanged.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        @eqg.jax_custom_vjp
        def f(x, y):
            return jnp.sin(x) * y

        def f_fwd(x, y):
            return f(x, y), (jnp.cos(x), jnp.sin(x), y)

        def f_bwd(residuals, ct):
            cos_x, sin_x, y = residuals
            return cos_x * ct * y, sin_x * ct

        f.defvjp(f_fwd, f_bwd)

        print(jax.grad(f)(0.0, 3.0))
        print(jax.jvp(f, (0.0, 3.0), (1.0, 0.0))[1])  # an error with `jax.custom_vjp`
        ```

        ```text
        3.0
        3.0
        ```

    Code for `jax.custom_vjp` works in the same way, with these exceptions:

    - If the backward rule is linear, the library does not compute the terms of outputs that
        are not used. JAX multiplies these terms by zeros, and the product is NaN where the
        factor is NaN.
    - Python and NumPy integers stay what they are; in JAX they are arrays under `jit`.
    - A cotangent is summed over the axes along which its argument would have broadcast. In
        JAX its shape is an error.

    These work too: forward mode, and traced values that the function, its rules or the
    arguments of `nondiff_argnums` close over. Arguments of `nondiff_argnums` may be traced.
    Arguments may have leaves that are not arrays, such as an `eqx.Module`. The flag
    `jax_custom_vjp3` is accepted.

    **Arguments:**

    - `fun`: a function. As in JAX, it does not bind as a method.
    - `nondiff_argnums`, `nondiff_argnames`: the positions, or the names, of arguments that
        are not differentiated. The backward rule gets them first. Differentiating one is
        an error.

    **Derivative:**

    The reverse rule is yours (see `defvjp`). It need not be linear. Forward mode is the
    derivative of `fun` itself. Higher orders differentiate your rules.
    """

    mode, how, stops = "VJP", "{}.defvjp(fwd, bwd)", False
    _rules: ReverseRules

    def __init__(
        self,
        fun: Callable[P, T],
        nondiff_argnums: int | Iterable[int] = (),
        nondiff_argnames: str | Iterable[str] = (),
    ):
        rules = ReverseRules(JAX)
        AbstractJaxDecorated.__init__(self, fun, nondiff_argnums, nondiff_argnames, rules)
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None
        self.optimize_remat = False

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
        generic_batching: bool = False,
    ) -> None:
        """Give the reverse rule, as for `jax.custom_vjp.defvjp`.

        **Arguments:**

        - `fwd`: called as `fwd(*args)`, like the function; returns `out, residuals`, where
            `residuals` is any PyTree.
        - `bwd`: called as `bwd(*nondiff, residuals, ct)`; returns one cotangent for each of
            the other arguments, with `None` for any part that is zero.
        - `symbolic_zeros`: whether each leaf of the arguments of `fwd` is a
            `jax.custom_derivatives.CustomVJPPrimal`, and the cotangents of outputs that are
            not used are `jax.custom_derivatives.SymbolicZero`s.
        - `optimize_remat`: accepted, but has no effect: under `jax.checkpoint`, `fwd` is
            called in both passes, as in JAX without the option.
        - `generic_batching`: accepted, but has no effect: an output that a batch shares always
            has the right gradient.
        """
        check_function(fwd, "fwd", "defvjp")
        check_function(bwd, "bwd", "defvjp")
        check_flags(
            "defvjp",
            symbolic_zeros=symbolic_zeros,
            optimize_remat=optimize_remat,
            generic_batching=generic_batching,
        )
        fwd_rule = ft.partial(_fwd_rule, fwd, self.nondiff_argnums, symbolic_zeros)
        zero = SymbolicZero if symbolic_zeros else ad.zeros_like_aval
        bwd_rule = ft.partial(_bwd_rule, bwd, zero)
        self._rules.fwd_rule = Rule(fwd_rule, name=name_of(fwd), source=fwd)
        self._rules.bwd_rule = Rule(bwd_rule, symbolic_zeros, name=name_of(bwd), source=bwd)
        self.fwd, self.bwd, self.symbolic_zeros = fwd, bwd, symbolic_zeros
        self.optimize_remat, self._has_rules = optimize_remat, True


class _Types(Opaque):
    """The types of the cotangents of a call: of each argument a mirror, with `False` for a leaf
    that can't have one, and of each leaf of the output, with `None`. And the structures."""

    def __init__(self, args: tuple[Any, ...], out: Any):
        of_arg = lambda x: is_differentiable(x) and _ct_type(x)
        self.ct_args = [(mirror(of_arg, arg), jax.tree.structure(arg)) for arg in args]
        leaves, self.treedef = jax.tree.flatten(out, is_leaf=is_none)
        self.ct_out = list(map(_ct_type, leaves))


class _Residuals(NamedTuple):
    residuals: Any
    types: _Types


def _fwd_rule(fwd, argnums, symbolic_zeros, /, *args, perturbed, nondiff=None):
    """A forward pass of JAX's form as one of this library's."""
    values = args
    if symbolic_zeros:
        leaves, treedef = jax.tree.flatten(args)
        leaves = map(CustomVJPPrimal, leaves, jax.tree.leaves(perturbed))
        values = jax.tree.unflatten(treedef, leaves)  # as JAX does, whatever the class
    if nondiff is not None:
        values = merge(values, argnums, nondiff)
    result = fwd(*values)
    if not is_pair(result):
        return result  # an error
    out, residuals = result
    return out, _Residuals(residuals, _Types(args, out))


def _ct_type(x):
    return jax.typeof(x).to_tangent_aval() if is_arraylike(x) else None


def _bwd_rule(bwd, zero, kept, ct, *, nondiff=None):
    """A backward rule of JAX's form as one of this library's."""
    values = () if nondiff is None else nondiff.values()
    pairs = zip(kept.types.ct_out, jax.tree.leaves(ct, is_leaf=is_none), strict=True)
    cts = [zero(t) if ct is None and t is not None else ct for t, ct in pairs]
    result = bwd(*values, kept.residuals, jax.tree.unflatten(kept.types.treedef, cts))
    args = kept.types.ct_args
    if not isinstance(result, tuple | list) or len(result) != len(args):
        return result  # an error
    return tuple(_expand(bwd, ct, *arg) for ct, arg in zip(result, args, strict=True))


def _expand(bwd, ct, types, treedef):
    """The cotangent of an argument. As in JAX, one leaf may be the cotangent of all leaves of a
    part of the argument, and the cotangent of an integer is dropped."""
    try:
        cts = prefix_leaves(ct, types, is_leaf=is_none)
    except ValueError:  # another structure, which is an error
        return ct
    leaves = map(ft.partial(_leaf, bwd), cts, jax.tree.leaves(types))
    return jax.tree.unflatten(treedef, leaves)


def _leaf(bwd, ct, type_):
    if type_ is False or not isinstance(ct, SymbolicZero):
        return None if type_ is False else ct
    if ct.shape != type_.shape:
        raise rule_error(
            f"The backward rule `{name_of(bwd)}` returned a zero that does not fit its "
            "argument.",
            f"the zero is {type_of(ct)}, the argument is {type_of(type_)}",
            place_of(bwd),
            do="Return `None` for zero. Are two cotangents in the wrong order?",
        )
    return None
