"""`explain_memory`: what a loss keeps for its backward pass, and what to checkpoint."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..._errors import check_flags, RuleError
from ..._jaxprs.dependence import without_unused
from ..._jaxprs.evaluate import evaluate
from ..._jaxprs.structure import equations
from .._programs.peak_memory import peak_bytes
from ..origins import NumberedLoss
from ..progress import doing, showing_progress
from ..source_lines import UNKNOWN
from ..traced_loss import trace_loss, TracedLoss
from .advice import Candidate, candidates, Pairs, with_checkpoints
from .loop_with_checkpoints import may_replay
from .remarks import remarks_on_loops
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
    - `compiled`: whether to compile the gradient, and report its temporary memory. Without,
        there is the estimate only; so it is for a gradient of more than 5000 equations, those
        of inner programs included.

    **Returns:**

    An [`eqx_grads.MemoryReport`][], which prints as a table. What is kept is exact: the
    leaves of the pullback that `jax.vjp` returns and that the backward pass uses, each array
    once. The temporary memory of the gradient is an estimate from its program: the residuals,
    and all other arrays at the peak. On a CPU it is within 8 % of what XLA allocates
    for the eight models of the tests, and within 22 % for convolutions with pooling; of a
    cross-entropy of many logits it is 0.63 to 1.5 times that, for programs with checkpoints
    or in chunks, 0.67 to 2.3 times, and for models in `bfloat16`, of which XLA keeps copies in
    `float32` on a CPU, about half. The gradients themselves and the arguments do not count.

    Nothing is computed. The loss is traced, and its gradient once more for each of at most
    four checkpoints, or uses of [`eqx_grads.losses.linear_cross_entropy`][], that may help, and
    for a loop that may be replayed.
    With `compiled=True` one program is compiled, and [`eqx_grads.MemoryReport.verify`][]
    compiles one for each advice. XLA takes longer than all else here: for a loss of 9000
    equations in a row, three quarters of a minute.

    What is kept for a function with a derivative of its own, such as a solver or a
    `filter_scan` with `checkpoint="replay"`, is shown at the line that calls it. A
    `filter_scan` with `checkpoint="auto"` that chose plain scan is shown as plain scan.

    **Raises:**

    [`eqx_grads.RuleError`][] if the loss does not return a real scalar or can't be traced, or
    if there is no inexact array in `model`.
    """
    check_flags("explain_memory", compiled=compiled)
    doing("tracing the loss and its gradient")
    traced = trace_loss("explain_memory", loss, model, args, kwargs, steps_are_visible=False)
    numbered = NumberedLoss(traced)
    gradient = Gradient(numbered)
    calls = gradient.plain_calls()
    if calls:
        traced = dataclasses.replace(traced, plain=calls)
        numbered = NumberedLoss(traced)
        gradient = Gradient(numbered)
    pairs = list(zip(gradient.sources, gradient.residuals(), strict=True))
    plain = ft.partial(_evaluate, traced)
    estimated = peak_bytes(gradient.gradient)
    advice = _advice(numbered, pairs, estimated)
    n_equations = sum(1 for _ in equations(gradient.gradient))
    is_large = compiled and n_equations > _MOST_COMPILED
    left = min([estimated, *(one.predicted for one, _ in advice)])
    doing("compiling the gradient")
    functions = [plain, *(with_checkpoints(traced, candidate) for _, candidate in advice)]
    return MemoryReport(
        _with_cures([r for _, r in pairs], advice),
        estimated=estimated,
        compiled=_compiled_bytes(plain, traced) if compiled and not is_large else None,
        advice=[advice for advice, _ in advice],
        measure=[ft.partial(_compiled_bytes, fn, traced) for fn in functions],
        remarks=remarks_on_loops(
            numbered, pairs, left, _left_by_replay(numbered, advice, estimated)
        ),
        not_compiled=_NOT_COMPILED.format(n_equations) if is_large else "",
    )


def _evaluate(traced: TracedLoss, *values: Any) -> Any:
    return evaluate(traced.program, values)[0]


def _advice(
    numbered: NumberedLoss, pairs: Pairs, estimated: int
) -> list[tuple[MemoryAdvice, Candidate]]:
    found = []
    least = _LEAST_SAVING * estimated
    promising = [c for c in candidates(numbered, pairs) if c.gain > least]
    promising = promising[:_MOST_CANDIDATES]
    for i, candidate in enumerate(promising):
        doing("tracing with checkpoint", i, len(promising))
        fn = with_checkpoints(numbered.traced, candidate)
        predicted = _estimate(fn, numbered.traced)
        saves = estimated - predicted
        if saves > least:
            is_undone = not candidate.is_in_loop and _undoes_checkpoints()
            origin = candidate.origin
            advice = MemoryAdvice(
                **(origin.source if origin else UNKNOWN).fields(),
                kind=candidate.kind,
                cure=candidate.cure,
                path=candidate.path,
                primitive=origin.primitive if origin else "",
                saves=saves,
                predicted=predicted,
                is_undone=is_undone,
            )
            found.append((advice, candidate))
    found = [(one, c) for one, c in found if not _is_no_better(one, c, found)]
    return sorted(found, key=lambda pair: pair[0].predicted + pair[1].outputs)


def _left_by_replay(
    numbered: NumberedLoss, advice: Sequence[tuple[MemoryAdvice, Candidate]], estimated: int
) -> dict[int, int]:
    """The temporary bytes that are left if a loop is replayed, by the number of its equation:
    of the loop of the best advice on loops."""
    loops = [c for _, c in advice if c.kind == "loop" and not c.moves_vmap]
    if not loops or not all(map(may_replay, loops[0].loops)):
        return {}
    doing("tracing with a replay")
    replayed = dataclasses.replace(loops[0], checkpoint="replay")
    try:
        left = _estimate(with_checkpoints(numbered.traced, replayed), numbered.traced)
    except RuleError:  # the derivative of a step can't be replayed
        return {}
    saves = estimated - left > _LEAST_SAVING * estimated
    return {loops[0].origin.number: left} if saves and loops[0].origin is not None else {}


def _is_no_better(advice: MemoryAdvice, candidate: Candidate, found) -> bool:
    """Whether to move a `vmap` into a loop saves little that the loop in it would not."""
    return candidate.moves_vmap and any(
        other.origin is candidate.origin
        and other.vmap_is_outside
        and one.predicted < 1.1 * advice.predicted
        for one, other in found
    )


def _with_cures(
    residuals: Sequence[Residual], advice: Sequence[tuple[MemoryAdvice, Candidate]]
) -> list[Residual]:
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


def _estimate(fn: Callable[..., Any], traced: TracedLoss) -> int:
    """The temporary bytes of the gradient of a function of the inputs of the loss."""
    program = jax.make_jaxpr(_gradient(fn))(*_types(traced))
    return peak_bytes(without_unused(program))


def _compiled_bytes(fn: Callable[..., Any], traced: TracedLoss) -> int | None:
    """The same of the compiled gradient; `None` where the platform does not tell."""
    compiled = jax.jit(_gradient(fn)).lower(*_types(traced)).compile()
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


@ft.cache
def _undoes_checkpoints() -> bool:
    """Whether XLA keeps what a checkpoint recomputes, as it finds that it is the same.

    On a CPU it does, up to JAX 0.11. When JAX 0.12 is the oldest version, delete this function.
    """

    def layers(x):
        for _ in range(4):
            x = jnp.sin(x @ x)
        return x

    def loss(x, around):
        for _ in range(4):
            x = around(layers)(x)
        return jnp.sum(x)

    def temporary_bytes(around):
        gradient = jax.jit(jax.grad(ft.partial(loss, around=around)))
        compiled = gradient.lower(jax.ShapeDtypeStruct((64, 64), "float32")).compile()
        analysis = compiled.memory_analysis()
        return 0 if analysis is None else analysis.temp_size_in_bytes

    return temporary_bytes(jax.checkpoint) >= temporary_bytes(lambda fn: fn) > 0
