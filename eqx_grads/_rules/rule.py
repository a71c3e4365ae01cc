"""A user's rule, one call of the rule, and the checks of what it returns.

Which copy of a decorated Module does a rule run for? A decorated Module is copied with other
arrays by `eqx.tree_at`, an optimizer, `jit` or `vmap`. All copies share their rules, and a rule
calls the Module by the name of the first one, as in `return f(x), x`. There, `f` means the copy
that is differentiated: see `copy_in_use`.
"""

import abc
import contextlib
import contextvars
import functools as ft
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
from jax.extend.core import ClosedJaxpr

from .._errors import (
    check_flags,
    name_of,
    pair_of,
    place_of,
    rule_error,
    RuleError,
    show_path,
    type_of,
    unpartial,
)
from .._jaxprs.current_trace import setting, staging_trace
from .._jaxprs.evaluate import trace
from .._jaxprs.operands import at, fill, flagged, restricted
from .._tangent_spaces import is_differentiable
from .closure_convert import captured_tracer, Opaque, Rebuildable
from .known_zeros import evaluate_with_zeros
from .signature import Convention, OURS, Signature, signature_of
from .tree_split import FlatCall, OutputSpec, RuleCall


class _Running(NamedTuple):
    fn: Any
    staged_by: Any  # the trace that made the rule's operations equations, if any


# By the rules' `cache`, which copies share.
_running: contextvars.ContextVar[Mapping[Any, _Running]] = contextvars.ContextVar(
    "running", default=types.MappingProxyType({})
)


_NOTHING = contextlib.nullcontext()


def running_rule(fn: Callable[..., Any], rules: Any) -> contextlib.AbstractContextManager[None]:
    """While a rule of `fn` runs."""
    if not isinstance(fn, eqx.Module):
        return _NOTHING  # of a function there is only one
    running = {**_running.get(), rules.cache: _Running(fn, staging_trace())}
    return setting(_running, running)


def copy_in_use(fn: Any, rules: Any) -> Any:
    """The Module `fn`, or its copy whose rule is running."""
    running = _running.get().get(rules.cache)
    if running is None or all(map(operator.is_, *map(jax.tree.leaves, (fn, running.fn)))):
        return fn
    if staging_trace() is not running.staged_by:
        # JAX keeps programs traced by `jit` or for a loop, and uses them for other copies.
        raise rule_error(
            f"A rule of `{name_of(fn)}` calls `{name_of(fn)}` inside a transformation such as "
            "`jax.jit` or `jax.lax.scan`, and runs for a copy that has other arrays.",
            place_of(fn),
            do="Decorate a function of the Module and its arguments, whose rules are given the "
            "Module.",
        )
    return running.fn


T = TypeVar("T")


