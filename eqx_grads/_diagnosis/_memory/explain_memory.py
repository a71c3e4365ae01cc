"""`explain_memory`: what a loss keeps for its backward pass, and what to checkpoint."""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jaxtyping import PyTree

from ..._errors import check_flags
from ..._jaxprs.evaluate import evaluate
from ..origins import NumberedLoss
from ..progress import diagnosing, doing
from ..traced_loss import trace_loss, TracedLoss
from .checkpoints import Candidate, candidates
from .maps import MapCall, seeing_maps
from .report import MemoryAdvice, MemoryReport
from .residuals import Gradient


_MOST_CANDIDATES = 4
# A smaller saving is not worth the recomputation.
_LEAST_SAVING = 0.1


@diagnosing("explain_memory")
def explain_memory(
    loss: Callable[..., Any],
    model: PyTree,
    *args: Any,
    compiled: bool = True,
    **kwargs: Any,
) -> MemoryReport:
    r"""List what the forward pass of a loss keeps for its backward pass: how many bytes, and
    which line of your code, layer and loop computes them. It also says how much each checkpoint
    saves.

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
        print(report.advice[0].saves > 0.8 * report.total)
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
    - `compiled`: whether to compile the gradient, and report its temporary memory. XLA takes
        about a minute for a gradient of 30000 equations.

    **Returns:**

    An [`eqx_grads.MemoryReport`][], which prints as a table with the advice that saves most.
    The list is exact: it has every array of the pullback of `jax.vjp` that the backward pass
    uses, once. Each piece of advice was tried. The saving is the bytes that the loss no longer
    keeps, minus the bytes that it recomputes at one time. To measure it, follow the advice, and
    compare `report.compiled`.

    The loss is traced, and not run. The advice is to run a loop with
    [`eqx_grads.filter_scan`][], to wrap layers in [`eqx_grads.filter_checkpoint`][], or to
    replace a `jax.vmap` with [`eqx_grads.filter_map`][].

    **Raises:**

    [`eqx_grads.RuleError`][] if the loss does not return a real scalar or can't be traced, or
    if `model` has no inexact array.
    """
    check_flags("explain_memory", compiled=compiled)
    doing("tracing the loss and its gradient")
    trace = ft.partial(
        trace_loss, "explain_memory", loss, model, args, kwargs, steps_are_visible=False
    )

    def again(layers: frozenset[int], chunks: dict[MapCall, int]) -> Callable[..., Any]:
        with seeing_maps(chunks):
            program = trace(checkpointed=layers).program
        return lambda *values: evaluate(program, values)[0]

    with seeing_maps({}) as maps:
        traced = trace()
    numbered = NumberedLoss(traced)
    gradient = Gradient(numbered, traced, numbered.origin_of)
    doing("compiling the gradient")
    needed = _compiled_bytes(traced) if compiled else None
    least = _LEAST_SAVING * max(gradient.total, needed or 0)
    found = candidates(numbered, gradient.sources, maps, again)
    advice = _tried(found, gradient, traced, least)
    leaves = dict(zip(traced.inputs, traced.leaves, strict=False))
    records = [s.record(leaves.get(s.made.name, "")) for s in gradient.sources]
    records.sort(key=lambda r: -r.bytes)
    kept = [r for r in records if r.kind != "input"]
    return MemoryReport(kept, [r for r in records if r.kind == "input"], needed, advice)


def _tried(
    found: Iterable[Candidate], gradient: Gradient, traced: TracedLoss, least: float
) -> list[MemoryAdvice]:
    """The advice of the most promising candidates, applied; the best one first."""
    most = lambda c: sum(gradient.sources[i].bytes for i in c.covers) - c.again
    promising = sorted((c for c in found if most(c) > least), key=most, reverse=True)
    tried = []
    for i, candidate in enumerate(promising[:_MOST_CANDIDATES]):
        doing("tracing with checkpoint", i, len(promising))
        try:
            left = Gradient(candidate.apply(), traced).total + candidate.again
        except Exception:  # the loss can't be written so: a layer may keep what it computes
            continue
        saves = gradient.total - left
        if saves > least:
            tried.append(dataclasses.replace(candidate.advice, saves=int(saves)))
    return sorted(tried, key=lambda advice: -advice.saves)


def _compiled_bytes(traced: TracedLoss) -> int | None:
    """The temporary bytes of the compiled gradient; `None` where the platform does not tell."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in traced.program.in_avals]
    n = len(traced.leaves)
    gradient = jax.jit(jax.value_and_grad(traced.loss))
    compiled = gradient.lower(types[:n], types[n:]).compile()
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes
