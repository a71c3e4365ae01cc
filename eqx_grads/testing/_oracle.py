"""The rows of a table as one program: functions of the same arrays, traced once each, and
compiled together, in one precision.

A rule is judged in float64. The programs are those of the function with float64 arguments. If
the function does not run with these, or is another one there (it draws random numbers, or looks
at a dtype), they are those of the user's precision, evaluated in float64.
"""

import contextlib
import functools as ft
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, Literal

from .._diagnosis._programs.in_float64 import evaluate_in_float64
from .._diagnosis._programs.lowest_precision import lowest_precisions
from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.host_calls import host_function_in
from .._jaxprs.structure import equations, inner_programs, LinearCall, structure
from ._compare import as_real, differences, tolerance_of
from ._options import Options
from ._outcome import outcome
from ._references import jvp, references, vjp
from ._subject import double_precision, FlatFunction
from ._without_rules import without_rules


_Arrays = list[Any]
# Constants of two programs that differ by less are the same number, one of them rounded.
_ROUNDED = 1e-6
# What the flag `JAX_DISABLE_MOST_OPTIMIZATIONS` asks for, on every platform.
_UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Fusion emitters take most of the compilation time on a CPU. JAX 0.12 has no option for them.
_UNFUSED = {
    **_UNOPTIMIZED,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


class At(NamedTuple):
    """What the rows are functions of: the leaves, tangents of them, cotangents of the outputs,
    and a batch of values of each leaf."""

    x: Sequence[Any]
    t: Sequence[Any]
    w: Sequence[Any]
    many: Sequence[Any] = ()


Row = Callable[[At], Sequence[Any]]


@ft.cache
def _compiler_options(platform: str) -> dict[str, Any]:
    """For a short compilation: those that XLA knows in this version."""
    for options in (_UNFUSED, _UNOPTIMIZED) if platform == "cpu" else (_UNOPTIMIZED,):
        compiler = jax.jit(lambda x: x).lower(np.float32(0))
        if not isinstance(outcome(compiler.compile, options), Exception):
            return options
    return {}


def compiled(fn: Callable[..., Any]) -> Any:
    """`jax.jit`, with a short compilation."""
    return jax.jit(fn, compiler_options=_compiler_options(jax.default_backend()))


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

    - `f`, `plain`: the function with its rule and without, of leaves.
    - `references`: the expected derivatives, in forward and in reverse mode.
    - `lowest`: the dtype of lowest precision on the way to an output; `None` for float64.
    - `rounded_to`: what the values are rounded to nonetheless, as by a host function.
    - `is_exact`: whether its programs are evaluated in float64, whatever they cast to.
    """

    def __init__(
        self,
        subject: FlatFunction,
        options: Options,
        traced_in: Callable[[], Any],
        context: Callable[[], Any],
        is_exact: bool = False,
    ):
        self.subject, self.context, self.is_exact = subject, context, is_exact
        self._options, self._traced_in = options, traced_in
        is_decorated = isinstance(subject.fn, jax.custom_jvp | jax.custom_vjp)
        self.f = lambda *xs: list(subject.arrays(*xs))
        self.plain = without_rules(subject.arrays, is_decorated)
        self._traced: dict[str, Any] = {}
        self._compiled: dict[tuple[str, ...], Any] = {}
        self.references = references(subject, self.plain, options)

    @ft.cached_property
    def named_outputs(self) -> list[tuple[str, Any]]:
        """The shapes and dtypes of the outputs, with their names."""
        with self._traced_in():
            return self.subject.named_outputs()

    @property
    def outputs(self) -> list[Any]:
        return [o for _, o in self.named_outputs]

    @property
    def output_names(self) -> list[str]:
        return [name for name, _ in self.named_outputs]

    def exactly(self) -> "Side":
        """The same programs, evaluated in float64."""
        args = self.subject, self._options, self._traced_in, double_precision, True
        other = Side(*args)
        other._traced = self._traced
        return other

    # ------------------------------------------------------------ programs

    def trace(self, name: str, row: Row, at: At) -> Any:
        """The program of a row, or the exception that it raises."""
        if name not in self._traced:
            with self._traced_in():
                like = self._like(at)
                run = lambda *flat: list(
                    row(jax.tree.unflatten(jax.tree.structure(like), flat))
                )
                self._traced[name] = outcome(expanded, run, jax.tree.leaves(like))
        return self._traced[name]

    def _like(self, at: At) -> At:
        cast = lambda arrays, space: [
            np.asarray(a).astype(s.dtype)
            for a, s in zip(arrays, space if arrays else (), strict=True)
        ]
        x = self.subject.leaves
        return At(cast(at.x, x), cast(at.t, x), cast(at.w, self.outputs), cast(at.many, x))

    def compute(self, rows: Mapping[str, Row], at: At) -> dict[str, Any]:
        """What each row gives: a list of NumPy arrays, or the exception that it raises.

        They are compiled as one program, which is much faster than one by one. If that fails,
        they are compiled one by one. So they are if they call the host: in JAX 0.10, on a CPU
        with two cores, a program of several callbacks and large arrays can wait for ever, also
        one of `jax.pure_callback` without this library.
        """
        programs = {name: self.trace(name, row, at) for name, row in rows.items()}
        good = {n: p for n, p in programs.items() if isinstance(p, ClosedJaxpr)}
        at = at if self.is_exact else self._like(at)
        with self.context():
            together = not any(_calls_host(p) for p in good.values()) or len(good) == 1
            found = outcome(self._run, good, at) if good and together else None
            if not isinstance(found, dict):
                found = {}
                for name, program in good.items():
                    one = outcome(self._run, {name: program}, at)
                    found[name] = one[name] if isinstance(one, dict) else one
            for name, error in programs.items():
                if isinstance(error, jax.errors.ConcretizationTypeError):  # it looks at values
                    found[name] = outcome(self._eagerly, rows[name], at)
        return {name: found.get(name, programs[name]) for name in rows}

    def one(self, name: str, row: Row, at: At) -> _Arrays:
        """What a row gives. It raises what that raises."""
        found = self.compute({name: row}, at)[name]
        if isinstance(found, Exception):
            raise found
        return found

    def _run(self, programs: Mapping[str, ClosedJaxpr], at: At) -> dict[str, _Arrays]:
        key = tuple(programs)
        if key not in self._compiled:
            as_fun = lambda p: ft.partial(evaluate_in_float64, p) if self.is_exact else None
            runs = [
                as_fun(p) or (lambda xs, p=p: jaxpr_as_fun(p)(*xs)) for p in programs.values()
            ]
            self._compiled[key] = compiled(lambda xs: [list(run(xs)) for run in runs])
        results = self._compiled[key](jax.tree.leaves(at))
        results = [[np.asarray(x) for x in result] for result in results]
        return dict(zip(key, results, strict=True))

    def _eagerly(self, row: Row, at: At) -> _Arrays:
        at = jax.tree.map(jnp.asarray, at)
        return [np.asarray(x) for x in row(at)]

    def hold_second_order(self) -> bool:
        """Trace the second derivatives in this precision, and keep the programs: see
        `in_float64`. Whether they capture NumPy arrays."""
        tangents = lambda fn: lambda *xs: jax.jvp(fn, xs, xs)[1]
        cotangents = lambda fn: lambda *xs: (lambda out, pull: pull(out))(*jax.vjp(fn, *xs))
        pairs = (cotangents, tangents), (tangents, cotangents), (cotangents, cotangents)
        with self._traced_in():
            programs = [jax.make_jaxpr(outer(inner(self.f))) for outer, inner in pairs]
            self._held = [outcome(trace, *self.subject.leaves) for trace in programs]
        return any(isinstance(p, ClosedJaxpr) and captures_numpy(p) for p in self._held)

    # ------------------------------------------------------------ values and derivatives

    @ft.cached_property
    def rows(self) -> dict[str, Row]:
        """The value, the derivatives by the rule, and those that are expected."""
        rows: dict[str, Row] = {
            "f": lambda at: self.f(*at.x),
            "jvp": lambda at: jvp(self.f, at.x, at.t),
            "vjp": lambda at: vjp(self.f, at.x, at.w),
        }
        for prefix, found in zip(("jvp", "vjp"), self.references, strict=True):
            for i, r in enumerate(found):
                way = (lambda at, r=r: r.derivative(at.x, at.t)) if prefix == "jvp" else (
                    lambda at, r=r: r.derivative(at.x, at.w))  # fmt: skip
                rows[f"{prefix} {i}"] = way
        if self._options.is_wrong_on_purpose:
            rows["jvp plain"] = lambda at: jvp(self.plain, at.x, at.t)
            rows["vjp plain"] = lambda at: vjp(self.plain, at.x, at.w)
        return rows

    def derive(self, t: Sequence[Any], w: Sequence[Any], x: Sequence[Any] | None = None):
        """All of `rows` at the leaves, or at `x`."""
        return self.compute(self.rows, At(self.subject.leaves if x is None else x, t, w))

    def value(self, x: Sequence[Any] | None = None) -> _Arrays:
        at = At(self.subject.leaves if x is None else x, (), ())
        return self.one("value", lambda at: self.f(*at.x), at)

    # ------------------------------------------------------------ precision

    def program(self) -> ClosedJaxpr | None:
        """Of the value; `None` if it can't be traced."""
        at = At(self.subject.leaves, (), ())
        found = self.trace("value", lambda at: self.f(*at.x), at)
        return found if isinstance(found, ClosedJaxpr) else None

    @ft.cached_property
    def lowest(self) -> np.dtype | None:
        return self._lowest(opaque=False)

    @ft.cached_property
    def rounded_to(self) -> np.dtype | None:
        return self._lowest(opaque=True) if self.is_exact else self.lowest

    def _lowest(self, *, opaque: bool) -> np.dtype | None:
        program = self.program()
        if program is not None:
            dtypes = lowest_precisions(program, opaque=opaque)
        else:
            dtypes = [] if opaque else [jnp.finfo(x.dtype).dtype for x in self.outputs]
        dtypes = [dtype for dtype in dtypes if dtype is not None and dtype != np.float64]
        return max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps), default=None)

    @ft.cached_property
    def tolerance(self) -> float:
        """The relative error of a derivative that rounding in its dtypes explains."""
        if self._options.tolerance is not None:
            return self._options.tolerance
        if self.context is contextlib.nullcontext and not self.is_exact:
            return tolerance_of(self.subject.leaves, self.outputs)
        low = [] if self.rounded_to is None else [np.zeros((), self.rounded_to)]
        tolerance = max(tolerance_of(low), 1e-5)
        if self.is_exact and self.lowest is not None:
            # The function may look at a dtype, as a solver does for its tolerance.
            is_own = self._traced_in is contextlib.nullcontext
            eps = float(jnp.finfo(self.lowest).eps)
            is_looser = eps > tolerance and (is_own or self._rounds_constants())
            tolerance += eps if is_looser else 0.0
        return tolerance

    def _rounds_constants(self) -> bool:
        """Whether a number in the function or its rule was rounded to 8 or 11 bits, such as the
        0.1 in `0.1 * x` for an `x` in bfloat16: the rule may have the number itself."""
        programs = [p for p in self._traced.values() if isinstance(p, ClosedJaxpr)]
        atoms = [v for p in programs for eqn in equations(p) for v in eqn.invars]
        numbers = [v.val for v in atoms if isinstance(v, Literal)]
        numbers += [x for p in programs for x in p.consts if np.ndim(x) == 0]
        return any(map(_is_rounded, numbers))

    @property
    def where_rounded(self) -> str:
        """What is in lower precision than float64, for a report; empty if nothing is."""
        if self.lowest is None:
            return ""
        is_output = any(jnp.finfo(x.dtype).dtype == self.lowest for x in self.outputs)
        return f"{'the output is' if is_output else 'it computes in'} {self.lowest}"