class Rule(Rebuildable):
    """A function that the user gave as a rule.

    Its parameters are read when it is given, and not later: by then a copy may stand
    in its place that has tracers substituted, and no `__wrapped__`.
    """

    captures = ("fn",)

    def __init__(
        self,
        fn: Callable[..., Any],
        symbolic_zeros: bool = False,
        surely_linear: bool = False,
        name: str | None = None,
        source: Callable[..., Any] | None = None,
        conventions: str | None = None,
    ):
        self.fn = fn.__func__ if isinstance(fn, staticmethod) else fn
        self._conventions = _CONVENTIONS if conventions is None else conventions
        if not callable(self.fn):
            raise rule_error(
                "A `rule` is not a function.", f"it is {type_of(self.fn)}", do=self._conventions
            )
        check_flags("the rule", symbolic_zeros=symbolic_zeros)
        # For errors: what the user calls the rule, and the function of the user's it is in.
        self.name = name_of(self.fn) if name is None else name
        self.place = place_of(self.fn if source is None else source)
        module = getattr(unpartial(self.fn), "__module__", None) or ""
        self._is_of_library = module.split(".")[0] == __name__.split(".")[0]
        self.symbolic_zeros = symbolic_zeros
        self.surely_linear = surely_linear  # of a forward rule: nothing to check
        parameters = signature_of(self.fn).parameters.values()
        self.keyword_only = frozenset(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)
        anything = any(p.kind == p.VAR_KEYWORD for p in parameters)
        # `None` is anything.
        self._accepted = None if anything else frozenset(p.name for p in parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the rule. A note on the errors that a user's rule raises names it, and says how
        rules are called if the error may come from that."""
        try:
            return self.fn(*args, **kwargs)
        except Exception as error:
            text = " ".join(x for x in error.args if isinstance(x, str))
            hint = _HINTS.get(type(error), "")
            traceback: Any = error.__traceback__
            is_of_call = traceback.tb_next is None or "unpack" in text
            if is_of_call or self._conventions is not _CONVENTIONS:
                hint = hint or f"{self._conventions} {_ENTRIES}"
            elif "None" in text:
                hint = hint or _ENTRIES
            note = f"It was raised in the rule `{self.name}`. {hint}".rstrip()
            known = getattr(error, "__notes__", ())
            if not (self._is_of_library or isinstance(error, RuleError) or note in known):
                error.add_note(note)
            raise

    def pair(self, result: Any, kind: str, fn: Any, do: str) -> tuple[Any, Any]:
        """The pair that a rule of `fn` returned, or an error. `kind` is the kind of rule."""
        if type(result) is tuple and len(result) == 2:  # as nearly always
            return result
        return pair_of(result, f"{kind} `{self.name}` of `{name_of(fn)}`", self.place, do)

    def keywords(self, kwargs: dict[str, Any], filled: frozenset[str]) -> dict[str, Any]:
        """The keyword-only arguments of the function: all that were given, and the defaults
        that this rule has a parameter for."""
        if self._accepted is None:
            return kwargs
        return {k: v for k, v in kwargs.items() if k in self._accepted or k not in filled}

    def asked_for(self, offered: dict[str, Any]) -> dict[str, Any]:
        """The part of what is offered that the rule has a keyword-only parameter for."""
        return {k: v for k, v in offered.items() if k in self.keyword_only}


def advice_on_cotangents(result: Any) -> str:
    """The way out for a backward rule that returned `result`: another number of cotangents
    than there are arguments, or not a tuple."""
    if isinstance(result, tuple | list):
        return (
            "Each positional argument has one, even if the call left it at its default. `None` "
            "is zero."
        )
    return "Return a tuple, even for a single argument: `return (ct,)`. `None` is zero."


_CONVENTIONS = (
    "Rules are called as `jvp(primals, tangents, **kwargs)`, `fwd(*args, **kwargs)`, "
    "`bwd(residuals, ct)` and `vmap(axis_size, batched, *args, **kwargs)`, with `perturbed` if "
    "that is keyword-only (`*, perturbed`). `eqx_grads.filter_custom_vjp` calls rules as "
    "Equinox does."
)
_ENTRIES = (
    "A tuple of arguments, or of their tangents, has an entry for each positional argument, "
    "even for a default. `None` is the tangent or cotangent of a leaf that can't be "
    "differentiated, and with `symbolic_zeros=True` of any leaf for which it is zero."
)
_HINTS = {
    RecursionError: "A rule that differentiates its own function is called inside itself. Move "
    "the body into a function without a rule, and differentiate that function.",
    NameError: "If the name is an axis of a `vmap`: no argument of the call has the batch "
    "dimension, and so the call is differentiated outside of the `vmap`. Give an argument the "
    "batch dimension: add `0 * jax.lax.axis_index(name)`.",
}


class CheckCache(Opaque):
    """The results of checks of a function and its rules, for each type of arguments."""

    most = 256

    def __init__(self):
        self._results: dict[Any, Any] = {}

    def __reduce__(self):  # the copy of a function is checked again
        return CheckCache, ()

    def get(self, call: RuleCall, check: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, but only once for arguments of the same type."""
        results = self._results
        try:
            key = call.flat.key(call.operands), check
            if key in results:
                return results[key]
        except TypeError:  # the call has no key
            return compute()
        if len(results) >= self.most:
            results = self._results = {}  # another thread may read the old ones
        return results.setdefault(key, compute())


class AbstractRules(Rebuildable, abc.ABC):
    """The rules that a decorated function was given.

    Static data for JAX: compared by identity. A rule may be given, or replaced, at any time.
    """

    captures = ("fwd_rule", "bwd_rule", "jvp_rule", "vmap_rule")

    def __init__(self, convention: Convention = OURS):
        self.convention = convention
        self.fwd_rule: Rule | None = None
        self.bwd_rule: Rule | None = None
        self.jvp_rule: Rule | None = None
        self.vmap_rule: Rule | None = None
        self.varies_alike = True  # cast all operands to vary alike, inside `shard_map`
        # Shared by the copies that have tracers substituted.
        self.cache = CheckCache()
        self.known_signature: Signature | None = None

    def set_jvp(self, rule: Rule) -> None:
        self.jvp_rule = rule
        self.cache = CheckCache()

    @abc.abstractmethod
    def check_complete(self, fn: Callable[..., Any]) -> None:
        """Raise if a rule of `fn` is missing."""

    @abc.abstractmethod
    def differentiate(
        self, call: RuleCall, expected: OutputSpec | None
    ) -> tuple[OutputSpec, list[Any], list[Any]]:
        """The outputs, their arrays, and their tangents (`None` for zero). Compares the
        outputs with the `expected` ones, as `check_outputs` does."""

    def signature(self, fn: Callable[..., Any]) -> Signature:
        """The signature of `fn`, the function with these rules. Raises if one is missing."""
        self.check_complete(fn)
        signature = Signature(fn)
        if not signature.holds_tracer:
            self.known_signature = signature
        return signature


def try_to_trace(trace: Callable[..., T], *args: Any) -> T | None:
    """`trace(*args)`, which traces a function of the user's for a check; `None` if the function
    can't be traced.

    It may look at the values of its arguments, which works eagerly. For that, JAX raises a
    `ConcretizationTypeError`, and also a `TypeError`, an `IndexError` or an `AttributeError`,
    and the function may raise what it likes. If it is wrong for values too, it raises the same
    once more where it is called with them.
    """
    try:
        return trace(*args)
    except Exception:
        return None


class TracedRule(NamedTuple):
    """A rule as a program, without the outputs that the rule returned as `None`. It has `n`
    outputs, and the program has the ones at the indices `live`."""

    program: ClosedJaxpr
    live: Sequence[int]
    n: int

    def evaluate(self, args: Sequence[Any]) -> list[Any]:
        """The outputs without the terms of arguments that are zero (`None`): a factor of a
        zero is never computed, and so can't be NaN (clause 2)."""
        return fill([None] * self.n, self.live, evaluate_with_zeros(self.program, args))


def trace_rule(rule: Callable[..., Sequence[Any]], *types: Any) -> TracedRule | None:
    """The traced rule; `None` if it can't be traced, as it looks at values."""
    found: list[Any] = []

    def live_outputs(*args):
        out = rule(*args)
        found[:] = [x is not None for x in out]
        return at(out, flagged(found))

    program = try_to_trace(trace, live_outputs, types)
    return None if program is None else TracedRule(program, flagged(found), len(found))


def check_outputs(
    call: RuleCall, rule: Rule, outputs: OutputSpec, expected: OutputSpec | None
) -> None:
    """Raise if a rule returns another value than the function does (clause 7).

    `expected` is what the function was seen to return; `None` if it was not called yet.
    """
    check_static_outputs(rule.fn, outputs)
    do = "The first result of the rule is the value: return what the function returns."
    if expected is None:
        compute = ft.partial(outputs_of_function, call.flat, call.operands)
        expected = call.rules.cache.get(call, "outputs", compute)
        if expected is None or expected.agrees(outputs):
            return
        # A function may depend on more than its arguments (the size of a named axis, a global
        # variable), and so on more than was remembered.
        expected = compute()
    require_same(rule, "The rule", call.fn, outputs, expected, do=do)


def require_same(
    rule: Rule,
    kind: str,
    fn: Any,
    outputs: OutputSpec,
    expected: OutputSpec | None,
    *where: str,
    do: str,
) -> None:
    """Raise if the outputs are not the `expected` ones of `fn`."""
    if expected is not None and not expected.agrees(outputs):
        name = name_of(fn)
        raise rule_error(
            f"{kind} `{rule.name}` of `{name}` returned a different output than `{name}`.",
            *expected.unlike(outputs, f"`{name}` returns {{}}, and `{rule.name}` {{}}"),
            *where,
            rule.place,
            do=do,
        )


def outputs_of_function(flat: FlatCall, operands: Sequence[Any]) -> OutputSpec | None:
    """The outputs of the function itself for operands, or for their types; `None` if it can't
    be traced."""
    found: list[OutputSpec] = []

    def run(*xs):
        outputs, arrays = flat.call(xs)
        found.append(outputs)
        return arrays

    try_to_trace(jax.eval_shape, run, *operands)
    return found[0] if found else None


def check_static_outputs(fn: Any, outputs: OutputSpec) -> None:
    """Raise if a static output captures a tracer, which would escape with it."""
    found = captured_tracer(outputs.split.static)
    if found is not None:
        raise rule_error(
            f"`{name_of(fn)}` returned a function, or another object that is not an array, "
            "which holds a traced value.",
            f"at out{show_path(outputs.split.path(found[0]))}: {found[1]}",
            place_of(fn),
            do="The output of a function with a rule leaves the trace it was made in. Return "
            "the value as an array, for instance in an `eqx.Module` or `eqx.Partial`.",
        )


def check_zeros(rule: Rule, call: RuleCall, indices: Sequence[int]) -> None:
    """Raise if the function forbids a derivative with respect to the perturbed operands at
    `indices`, for which `rule` says zero."""

    def check():
        of_all = lambda *operands: call.flat.call(operands)[1]
        fn = restricted(of_all, call.operands, indices)
        check_function_of_zeros(rule.name, call.fn, fn, at(call.operands, indices))

    call.rules.cache.get(call, ("zeros", *indices), check)


def check_function_of_zeros(
    rule: str, fn: Any, of_zeros: Callable[..., Any], primals: Sequence[Any]
) -> None:
    """The same for `of_zeros`, which is `fn` as a function of its primals only."""

    inexact_outputs = lambda *xs: [*filter(is_differentiable, jax.tree.leaves(of_zeros(*xs)))]

    def backward(*xs):
        out, pull_back = jax.vjp(inexact_outputs, *xs)
        return pull_back(out)  # for the types, any cotangents do

    try:
        jax.eval_shape(backward, *primals)
    except Exception as error:  # of any kind: the function may look at values
        if not getattr(error, "forbids_derivative", False):
            return
        error.add_note(
            f"`{name_of(fn)}` passes it to `nondifferentiable`, and the rule `{rule}` returns "
            "no derivative for it, which would be a silent zero. Return the derivative, or an "
            "array of zeros if zero is meant."
        )
        raise
