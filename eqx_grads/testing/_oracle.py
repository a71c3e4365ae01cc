"""The rows of a table as one program: functions of the same arrays, traced once each, and
compiled together.

A function is traced in the user's precision, and its programs are evaluated in that precision
and in float64. So the function that is judged is the user's, whatever it does with a dtype. A
program that calls the host runs there in the precision that it was traced with, so its function
is traced with float64 arguments, too.
"""

import contextlib
import functools as ft
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._diagnosis.eager import SHORT_COMPILATION
from .._diagnosis.in_float64 import evaluate_in_float64, is_opaque
from .._diagnosis.pairs import is_inexact
from .._errors import name_of, rule_error, unlike
from .._jaxprs.dependence import without_unused
from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.interpret import Domain, interpret
from .._jaxprs.structure import CallWithRule, holds, LinearCall, primal_program, structure
from ._compare import as_double, tolerance_in_float64, tolerance_of
from ._options import Options
from ._outcome import outcome
from ._subject import double_precision, FlatFunction, is_output
from ._without_rules import without_rules


_Arrays = list[Any]
_CALLBACKS = ("pure_callback", "io_callback", "debug_callback")


class At(NamedTuple):
    """The arguments of the rows: the leaves, their tangents, cotangents of the outputs, and a
    batch of values of each leaf."""

    x: Sequence[Any]
    t: Sequence[Any] = ()
    w: Sequence[Any] = ()
    many: Sequence[Any] = ()


Row = Callable[[At], Sequence[Any]]


def jvp(fn: Callable[..., Any], xs: Sequence[Any], ts: Sequence[Any]) -> _Arrays:
    return jax.jvp(fn, list(xs), list(ts))[1]


def vjp(fn: Callable[..., Any], xs: Sequence[Any], ws: Sequence[Any]) -> _Arrays:
    return list(jax.vjp(fn, *xs)[1](list(ws)))