def expanded(run: Callable[..., Any], args: Sequence[Any]) -> ClosedJaxpr:
    """The program of `run`, without linear maps that are traced when they are evaluated: in
    float64, they may be another function."""
    program = jax.make_jaxpr(run)(*args)
    is_linear = lambda p: any(isinstance(structure(e), LinearCall) for e in equations(p))
    if not is_linear(program):
        return program

    def hook(eqn, values):
        known = structure(eqn)
        if isinstance(known, LinearCall):
            return evaluate(known.trace(), values, hook)
        if known is not None and any(map(is_linear, inner_programs(eqn))):
            return enter(eqn, values, lambda p, xs, _: evaluate(p, xs, hook))
        return bind(eqn, values)

    return jax.make_jaxpr(lambda *xs: evaluate(program, xs, hook))(*args)


def captures_numpy(program: ClosedJaxpr) -> bool:
    return any(isinstance(x, np.ndarray) for x in program.consts) or any(
        captures_numpy(inner) for eqn in program.eqns for inner in inner_programs(eqn)
    )


def _calls_host(program: ClosedJaxpr) -> bool:
    return any("callback" in e.primitive.name for e in equations(program))


def _is_rounded(number: Any) -> bool:
    """Whether a number in half precision has many significant bits, and so is not what a user
    wrote: 0.75 has two of them, and 0.1 has all that the dtype has."""
    if getattr(number, "dtype", None) not in (jnp.bfloat16, jnp.float16):
        return False
    fraction, _ = np.frexp(np.float64(number))
    return bool(np.isfinite(fraction) and fraction * 16 % 1)


# ---------------------------------------------------------------- float64


def in_own_precision(subject: FlatFunction, options: Options) -> Side:
    return Side(subject, options, contextlib.nullcontext, contextlib.nullcontext)


def in_float64(own: Side, options: Options, at: At) -> Side:
    """The same in float64; `own` itself if that is the user's precision. `at`: directions."""
    # First the own precision: of a NumPy array that a function captures, JAX has one constant
    # for both precisions, in that of the first program that is alive (JAX 0.10 to 0.12).
    works = _working(own, at)
    retraced, is_same = _retraced(own, options, at, works)
    if not is_same:
        exact = own.exactly()
        if works <= _working(exact, at):
            return exact
    wide = retraced or own  # as of Lineax, which can't be evaluated in another precision
    if wide.lowest is None or options.expected_tangent or options.expected_cotangent:
        return wide  # a formula is rounded as it is written
    exact = wide.exactly()
    written, unrounded = (outcome(side.value) for side in (wide, exact))
    if isinstance(written, Exception) or isinstance(unrounded, Exception):
        return wide
    error = differences(written, unrounded, wide.output_names)[0].error
    is_same = error <= tolerance_of([np.zeros((), wide.lowest)])
    return exact if is_same and works <= _working(exact, at) else wide


def _retraced(own: Side, options: Options, at: At, works: set[str]) -> tuple[Side | None, bool]:
    """The function of float64 arguments, if that works as well and has the same value; and
    whether all of it is the same."""
    subject = own.subject
    if all(jnp.finfo(x.dtype).bits == 64 for x in subject.leaves):
        return own, True
    wide = outcome(_in_x64, subject, options)
    if isinstance(wide, Exception) or not works <= _working(wide, at):
        return None, False
    _ = own.program(), wide.program()  # are traced
    # The derivatives by the rule may differ: it may be wrong in one precision.
    names = ["value", *(name for name in own.rows if name not in ("f", "jvp", "vjp"))]
    pairs = [(own._traced.get(name), wide._traced.get(name)) for name in names]
    known = [all(isinstance(p, ClosedJaxpr) for p in pair) for pair in pairs]
    same = [not k or is_same_program(*pair) for k, pair in zip(known, pairs, strict=True)]
    return (wide if same[0] else None), all(same)


