"""Random cases, and the comparison of many of them with autodiff in one compiled program."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from ..helpers import checking_leaks
from .chains import Step, transformed
from .formulas import Formula, Term, UNARY
from .programs import Function, Leaf, Node
from .rules import STYLES
from .scans import Call, Scan


@dataclasses.dataclass(frozen=True)
class Case:
    """A program in a chain of transformations, of which the first is the innermost."""

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


# ---------------------------------------------------------------- strategies

SHAPES = ((), (3,), (2, 3), (1, 3), (2, 1), (1,))
EMPTY_SHAPES = ((), (3,), (0, 3), (0, 1), (1,))
REAL = ("float32", "float32", "float32", "float16", "bfloat16")
COEFFICIENTS = (0.5, -0.5, 0.75, 1.0)
CONTAINERS = ("tuple", "list", "dict", "module")
EXTRAS = (("none",), ("text",), ("function",))


@st.composite
def leaves(draw: Any, x64: bool, at_least: int = 1, numbers: bool = True) -> tuple[Leaf, ...]:
    real = ("float64", "float64", "float32") if x64 else REAL
    main = draw(st.sampled_from(real))
    kinds = (main, main, main, main, "complex64", "int32", "key", draw(st.sampled_from(real)))
    kinds += ("float", "int") if numbers else ()
    n = draw(st.integers(0, 3))
    found = [main] * at_least + [draw(st.sampled_from(kinds)) for _ in range(n)]
    shapes = EMPTY_SHAPES if draw(st.integers(0, 11)) == 11 else SHAPES
    shape = lambda dtype: () if dtype in ("float", "int") else draw(st.sampled_from(shapes))
    return tuple(Leaf(dtype, shape(dtype), seed) for seed, dtype in enumerate(found))


def subset(indices: Sequence[int], at_least: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    flags = st.lists(st.booleans(), min_size=len(indices), max_size=len(indices))

    def chosen(flags):
        found = tuple(i for i, flag in zip(indices, flags, strict=True) if flag)
        return found if len(found) >= at_least else tuple(indices)

    return flags.map(chosen)


@st.composite
def formulas(
    draw: Any, leaves: Sequence[Leaf], dtype: str | None = None, shape: Any = None
) -> Formula:
    """With the `dtype` and `shape` of a carry, a formula has only leaves that broadcast to it,
    and bounded functions, so that the carry stays small in any number of steps."""
    functions = list(UNARY) if shape is None else ["sin", "tanh"]
    usable = [i for i, leaf in enumerate(leaves) if leaf.is_inexact]
    if shape is not None:
        usable = [i for i in usable if _broadcasts(leaves[i].shape, shape)]
    terms = []
    for _ in range(draw(st.integers(1, 2))):
        indices = draw(st.lists(st.sampled_from(usable), min_size=1, max_size=2, unique=True))
        names = [draw(st.sampled_from(functions)) for _ in indices]
        coefficient = draw(st.sampled_from(COEFFICIENTS))
        terms.append(Term(coefficient, tuple(zip(indices, names, strict=True))))
    used = [leaves[i] for term in terms for i, _ in term.factors]
    if dtype is None:
        dtypes = sorted({"float32" if x.dtype == "float" else x.dtype for x in used})
        dtype = draw(st.sampled_from(dtypes))
    is_sum = False
    if shape is None:
        shape = np.broadcast_shapes(*(x.shape for x in used))
        is_sum = draw(st.integers(0, 4)) == 4
    return Formula(tuple(terms), dtype, tuple(shape), is_sum)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


@st.composite
def trees(draw: Any, indices: Sequence[int], depth: int = 2) -> Node:
    if len(indices) == 1 and (depth == 0 or draw(st.booleans())):
        return ("leaf", indices[0])
    nodes: list[Any] = [("leaf", i) for i in indices]
    if len(indices) > 2 and depth > 0 and draw(st.booleans()):
        nodes = [nodes[0], draw(trees(indices[1:], depth - 1))]
    if draw(st.booleans()):
        nodes.insert(draw(st.integers(0, len(nodes))), draw(st.sampled_from(EXTRAS)))
    return (draw(st.sampled_from(CONTAINERS)), *nodes)


@st.composite
def arguments(draw: Any, indices: Sequence[int], depth: int = 2) -> tuple[Node, ...]:
    """The positional arguments, at most three."""
    cuts = sorted(draw(st.lists(st.integers(1, max(1, len(indices) - 1)), max_size=2)))
    parts = [list(p) for p in np.split(np.array(indices, int), cuts) if len(p)]
    return tuple(draw(trees([int(i) for i in part], depth)) for part in parts)


@st.composite
def calls(draw: Any, x64: bool) -> Function:
    found = draw(leaves(x64))
    n = draw(st.integers(1, 2))
    outs = tuple(draw(formulas(found)) for _ in range(n))
    passed = [i for i, leaf in enumerate(found) if leaf.dtype in ("int32", "key")]
    passed = passed if draw(st.booleans()) else []
    out = draw(trees(range(n + len(passed))))
    args = draw(arguments(range(len(found))))
    return Function(found, args, out, outs, tuple(passed))


@st.composite
def scans(draw: Any, x64: bool) -> Scan:
    found = draw(leaves(x64, at_least=2))
    n = len(found)
    n_carry = draw(st.integers(1, n - 1))
    # No Python integer: a step returns it plus one, which is an array.
    carry = [i for i in range(n_carry) if found[i].dtype != "int"]
    rest = [i for i in range(n) if i not in carry]
    sliced = [i for i in rest if found[i].dtype not in ("int", "float")]
    sliced = list(draw(subset(sliced, 0))) if sliced else []
    weights = [i for i in rest if i not in sliced]
    parts = [carry, sliced, weights]
    args = [draw(trees(part)) if part else ("none",) for part in parts]
    outs, passed, order = [], [], []
    for i in carry:
        if found[i].is_inexact:
            dtype = found[i].dtype
            if dtype == "float":
                dtype = "float64" if x64 else "float32"
            outs.append(draw(formulas(found, dtype, found[i].shape)))
            order.append(("formula", len(outs) - 1))
        else:
            passed.append(i)
            order.append(("passed", len(passed) - 1))
    n_y = draw(st.integers(0, 2))
    outs += [draw(formulas(found)) for _ in range(n_y)]
    where = {"formula": 0, "passed": len(outs)}
    index = dict(zip(carry, [where[kind] + k for kind, k in order], strict=True))
    y = range(len(outs) - n_y, len(outs))
    y_tree = draw(trees(y)) if n_y else ("none",)
    function = Function(
        found,
        tuple(args),
        ("tuple", _renumbered(args[0], index), y_tree),
        tuple(outs),
        tuple(passed),
    )
    steps = draw(st.sampled_from((4, 5, 1, 2, 7, 0)))
    return Scan(
        function,
        steps,
        tuple(sliced),
        reverse=draw(st.booleans()),
        truncate=draw(st.sampled_from((None, 2, 3))),
        halves_carry_gradient=draw(st.integers(0, 5)) == 5,
    )


def _renumbered(node: Node, index: dict[int, int]) -> Node:
    kind, *rest = node
    if kind == "leaf":
        return ("leaf", index[rest[0]])
    return (kind, *(_renumbered(part, index) for part in rest))


METHODS = (None, 1, 2, 3, "sqrt", "replay", "auto")


@st.composite
def variants(draw: Any, program: Function | Scan) -> Call | Scan:
    """The program with some style of rule, some way to scan."""
    function = program.function if isinstance(program, Scan) else program
    styles = [name for name in STYLES if _suits(name, function)]
    if not isinstance(program, Scan):
        styles = [name for name in styles if not name.startswith("own")]
    style = draw(st.sampled_from(styles))
    function = dataclasses.replace(function, style=style, nested=draw(st.booleans()))
    if isinstance(program, Scan):
        method = draw(st.sampled_from(METHODS))
        unroll = 1 if method == "replay" else draw(st.sampled_from((1, 1, 1, 2)))
        return dataclasses.replace(program, function=function, checkpoint=method, unroll=unroll)
    if not style.startswith("method") and style != "module":
        by_keyword = draw(st.sampled_from((0, 0, 1, 2)))
        function = dataclasses.replace(function, by_keyword=min(by_keyword, len(function.args)))
    return Call(function)


def _suits(style: str, function: Function) -> bool:
    if not style.startswith("elementwise"):
        return True
    is_complex = lambda dtype: dtype.startswith("complex")
    # A real function of a complex variable has no partial derivative, which is an error.
    if any(is_complex(leaf.dtype) for leaf in function.leaves) and not all(
        is_complex(formula.dtype) for formula in function.formulas
    ):
        return False
    return (
        len(function.formulas) == 1
        and not function.passed
        and not function.formulas[0].is_sum
        and function.formulas[0].shape
        == np.broadcast_shapes(*(leaf.shape for leaf in function.leaves))
        and function.out == ("leaf", 0)
        and all(node[0] == "leaf" for node in function.args)
    )


@st.composite
def chains(draw: Any, program: Any, longest: int, devices: bool) -> tuple[Step, ...]:
    """The transformations, of which one to three differentiate."""
    differentiable = program.differentiable
    found = program.leaves
    names = ["jit", "closure", "checkpoint", "first", "stop", "cond", "while", "scan", "vmap"]
    names += ["shard_map"] if devices else []
    derivatives = ["grad", "jvp", "vjp", "linearize", "jacobian"]
    if any(leaf.dtype == "key" for leaf in found) and jax.__version_info__ < (0, 10, 2):
        names.remove("cond")  # JAX 0.10.0 can't lower some derivatives of it
    steps: list[Step] = []
    is_reversible, n_derivatives = True, 0
    is_complex = any(leaf.dtype.startswith("complex") for leaf in found)
    n = draw(st.integers(1, longest))
    budget = 8.0 if isinstance(program, Scan) else 16.0
    for k in range(n):
        of_derivatives = derivatives if is_reversible else ["jvp"]
        if n_derivatives == 0 and k == n - 1:
            options = of_derivatives
        else:
            # What is left has to suffice for one derivative.
            most = budget if n_derivatives else budget / COSTS["jvp"]
            options = [o for o in names if COSTS.get(o, 1.0) <= most]
            if n_derivatives < 3:
                options += [o for o in of_derivatives if COSTS[o] <= budget]
        if is_complex:
            options = [o for o in options if o not in FAIL_IF_COMPLEX]
        name = draw(st.sampled_from(options))
        of = range(len(found)) if name in ("vmap", "shard_map", "closure") else differentiable
        chosen = draw(subset(of))
        if name == "shard_map" and (
            isinstance(program, Scan) or any(step.name in ("scan", "while") for step in steps)
        ):
            # A carry that does not vary over the axis at first has to stay so, says JAX.
            chosen = tuple(of)
        option = draw(st.integers(0, 4))
        if name == "scan" and {"while", "cond"} <= {step.name for step in steps}:
            option = 0  # a replay of a loop in a branch is an error
        steps.append(Step(name, chosen, option))
        budget /= COSTS.get(name, 1.0)
        n_derivatives += name in derivatives
        is_reversible &= name != "while"
        # Not in another one. Nor around a batched predicate, for which `docs/upstream.md` has
        # "A `cond` in `vmap` in `shard_map`".
        batches_cond = name == "vmap" and any(step.name == "cond" for step in steps)
        if name == "shard_map" or batches_cond:
            names = [o for o in names if o != "shard_map"]
    return tuple(steps)


# `jacfwd` wants to be told, and `jax.checkpoint` can't save complex residuals (JAX 0.10).
FAIL_IF_COMPLEX = ("jacobian", "checkpoint")
# About how many times larger each transformation makes a program.
COSTS = {
    **dict.fromkeys(("cond", "vmap"), 1.2),
    **dict.fromkeys(("checkpoint", "while", "scan", "shard_map"), 1.5),
    **dict.fromkeys(("grad", "vjp", "jvp", "linearize"), 2.5),
    "jacobian": 3.0,
}


@st.composite
def batches(
    draw: Any,
    chains_per_program: int = 3,
    variants_per_chain: int = 3,
    programs: int = 2,
    longest: int = 5,
) -> Batch:
    x64 = draw(st.booleans())
    devices = draw(st.integers(0, 7)) == 7
    eager = not devices and draw(st.integers(0, 7)) == 7
    cases = []
    for _ in range(programs):
        program = draw(scans(x64) if draw(st.booleans()) else calls(x64))
        for _ in range(chains_per_program):
            chain = draw(chains(program, 3 if eager else longest, devices))
            for _ in range(variants_per_chain):
                variant = draw(variants(program))
                cases.append(Case(_with_closed(draw, variant, chain), chain))
    leaks = draw(st.integers(0, 15)) == 15
    return Batch(tuple(dict.fromkeys(cases)), x64, eager, leaks)


def _with_closed(draw: Any, program: Any, chain: Sequence[Step]) -> Any:
    """Some leaves that no step differentiates or carries become variables of the closure."""
    function = program.function
    used = {i for step in chain for i in step.chosen if step.name not in ("vmap", "shard_map")}
    free = [i for i in program.differentiable if i not in used]
    if isinstance(program, Scan) or not free or not draw(st.booleans()):
        return program
    closed = tuple(free)
    args = tuple(a for a in (_pruned(node, closed) for node in function.args) if a is not None)
    if not args or function.style.startswith("elementwise"):
        return program
    by_keyword = min(function.by_keyword, len(args))
    return Call(dataclasses.replace(function, args=args, closed=closed, by_keyword=by_keyword))


def _pruned(node: Node, closed: Sequence[int]) -> Node | None:
    kind, *rest = node
    if kind == "leaf":
        return None if rest[0] in closed else node
    if kind in ("none", "text", "function"):
        return node
    parts = [_pruned(part, closed) for part in rest]
    return (kind, *(part for part in parts if part is not None))


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
QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def judge(batch: Batch) -> list[Wrong]:
    """The cases whose outputs differ from those of autodiff of the undecorated function."""
    with jax.enable_x64(batch.x64):
        leaking = (
            [w for case in batch.cases for w in _leaks(case, batch)] if batch.leaks else []
        )
        return leaking or _wrong(batch)


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
