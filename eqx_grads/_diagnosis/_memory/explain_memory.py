"""`explain_memory`: what a loss keeps for its backward pass, and what to checkpoint."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from ..._errors import check_flags
from ..._jaxprs.dependence import without_unused
from ..._jaxprs.evaluate import evaluate
from ..._jaxprs.structure import equations
from .._programs.peak_memory import peak_bytes
from ..origins import NumberedLoss
from ..progress import doing, showing_progress
from ..traced_loss import trace_loss, TracedLoss
from .checkpoints import Candidate, candidates, with_candidate
from .maps import MapCall, seeing_maps
from .report import MemoryAdvice, MemoryReport
from .residuals import Gradient, Residual


# Each candidate is traced once.
_MOST_CANDIDATES = 4
# XLA takes a minute for 30000 equations, and the estimate needs none of it.
_MOST_COMPILED = 5000
_NOT_COMPILED = (
    "The gradient has {} equations, and was not compiled: XLA would take long. "
    "`report.verify()` compiles it."
)
# What saves less is not worth the recomputation.
_LEAST_SAVING = 0.1


@showing_progress("explain_memory")
def explain_memory(
    loss: Callable[..., Any],
    model: PyTree,
    *args: Any,
    compiled: bool = True,
    **kwargs: Any,
) -> MemoryReport:
    r"""What is kept from the forward to the backward pass of a loss: how many bytes, computed
    at which line of your code, in which layer and loop. And which checkpoint saves how much.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp
        import textwrap

        class Network(eqx.Module):
            cell: eqx.nn.GRUCell
            readout: eqx.nn.Linear

            def __call__(self, xs):
                step = lambda h, x: (self.cell(x, h), None)
                h, _ = jax.lax.scan(step, jnp.zeros(32), xs)
                return self.readout(h)

        key1, key2 = jax.random.split(jax.random.key(0))
        network = Network(eqx.nn.GRUCell(3, 32, key=key1), eqx.nn.Linear(32, 1, key=key2))
        loss = lambda network, xs: jnp.mean(jax.vmap(network)(xs) ** 2)

        report = eqg.explain_memory(loss, network, jnp.ones((8, 100, 3)))
        print(report.found[0].path, report.found[0].n_steps)
        print(textwrap.fill(report.advice[0].cure, 80))
        print(report.advice[0].predicted < 0.2 * report.compiled)
        ```

        ```text
        cell 100
        Run the loop at page.py:13 by `eqg.filter_scan(..., checkpoint=4)`, which
        computes each step twice.
        True
        ```

    **Arguments:**

    - `loss`: called as `loss(model, *args, **kwargs)`. Returns a real scalar.
    - `model`: any PyTree, usually an `eqx.Module`. The gradient is with respect to its
        inexact arrays.
    - `*args`, `**kwargs`: anything.
    - `compiled`: whether to compile the gradient, and report its temporary memory. Only
        [`eqx_grads.MemoryReport.verify`][] compiles a gradient of more than 5000 equations.

    **Returns:**

    An [`eqx_grads.MemoryReport`][], which prints as a table with the advice that leaves the
    fewest bytes. What is kept is exact: the leaves of the pullback that `jax.vjp` returns and
    that the backward pass uses, each array once. The temporary memory of the gradient is an
    estimate from its program: the residuals, and all other arrays at the peak, without the
    arguments and the gradients themselves. On a CPU, it is within 8 % of what XLA allocates for
    the models of the tests, and further off for programs that save memory already.

    Nothing is computed. The loss is traced, and its gradient once more for each of at most four
    candidates: a loop by [`eqx_grads.filter_scan`][], layers in
    [`eqx_grads.filter_checkpoint`][], a `jax.vmap` by [`eqx_grads.filter_map`][].

    **Raises:**

    [`eqx_grads.RuleError`][] if the loss does not return a real scalar or can't be traced, or
    if there is no inexact array in `model`.
    """
    check_flags("explain_memory", compiled=compiled)
    doing("tracing the loss and its gradient")

    def trace(chunked: MapCall | None = None, chunk: int | None = None):
        with seeing_maps(chunked, chunk) as seen:
            traced = trace_loss(
                "explain_memory", loss, model, args, kwargs, steps_are_visible=False
            )
        return traced, seen.calls

    traced, maps = trace()
    numbered = NumberedLoss(traced)
    gradient = Gradient(numbered)
    calls = gradient.plain_calls()
    if calls:
        traced = dataclasses.replace(traced, plain=calls)
        numbered = NumberedLoss(traced)
        gradient = Gradient(numbered)
    pairs = list(zip(gradient.sources, gradient.residuals(), strict=True))
    again = lambda candidate: trace(candidate.map_call, candidate.chunk)[0].program
    apply = lambda candidate: with_candidate(traced, candidate, again)
    estimated = peak_bytes(gradient.gradient)
    advice = _advice(candidates(numbered, pairs, maps), apply, traced, estimated)
    n_equations = sum(1 for _ in equations(gradient.gradient))
    is_large = compiled and n_equations > _MOST_COMPILED
    doing("compiling the gradient")
    plain = lambda *values: evaluate(traced.program, values)[0]
    functions = [plain, *(apply(candidate) for _, candidate in advice)]
    return MemoryReport(
        _with_cures([r for _, r in pairs], advice),
        estimated=estimated,
        compiled=_compiled_bytes(plain, traced) if compiled and not is_large else None,
        advice=[one for one, _ in advice],
        measure=[ft.partial(_compiled_bytes, fn, traced) for fn in functions],
        not_compiled=_NOT_COMPILED.format(n_equations) if is_large else "",
    )


Advice = Sequence[tuple[MemoryAdvice, Candidate]]


def _advice(found: Sequence[Candidate], apply, traced: TracedLoss, estimated: int) -> Advice:
    """The candidates that are worth it, applied, the fewest bytes left first."""
    advice = []
    least = _LEAST_SAVING * estimated
    promising = [c for c in found if c.gain > least][:_MOST_CANDIDATES]
    for i, candidate in enumerate(promising):
        doing("tracing with checkpoint", i, len(promising))
        program = jax.make_jaxpr(_gradient(apply(candidate)))(*_types(traced))
        predicted = peak_bytes(without_unused(program))
        if estimated - predicted > least:
            one = MemoryAdvice(
                **candidate.source.fields(),
                kind=candidate.kind,
                cure=candidate.cure,
                path=candidate.path,
                primitive=candidate.primitive,
                saves=estimated - predicted,
                predicted=predicted,
                is_undone=not candidate.is_in_loop and undoes_checkpoints(),
            )
            advice.append((one, candidate))
    return sorted(advice, key=lambda pair: pair[0].predicted)


def _with_cures(residuals: Sequence[Residual], advice: Advice) -> list[Residual]:
    """The residuals, each with the best advice for it."""
    cures: dict[int, str] = {}
    for one, candidate in advice:
        for i in candidate.covers:
            cures.setdefault(i, one.cure)
    return [dataclasses.replace(r, cure=cures.get(i, "")) for i, r in enumerate(residuals)]


def _gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda arrays, others: jax.value_and_grad(lambda x: fn(*x, *others))(arrays)


def _types(traced: TracedLoss) -> tuple[list[Any], list[Any]]:
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in traced.program.in_avals]
    n = len(traced.leaves)
    return types[:n], types[n:]


def _compiled_bytes(fn: Callable[..., Any], traced: TracedLoss) -> int | None:
    """The temporary bytes of the compiled gradient; `None` where the platform does not tell."""
    compiled = jax.jit(_gradient(fn)).lower(*_types(traced)).compile()
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


def undoes_checkpoints() -> bool:
    """Whether XLA keeps what a checkpoint outside of a loop recomputes, as it finds that it is
    the same. On a CPU it does, until JAX 0.12."""
    return jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12)