def rows_of(fn: Callable[..., Any]) -> dict[str, Row]:
    """The value of a function, and its derivative in both modes."""
    return {
        "f": lambda at: fn(*at.x),
        "jvp": lambda at: jvp(fn, at.x, at.t),
        "vjp": lambda at: vjp(fn, at.x, at.w),
    }


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Without the page that JAX prints to the terminal for an error in a callback."""
    log = logging.getLogger("jax")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


class Side:
    """A function with its rule and its references, in one precision.

    - `is_exact`: whether its programs are evaluated in float64, whatever they cast to.
    - `f`, `plain`: the function with its rule and without, of leaves.
    - `expected`: the function whose derivative is expected.
    """

    def __init__(self, subject: FlatFunction, options: Options, is_exact: bool = False):
        self.subject, self.is_exact, self._options = subject, is_exact, options
        self._traced_in = double_precision if subject.is_wide else contextlib.nullcontext
        is_decorated = isinstance(subject.fn, jax.custom_jvp | jax.custom_vjp)
        self.f = lambda *xs: list(subject.arrays(*xs))
        self.plain = without_rules(subject.arrays, is_decorated)
        given = options.reference
        self.expected = self.plain if given is None else as_reference(subject, given)
        self._traced: dict[str, Any] = {}
        self._compiled: dict[tuple[str, ...], Any] = {}

    @ft.cached_property
    def named_outputs(self) -> list[tuple[str, Any]]:
        """The shapes and dtypes of the outputs, with their names."""
        with self._traced_in():
            return self.subject.named_outputs()

    @property
    def outputs(self) -> list[Any]:
        return [o for _, o in self.named_outputs]

    # ------------------------------------------------------------ programs

    def trace(self, name: str, row: Row, at: At) -> Any:
        """The program of a row, or the exception that it raises or will raise."""
        if name not in self._traced:
            flat, tree = jax.tree.flatten(self._like(at))
            run = lambda *xs: list(row(jax.tree.unflatten(tree, xs)))
            with self._traced_in():
                self._traced[name] = outcome(expanded, run, flat)
        return self._traced[name]

    def _like(self, at: At) -> At:
        cast = lambda arrays, space: [
            np.asarray(a).astype(s.dtype) for a, s in zip(arrays, space, strict=bool(arrays))
        ]
        x = self.subject.leaves
        return At(cast(at.x, x), cast(at.t, x), cast(at.w, self.outputs), cast(at.many, x))

    def compute(self, rows: Mapping[str, Row], at: At) -> dict[str, Any]:
        """The result of each row: a list of NumPy arrays, or the exception that it raises.

        They are compiled as one program, which is much faster than one by one. If they call the
        host, they are compiled one by one: in JAX 0.10, on a CPU with two cores, a program of
        several callbacks and large arrays can wait forever.
        """
        found = {name: self.trace(name, row, at) for name, row in rows.items()}
        good = {n: p for n, p in found.items() if isinstance(p, ClosedJaxpr)}
        at = jax.tree.map(as_double, at) if self.is_exact else self._like(at)
        with double_precision() if self.is_exact else self._traced_in():
            for name, row in rows.items():
                if isinstance(found[name], jax.errors.ConcretizationTypeError):  # runs eagerly
                    run = lambda at, row=row: jax.device_get(list(row(at)))
                    found[name] = outcome(run, jax.tree.map(jnp.asarray, at))
            is_known = tuple(good) in self._compiled
            calls_host = not is_known and any(holds(p, *_CALLBACKS) for p in good.values())
            together = outcome(self._run, good, at) if not calls_host else None
            if isinstance(together, list):
                return found | dict(zip(good, together, strict=True))
            for name, program in good.items():
                found[name] = outcome(lambda p=program, n=name: self._run({n: p}, at)[0])
        return found

    def _run(self, programs: Mapping[str, ClosedJaxpr], at: At) -> list[_Arrays]:
        run = evaluate_in_float64 if self.is_exact else lambda p, xs: jaxpr_as_fun(p)(*xs)
        key = tuple(programs)
        if key not in self._compiled:
            self._compiled[key] = jax.jit(
                lambda xs: [run(p, xs) for p in programs.values()],
                compiler_options=SHORT_COMPILATION,
            )
        return list(map(list, jax.device_get(self._compiled[key](jax.tree.leaves(at)))))

    def one(self, name: str, row: Row, at: At) -> _Arrays:
        """The result of a row. It raises the row's exception."""
        return unless_error(self.compute({name: row}, at)[name])

    # ------------------------------------------------------------ values and derivatives

    @ft.cached_property
    def rows(self) -> dict[str, Row]:
        """The values, the derivatives by the rule, and the expected derivatives."""
        return {
            **rows_of(self.f),
            "jvp expected": lambda at: jvp(self.expected, at.x, at.t),
            "vjp expected": lambda at: vjp(self.expected, at.x, at.w),
        }

    def derive(self, at: At) -> dict[str, Any]:
        """All of `rows`."""
        return self.compute(self.rows, at)

    # ------------------------------------------------------------ precision

    @ft.cached_property
    def program(self) -> ClosedJaxpr | None:
        """The program of the value; `None` if it can't be traced."""
        found = self.trace("value", self.rows["f"], At(self.subject.leaves))
        return found if isinstance(found, ClosedJaxpr) else None

    @ft.cached_property
    def lowest(self) -> np.dtype | None:
        """The dtype of lowest precision on the way to an output; `None` for float64."""
        return None if self.program is None else lowest_of(self.program)

    @ft.cached_property
    def rounded_to(self) -> np.dtype | None:
        """The dtype that a host function rounds the values to, though evaluated in float64."""
        if self.program is None or not self.is_exact:
            return self.lowest
        return lowest_of(self.program, opaque=True)

    @ft.cached_property
    def tolerance(self) -> float:
        """The relative error of a derivative that rounding in its dtypes explains."""
        if self._options.tolerance is not None:
            return self._options.tolerance
        if not self.is_exact:
            return tolerance_of(self.subject.leaves, self.outputs)
        return tolerance_in_float64(self.rounded_to, self.lowest, 1e-5)


def in_float64(own: Side, options: Options, at: At) -> Side:
    """The same function in float64. `at`: the leaves, and directions."""
    if own.lowest is None and own.program is not None:
        return own  # the user's precision is double
    found = lambda side: side.derive(at).items()
    working = lambda side: {name for name, x in found(side) if not isinstance(x, Exception)}
    works = working(own)
    exact = Side(own.subject, options, True)
    exact._traced = own._traced  # the same programs
    # First the one whose values no host function rounds.
    for is_wide in (False, True) if exact.rounded_to is None else (True, False):
        side = Side(own.subject.in_float64(), options, True) if is_wide else exact
        works_there = outcome(working, side)  # it may be for single precision only
        if not isinstance(works_there, Exception) and works <= works_there:
            return side
    return own  # as of Lineax, which can't be evaluated in another precision


def unless_error(result: Any) -> Any:
    """A result; if it is an exception, it is raised."""
    if isinstance(result, Exception):
        raise result
    return result


def expanded(run: Callable[..., Any], args: Sequence[Any]) -> ClosedJaxpr:
    """The program of `run`, without linear maps that are traced when they are evaluated: in
    float64, they may be another function."""
    program = jax.make_jaxpr(run)(*args)
    # JAX traces forward mode of a `jax.custom_vjp`, and raises this error when it compiles it.
    fails = lambda program: any(e.primitive.name == "custom_lin" for e in program.eqns)
    if fails(program) and fails(without_unused(program)):
        raise TypeError("can't apply forward-mode autodiff (jvp) to a custom_vjp function.")
    if not holds(program, LinearCall):
        return program

    def hook(eqn, values):
        known = structure(eqn)
        if isinstance(known, LinearCall):
            return evaluate(known.trace(), values, hook)
        if known is not None and holds(eqn, LinearCall):
            return enter(eqn, values, lambda p, xs, _: evaluate(p, xs, hook))
        return bind(eqn, values)

    return jax.make_jaxpr(lambda *xs: evaluate(program, xs, hook))(*args)


# ---------------------------------------------------------------- `reference=`


def as_reference(
    subject: FlatFunction, reference: Callable[..., Any]
) -> Callable[..., _Arrays]:
    """The derivatives of the reference with the values of the function, as the second
    derivative of a loss depends on the values of its arguments."""
    unbound = subject.of_self(reference) if subject.has_self else reference
    if unbound is None:
        first = next(n for n, i in zip(subject.names, subject.groups, strict=True) if i < 0)
        raise rule_error(
            f"`reference` is not a function of {first}, in which `{subject.name}` is "
            "differentiated.",
            f"`reference` is `{name_of(reference)}`",
            do="Pass another method of the same object as `reference`. To leave the arrays of "
            "the object out, check `lambda x: layer(x)`.",
        )
    kind = lambda x: (jnp.shape(x), jnp.iscomplexobj(x))
    text = f"{{}} in `{subject.name}`, {{}} in `reference`"

    def arrays(*leaves):
        found = unbound(*subject.arguments(leaves), **subject.kwargs)
        out = list(filter(is_output, jax.tree.leaves(found)))
        values = jax.lax.stop_gradient(subject.arrays(*leaves))
        if where := unlike(values, out, "output", text, kind):
            raise rule_error(
                f"`reference` does not return what `{subject.name}` returns.",
                *where,
                do="Pass a function with the same outputs, and with another derivative.",
            )
        moved = [x - jax.lax.stop_gradient(x) for x in out]
        # The function may have fixed the dtype of a value, as of a spike in float32.
        return [v + x.astype(v.dtype) for v, x in zip(values, moved, strict=True)]

    return arrays


# ---------------------------------------------------------------- precision

# By how coarse they are. An integer has no rounding errors: it is piecewise constant.
_DTYPES = (None, None, *map(jnp.dtype, ("float32", "float16", "bfloat16")))


def _coarseness(variable: Any) -> int:
    """The index in `_DTYPES`; 1 for float64, 0 for what is not a number with a derivative."""
    if not is_inexact(variable):
        return 0
    finer = ("float64", "float32", "float16", "bfloat16")
    eps = jnp.finfo(variable.aval.dtype).eps
    return sum(bool(eps >= jnp.finfo(dtype).eps) for dtype in finer)


def lowest_precisions(program: ClosedJaxpr, opaque: bool = False) -> list[np.dtype | None]:
    """For each output, the real dtype of lowest precision on the way from the inputs to it;
    `None` if that is float64, or if it depends on no input.

    A constant in low precision does not count, nor does what no output is computed from.

    - `opaque`: count those equations only that `evaluate_in_float64` runs in the precision
        that they were traced with, such as a call of a host function.
    """

    def apply(eqn, ins, path):
        program = primal_program(eqn)
        if program is not None:
            return interpret(program, ins, domain, (*path, eqn)).outs
        lowest = max(ins, default=0)
        is_counted = lowest > 0 and (not opaque or any(map(is_opaque, (*path, eqn))))
        if is_counted:
            known = (_coarseness(v) for v, x in zip(eqn.invars, ins, strict=True) if x)
            lowest = max(lowest, *known)
        own = lambda v: max(lowest, _coarseness(v)) if is_counted else lowest
        return [own(v) if is_inexact(v) else 0 for v in eqn.outvars]

    # A fact is the coarsest dtype on the way to a value; 0 without an input on the way.
    domain = Domain[int](
        constant=lambda x: 0,
        join=max,
        apply=apply,
        enters=lambda known: not isinstance(known, CallWithRule),
    )
    starts = [1 if opaque else max(1, _coarseness(v)) for v in program.jaxpr.invars]
    return [_DTYPES[fact] for fact in interpret(program, starts, domain).outs]


def lowest_of(program: ClosedJaxpr, opaque: bool = False) -> np.dtype | None:
    """The lowest precision on the way to any output."""
    return max(lowest_precisions(program, opaque), key=_DTYPES.index, default=None)
