"""The check `leaks`: no tracer is kept alive, and no eager call compiles again."""

import contextlib
import copy
import gc
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import Tracer

from .._jaxprs.structure import equations
from ._case import Case
from ._outcome import outcome
from ._report import broke, FAILED, failed, Finding, passed, skipped


_TRACES = 4
# Primitives that JAX compiles again in each eager call, with or without a rule.
_COMPILED_ANEW = ("scan", "while", "cond", "callback", "shard_map", "custom_linear_solve")
_KEEPS = "the rule keeps a tracer"
# Before Python 3.13, JAX's report of some leaks crashes: equinox#997.
_CRASHES = "IndexError: list index out of range"


def leaks(case: Case) -> Iterator[Finding]:
    """No leaked tracers, no repeated compilation, results that can be copied and pickled."""
    if not case.outputs:
        yield skipped("leaks", "no output has a derivative")
        return
    mode, error = "reverse", _leak(_traces(case, case.own.f, "reverse")["jit of the gradient"])
    # That is asked last: it calls the function, and a leak shows when it is traced first.
    if error is not None and not _is_leak(error) and not case.has_reverse:
        mode, error = (
            "forward",
            _leak(_traces(case, case.own.f, "forward")["jit of the gradient"]),
        )
    for finding in (*_under_the_checker(case, mode, error), _live_tracers(case, mode)):
        is_leak = _KEEPS in finding.cause or finding.raised.startswith(_CRASHES)
        if finding.verdict == FAILED and is_leak and case.is_solver:
            # `lineax.linear_solve` does so: in a run-time check, and from JAX 0.11 on for each
            # operator that is a function.
            finding = skipped("leaks", "Lineax, with which `implicit` solves, keeps tracers")
        yield finding
    if mode == "reverse":
        yield _compilations(case)
    yield _copies(case)


def _traces(case: Case, fn: Callable[..., Any], mode: str) -> dict[str, Callable[[], Any]]:
    """What traces a derivative of `fn`. Nothing is compiled: leaks are a matter of tracing."""
    leaves, w, t = case.subject.leaves, case.eager.cotangents, case.eager.tangents

    def derive(fn, xs):
        run = lambda *ys: list(fn(*ys))
        if mode == "reverse":
            return jax.vjp(run, *xs)[1](list(w))
        # In the place of the cotangents: all the tangents of the outputs, in one number.
        moved = jax.tree.reduce(lambda total, x: total + x.sum(), jax.jvp(run, xs, t)[1])
        return [x + moved.astype(x.dtype) for x in xs]

    def scan(xs):
        step = lambda carry, _: (carry, derive(fn, carry))
        return jax.lax.scan(step, xs, None, length=2)

    # New functions each time: JAX must not find the trace of an earlier one.
    jitted = lambda xs: derive(jax.jit(lambda *ys: list(fn(*ys))), xs)
    return {
        "jit of the gradient": lambda: jax.make_jaxpr(lambda xs: derive(fn, xs))(leaves),
        "gradient of jit": lambda: jax.make_jaxpr(jitted)(leaves),
        "scan": lambda: jax.make_jaxpr(scan)(leaves),
    }


def _under_the_checker(case: Case, mode: str, first: Exception | None) -> Iterator[Finding]:
    """No error of `jax.checking_leaks`, unless the function without its rule has one too: then
    the error is not about the rule. `first`: the error of the first trace."""
    plain = _traces(case, case.own.plain, mode)
    for name, run in _traces(case, case.own.f, mode).items():
        where = f"{name}, under `jax.checking_leaks`"
        error = first if name == "jit of the gradient" else _leak(run)
        if error is None:
            yield passed("leaks", where)
        elif not _is_leak(error):
            yield broke("leaks", where, error)
        elif _leak(plain[name]) is not None:
            yield skipped("leaks", f"{where}: JAX reports one without the rule as well")
        else:
            cause = f"{_KEEPS}: in a list, a global, an attribute or a cache"
            yield broke("leaks", where, error, cause)


def _leak(run) -> Exception | None:
    def checked():
        with jax.checking_leaks():
            run()

    error = outcome(checked)
    # The checker reports a leak in the place of an error whose traceback holds tracers.
    own = getattr(error, "__context__", None)
    return (
        own if isinstance(own, Exception) and _is_leak(error) and not _is_leak(own) else error
    )


def _is_leak(error: Exception) -> bool:
    return "eaked" in str(error) or isinstance(error, jax.errors.UnexpectedTracerError)


def _live_tracers(case: Case, mode: str) -> Finding:
    """The number of live tracers does not grow from one trace to the next."""
    where = f"live tracers after {_TRACES} traces"
    n = outcome(_growth, case, case.own.f, mode)
    if isinstance(n, Exception):
        return broke("leaks", where, n)
    if not n:
        return passed("leaks", where)
    who = (
        "the function, without its rule, keeps a tracer"
        if _is_of_solver(case, mode)
        else _KEEPS
    )
    return failed("leaks", where, f"{n} more with each trace", who)


def _growth(case: Case, fn: Callable[..., Any], mode: str) -> int:
    """How many more tracers are alive after each trace."""
    counts = []
    with _older_objects_frozen():
        for _ in range(_TRACES):
            _traces(case, fn, mode)["jit of the gradient"]()
            gc.collect()
            counts.append(sum(isinstance(x, Tracer) for x in gc.get_objects()))
    growth = [b - a for a, b in itertools.pairwise(counts)]
    return growth[-1] if all(g > 0 for g in growth[1:]) else 0


@contextlib.contextmanager
def _older_objects_frozen():
    """Garbage collection looks only at what is made inside, and not each time at all that was
    imported before."""
    is_frozen = gc.get_freeze_count() > 10_000  # not by Python itself, which freezes a few
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()


def _is_of_solver(case: Case, mode: str) -> bool:
    """Whether what `eqg.implicit` decorates keeps tracers, and does not call Lineax."""
    program = case.own.program()
    if program is None or not case.is_solver:
        return False
    is_of_lineax = any(e.primitive.name == "linear_solve" for e in equations(program))
    return not is_of_lineax and _growth(case, case.own.plain, mode) > 0


def _compilations(case: Case) -> Finding:
    """The third eager call compiles nothing."""
    where = "compilation in repeated calls"
    f, leaves, w = case.own.f, case.subject.leaves, case.eager.cotangents
    program = outcome(jax.make_jaxpr(lambda xs: jax.vjp(f, *xs)[1](list(w))), leaves)
    if isinstance(program, Exception):
        return broke("leaks", where, program)
    if any(name in e.primitive.name for e in equations(program) for name in _COMPILED_ANEW):
        return skipped("leaks", "JAX compiles loops and callbacks in each eager call")
    call = outcome(case.eager.vjp, 2)
    if isinstance(call, Exception):
        return broke("leaks", where, call)
    if call.n_compiled:
        text = f"the third eager call still compiled {call.n_compiled} programs"
        cause = "the rule makes a new `jax.jit`, or a new static argument, in each call"
        return failed("leaks", where, text, cause)
    return passed("leaks", where)


def _copies(case: Case) -> Finding:
    where = "copy and pickle of the result"
    subject, out = case.subject, case.eager.value
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(out)):
        return failed("leaks", where, "an eager call returned a tracer")
    for name, act in (("copy.deepcopy", copy.deepcopy), ("pickle", _pickled)):
        arguments = outcome(act, jax.tree.leaves((subject.args, subject.kwargs)))
        result = outcome(act, out)
        if isinstance(result, Exception) and not isinstance(arguments, Exception):
            return broke("leaks", f"{name} of the result", result)
    return passed("leaks", where)


def _pickled(x):
    return pickle.loads(pickle.dumps(x))
