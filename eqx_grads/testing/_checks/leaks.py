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

from ..._jaxprs.structure import equations
from .._case import Case
from .._findings import broke, failed, passed, skipped
from .._report import FAILED, Finding


_TRACES = 4
# Primitives that JAX compiles again in each eager call, with or without a rule.
_COMPILED_ANEW = ("scan[", "while[", "cond[", "callback[", "shard_map[", "custom_linear_solve[")


_KEEPS = "the rule keeps a tracer"
# Before Python 3.13, JAX's report of some leaks crashes: equinox#997.
_CRASHES = "IndexError: list index out of range"


def leaks(case: Case) -> Iterator[Finding]:
    """No leaked tracers, no repeated compilation, results that can be copied and pickled."""
    for finding in _leaks(case):
        is_leak = _KEEPS in finding.text or finding.raised.startswith(_CRASHES)
        if finding.verdict == FAILED and is_leak and case.is_solver:
            # `lineax.linear_solve` does so: in a run-time check, and from JAX 0.11 on for each
            # operator that is a function.
            finding = skipped("leaks", "Lineax, with which `implicit` solves, keeps tracers")
        yield finding


def _leaks(case: Case) -> Iterator[Finding]:
    if not case.own.outputs:
        yield skipped("leaks", "no output has a derivative")
        return
    mode = "reverse"
    for finding, error in _under_the_checker(case, mode):
        if _is_of_forward_only(case, error):
            mode = "forward"
            break
        yield finding
    if mode == "forward":
        yield from (finding for finding, _ in _under_the_checker(case, mode))
    yield _live_tracers(case, mode)
    if mode == "reverse":
        yield _compilations(case)
    yield _copies(case)


def _is_of_forward_only(case: Case, error: Exception | None) -> bool:
    """Whether an error is that of a function without reverse mode. That is asked last: it calls
    the function, and a leak shows when it is traced for the first time."""
    return error is not None and not _is_leak(error) and not case.offers_reverse


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
    return {
        "jit of the gradient": lambda: jax.make_jaxpr(lambda xs: derive(fn, xs))(leaves),
        "gradient of jit": lambda: jax.make_jaxpr(
            lambda xs: derive(jax.jit(lambda *ys: list(fn(*ys))), xs)
        )(leaves),
        "scan": lambda: jax.make_jaxpr(scan)(leaves),
    }


def _under_the_checker(case: Case, mode: str) -> Iterator[tuple[Finding, Exception | None]]:
    """No error of `jax.checking_leaks`, unless the function without its rule has one too: then
    the error is not about the rule. With each finding, its error."""
    plain = _traces(case, case.own.plain.fn, mode)
    for name, run in _traces(case, case.own.rule.fn, mode).items():
        where = f"{name}, under `jax.checking_leaks`"
        error = _leak(run)
        if error is None:
            yield passed("leaks", where), None
        elif not _is_leak(error):
            yield broke("leaks", where, error), error
        elif _leak(plain[name]) is not None:
            yield skipped("leaks", f"{where}: JAX reports one without the rule as well"), error
        else:
            cause = "the rule keeps a tracer: in a list, a global, an attribute or a cache"
            yield broke("leaks", where, error, cause), error


def _leak(run) -> Exception | None:
    try:
        with jax.checking_leaks():
            run()
    except Exception as e:
        # The checker reports a leak in the place of an error whose traceback holds tracers.
        own = e.__context__
        if isinstance(own, Exception) and _is_leak(e) and not _is_leak(own):
            return own
        return e
    return None


def _is_leak(error: Exception) -> bool:
    return "eaked" in str(error) or isinstance(error, jax.errors.UnexpectedTracerError)


def _live_tracers(case: Case, mode: str) -> Finding:
    """The number of live tracers does not grow from one trace to the next."""
    where = f"live tracers after {_TRACES} traces"
    try:
        n = _growth(case, case.own.rule.fn, mode)
        if not n:
            return passed("leaks", where)
        who = "the function, without its rule," if _is_of_solver(case, mode) else "the rule"
    except Exception as e:
        return broke("leaks", where, e)
    return failed(
        "leaks", where, f"{n} more with each trace\n  likely cause: {who} keeps a tracer"
    )


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


def _is_of_solver(case: Case, mode: str) -> bool:
    """Whether what `eqg.implicit` decorates keeps tracers, and does not call Lineax."""
    if not case.is_solver:
        return False
    found = equations(jax.make_jaxpr(case.own.rule.fn)(*case.subject.leaves))
    is_of_lineax = any(e.primitive.name == "linear_solve" for e in found)
    return not is_of_lineax and _growth(case, case.own.plain.fn, mode) > 0


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


def _compilations(case: Case) -> Finding:
    """The third eager call compiles nothing."""
    where = "compilation in repeated calls"
    rule, leaves, w = case.own.rule, case.subject.leaves, case.eager.cotangents
    try:
        program = str(jax.make_jaxpr(lambda xs: jax.vjp(rule.fn, *xs)[1](w))(leaves))
        if any(name in program for name in _COMPILED_ANEW):
            return skipped("leaks", "JAX compiles loops and callbacks in each eager call")
        n = case.eager.vjp(2).n_compiled
    except Exception as e:
        return broke("leaks", where, e)
    if n:
        text = (
            f"the third eager call still compiled {n} programs\n  likely cause: "
            "the rule makes a new `jax.jit`, or a new static argument, in each call"
        )
        return failed("leaks", where, text)
    return passed("leaks", where)


def _copies(case: Case) -> Finding:
    where = "copy and pickle of the result"
    subject = case.subject
    out = case.eager.value
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(out)):
        return failed("leaks", where, "an eager call returned a tracer")
    for name, act in (("copy.deepcopy", copy.deepcopy), ("pickle", _pickled)):
        if _works(act, jax.tree.leaves((subject.args, subject.kwargs))):
            try:
                act(out)
            except Exception as e:
                return broke("leaks", f"{name} of the result", e)
    return passed("leaks", where)


def _pickled(x):
    return pickle.loads(pickle.dumps(x))


def _works(act, x) -> bool:
    try:
        act(x)
    except Exception:
        return False
    return True