def _in_x64(subject: FlatFunction, options: Options) -> Side:
    with double_precision():
        wide = Side(subject.in_float64(), options, double_precision, double_precision)
    _ = wide.named_outputs  # it may be for single precision only
    return wide


def _working(side: Side, at: At) -> set[str]:
    found = side.derive(at.t, at.w) if side.outputs else {}
    return {name for name, result in found.items() if not isinstance(result, Exception)}


def is_same_program(one: Any, other: Any, exactly: bool = False) -> bool:
    """Whether two traced programs have the same equations with the same numbers in them,
    whatever the dtypes: then they differ in rounding only. `exactly`: not even in that."""
    rounded = 0.0 if exactly else _ROUNDED
    pairs = itertools.zip_longest(_items(one), _items(other))
    return all(_is_same_item(a, b, rounded) for a, b in pairs)


def _items(program: Any) -> Iterator[Any]:
    for x in program.consts:
        yield _constant(x)
    for eqn in program.eqns:
        if eqn.primitive.name != "convert_element_type":
            numbers = sorted((k, v) for k, v in eqn.params.items() if isinstance(v, int))
            yield f"{eqn.primitive.name} {[v.aval.shape for v in eqn.outvars]} {numbers}"
        for v in eqn.invars:
            if isinstance(v, Literal):
                yield _constant(v.val)
        # What is in the call of a host function depends on the thread, see `host_bits.py`.
        for inner in () if host_function_in(eqn) else inner_programs(eqn):
            yield from _items(inner)


def _constant(x: Any) -> Any:
    if isinstance(x, Tracer):
        # An inner program may hold what the program around it computes (JAX 0.12).
        return str(jnp.shape(x))
    is_number = not jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)
    return as_real(x if is_number else jax.random.key_data(x))


def _is_same_item(a: Any, b: Any, rounded: float) -> bool:
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return type(a) is type(b) and a == b
    return a.shape == b.shape and np.allclose(a, b, rtol=rounded, atol=0.0, equal_nan=True)
