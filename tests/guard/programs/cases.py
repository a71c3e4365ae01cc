"""Cases, and the comparison of many of them with their references in one compiled program."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...helpers import checking_leaks
from .chains import Step, transformed
from .scans import Call, Scan


@dataclasses.dataclass(frozen=True)
class Case:
    """A program in a chain of transformations; the first is the innermost."""

    program: Call | Scan
    chain: tuple[Step, ...] = ()

    @property
    def kind(self) -> "Case":
        """Cases that differ in values only have the same kind, and count as one."""
        return Case(self.program.kind, self.chain)

    @property
    def reference(self) -> "Case":
        return Case(self.program.plain, self.chain)

    def outputs(self, leaves: Sequence[Any], ours: bool) -> list[Any]:
        fn = lambda leaves: self.program.run(leaves, ours)
        return transformed(fn, self.chain, ours)(list(leaves))

    def python_numbers(self, eager: bool) -> tuple[str, ...]:
        """The dtypes of leaves that stay Python numbers inside `jit`. In it, JAX 0.10 and 0.12
        can't differentiate `jax.checkpoint` twice in a Python float."""
        checkpoints = any(step.name == "checkpoint" for step in self.chain)
        if isinstance(self.program, Scan):
            checkpoints |= self.program.checkpoint not in (None, "replay", "auto")
        return ("int",) if checkpoints and not eager else ("int", "float")

    def values(self) -> list[Any]:
        return [leaf.value() for leaf in self.program.leaves]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Cases that are compiled together, or evaluated eagerly, or run under the leak checker."""

    cases: tuple[Case, ...]
    x64: bool = False
    eager: bool = False
    leaks: bool = False


# ---------------------------------------------------------------- judgement


@dataclasses.dataclass(frozen=True, repr=False)
class Wrong:
    """A case that is wrong or raises an error, and the reason."""

    case: Case
    batch: Batch
    reason: str

    def __repr__(self) -> str:
        """The reason, and the case in a form that can be pasted into a test."""
        alone = dataclasses.replace(self.batch, cases=(self.case,))
        return f"{self.reason}\n{alone!r}"


# These programs run once: a fifth less time in all.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def judge(batch: Batch) -> list[Wrong]:
    """The cases whose outputs differ from the outputs of the reference."""
    with jax.enable_x64(batch.x64):
        checked = batch.cases if batch.leaks else ()
        return [w for case in checked for w in _leaks(case, batch)] or _wrong(batch)


def _leaks(case: Case, batch: Batch) -> list[Wrong]:
    try:
        with checking_leaks():
            jax.eval_shape(lambda leaves: case.outputs(leaves, True), case.values())
    except Exception as error:
        return [Wrong(case, batch, f"{type(error).__name__}: {error!s:.300}")]
    return []


def _wrong(batch: Batch) -> list[Wrong]:
    wrong: list[Wrong] = []

    def outputs(arguments):
        references: dict[Case, list[Any]] = {}
        found = []
        for case, leaves in zip(batch.cases, arguments, strict=True):
            numbers = case.python_numbers(batch.eager)
            leaves = [
                leaf.value() if leaf.dtype in numbers else x
                for leaf, x in zip(case.program.leaves, leaves, strict=True)
            ]
            try:
                if case.reference not in references:
                    references[case.reference] = case.reference.outputs(leaves, False)
                found.append((case.outputs(leaves, True), references[case.reference]))
            except Exception as error:
                wrong.append(Wrong(case, batch, f"{type(error).__name__}: {error}"))
                found.append(None)
        return found

    run = outputs if batch.eager else jax.jit(outputs, compiler_options=QUICKLY)
    found = run([case.values() for case in batch.cases])
    for case, pair in zip(batch.cases, found, strict=True):
        reason = None if pair is None else difference(*pair, case)
        if reason is not None:
            wrong.append(Wrong(case, batch, reason))
    return wrong


def difference(got: Sequence[Any], expected: Sequence[Any], case: Case) -> str | None:
    types = lambda xs: [f"{x.dtype}{list(x.shape)}" for x in xs]
    if types(got) != types(expected):
        return f"types {types(got)} instead of {types(expected)}"
    dtypes = [leaf.dtype for leaf in case.program.leaves if leaf.is_inexact]
    dtypes += [f.dtype for f in case.program.function.formulas]
    eps = max(float(jnp.finfo("float32" if d == "float" else d).eps) for d in dtypes)
    values = [np.asarray(x, np.complex128) for x in expected]
    scale = max([1.0, *(float(np.max(np.abs(v), initial=0.0)) for v in values)])
    if not np.isfinite(scale):
        return "the reference is not finite"
    tolerance = (50 if eps > 1e-4 else 200) * eps * scale
    for k, (x, value) in enumerate(zip(got, values, strict=True)):
        error = np.abs(np.asarray(x, np.complex128) - value)
        if not np.all(error <= tolerance):
            return f"output {k} is {np.asarray(x)!r} instead of {np.asarray(expected[k])!r}"
    return None
