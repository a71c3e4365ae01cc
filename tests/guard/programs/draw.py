"""Random cases: all that is random in a case, and what may not be combined."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .cases import Batch, Case, judge, Wrong
from .chains import OPTIONS, Step
from .formulas import Formula, Term, UNARY
from .functions import CLASSES, Function, Leaf, Node
from .ops import OPS
from .rules import only_in_reverse, RAW, STYLES
from .scans import Call, Scan


SHAPES = ((), (3,), (2, 3), (1, 3), (2, 1), (1,))
EMPTY_SHAPES = ((), (3,), (0, 3), (0, 1), (1,))
REAL = ("float32", "float32", "float32", "float16", "bfloat16")
COEFFICIENTS = (0.5, -0.5, 0.75, 1.0)
CONTAINERS = ("tuple", "list", "dict", *CLASSES)
EXTRAS = (("none",), ("text",), ("function",))
METHODS = (None, 1, 2, 3, 4, "sqrt", "replay", "auto")
LONG = 97  # several chunks of a replay, the last of which is shorter
STEPS = (4, 5, 7, 11, 13, 1, 2, 0, LONG)
DERIVATIVES = ("grad", "jvp", "vjp", "linearize", "transpose", "jacobian")
BATCHING = ("vmap", "named", "shard_map")
# About how many times larger each transformation makes a program.
COSTS = {
    **dict.fromkeys(("cond", "vmap", "named", "recurrence", "op"), 1.2),
    **dict.fromkeys(("checkpoint", "while", "scan", "shard_map"), 1.5),
    **dict.fromkeys(("grad", "vjp", "jvp", "linearize", "transpose"), 2.5), "jacobian": 3.0,
}  # fmt: skip
# `jacfwd` wants to be told, and `jax.checkpoint` can't save complex residuals (JAX 0.10).
FAIL_IF_COMPLEX = ("jacobian", "checkpoint")


class Dice(random.Random):
    """The same in every run and on every machine, for one seed."""

    def one_in(self, n: int) -> bool:
        return self.randrange(n) == 0

    def subset(self, items: Sequence[Any], at_least: int = 1) -> tuple[Any, ...]:
        found = tuple(x for x in items if self.one_in(2))
        return found if len(found) >= at_least else tuple(items)


# ---------------------------------------------------------------- functions


def _leaves(dice: Dice, x64: bool, at_least: int) -> tuple[Leaf, ...]:
    real = ("float64", "float64", "float32") if x64 else REAL
    main = "complex64" if dice.one_in(12) else dice.choice(real)
    kinds = (*[main] * 4, "complex64", "int32", "key", dice.choice(real), "float", "int")
    found = [main] * at_least + [dice.choice(kinds) for _ in range(dice.randrange(4))]
    shapes = EMPTY_SHAPES if dice.one_in(12) else SHAPES
    shape = lambda dtype: () if dtype in ("float", "int") else dice.choice(shapes)
    return tuple(Leaf(dtype, shape(dtype), seed) for seed, dtype in enumerate(found))


def _formula(
    dice: Dice, leaves: Sequence[Leaf], dtype: str | None = None, shape: Any = None,
    usable: Sequence[int] | None = None, contracts: bool = False,
) -> Formula:  # fmt: skip
    """A formula; a formula of a carry if the `dtype` and `shape` of the carry are given.

    Such a formula has only leaves that broadcast to the carry, and bounded functions. So the
    carry stays small in any number of steps. With `contracts`, so does its derivative.
    """
    functions = list(UNARY) if shape is None else ["sin", "tanh"]
    usable = range(len(leaves)) if usable is None else usable
    usable = [i for i in usable if leaves[i].is_inexact]
    if shape is not None:
        usable = [i for i in usable if _broadcasts(leaves[i].shape, shape)]
    terms = []
    for _ in range(1 if contracts else dice.randint(1, 2)):
        indices = dice.sample(usable, min(len(usable), dice.randint(1, 2)))
        factors = tuple((i, dice.choice(functions)) for i in indices)
        terms.append(Term(dice.choice(COEFFICIENTS[: 2 if contracts else 4]), factors))
    used = [leaves[i] for term in terms for i, _ in term.factors]
    if dtype is None:
        dtypes = sorted({"float32" if x.dtype == "float" else x.dtype for x in used})
        dtype = dice.choice(dtypes)
    is_sum = shape is None and dice.one_in(5)
    if shape is None:
        shape = np.broadcast_shapes(*(x.shape for x in used))
    return Formula(tuple(terms), dtype, tuple(shape), is_sum)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _tree(dice: Dice, indices: Sequence[int], depth: int = 2) -> Node:
    if len(indices) == 1 and (depth == 0 or dice.one_in(2)):
        return ("leaf", indices[0])
    nodes: list[Any] = [("leaf", i) for i in indices]
    if len(indices) > 2 and depth > 0 and dice.one_in(2):
        nodes = [nodes[0], _tree(dice, indices[1:], depth - 1)]
    if dice.one_in(2):
        nodes.insert(dice.randint(0, len(nodes)), dice.choice(EXTRAS))
    return (dice.choice(CONTAINERS), *nodes)


def _arguments(dice: Dice, n: int) -> tuple[Node, ...]:
    """The positional arguments, at most three."""
    cuts = sorted(dice.randint(1, max(1, n - 1)) for _ in range(dice.randrange(3)))
    parts = [p for p in np.split(np.arange(n), cuts) if len(p)]
    return tuple(_tree(dice, [int(i) for i in part]) for part in parts)


def _call(dice: Dice, x64: bool) -> Function:
    found = _leaves(dice, x64, 1)
    outs = tuple(_formula(dice, found) for _ in range(dice.randint(1, 2)))
    passed = [i for i, leaf in enumerate(found) if leaf.dtype in ("int32", "key")]
    passed = passed if dice.one_in(2) else []
    if dice.one_in(4):  # as `elementwise` needs it
        args = tuple(("leaf", i) for i in range(min(len(found), 3)))
        found, passed = found[:3], []
        outs = (dataclasses.replace(_formula(dice, found), is_sum=False),)
        shape = np.broadcast_shapes(*(leaf.shape for leaf in found))
        outs = (dataclasses.replace(outs[0], shape=shape),)
        return Function(found, args, ("leaf", 0), outs)
    out = _tree(dice, range(len(outs) + len(passed)))
    args = _arguments(dice, len(found))
    return Function(found, args, out, outs, tuple(passed), axis=dice.one_in(8))


def _scan(dice: Dice, x64: bool) -> Scan:
    found = _leaves(dice, x64, 2)
    n = len(found)
    n_carry = dice.randint(1, n - 1)
    # No Python integer: a step returns it plus one, which is an array.
    carry = [i for i in range(n_carry) if found[i].dtype != "int"]
    rest = [i for i in range(n) if i not in carry]
    sliced = [i for i in rest if found[i].dtype not in ("int", "float")]
    sliced = list(dice.subset(sliced, 0)) if sliced else []
    weights = [i for i in rest if i not in sliced]
    args = [_tree(dice, part) if part else ("none",) for part in (carry, sliced, weights)]
    elementwise, steps = dice.one_in(5), dice.choice(STEPS)
    outs, passed, order = [], [], []
    for i in carry:
        if found[i].is_inexact:
            dtype = found[i].dtype
            if dtype == "float":
                dtype = "float64" if x64 else "float32"
            like = lambda k, i=i: k not in carry or found[k].shape == found[i].shape
            usable = [k for k in range(n) if like(k) or not elementwise]
            outs.append(_formula(dice, found, dtype, found[i].shape, usable, steps == LONG))
            order.append(("formula", len(outs) - 1))
        else:
            passed.append(i)
            order.append(("passed", len(passed) - 1))
    n_y = dice.randrange(3)
    outs += [_formula(dice, found) for _ in range(n_y)]
    where = {"formula": 0, "passed": len(outs)}
    index = dict(zip(carry, [where[kind] + k for kind, k in order], strict=True))
    y_tree = _tree(dice, range(len(outs) - n_y, len(outs))) if n_y else ("none",)
    out = ("tuple", _renumbered(args[0], index), y_tree)
    axis = dice.one_in(8) and not elementwise
    function = Function(found, tuple(args), out, tuple(outs), tuple(passed), axis=axis)
    return Scan(
        function, steps, tuple(sliced), reverse=dice.one_in(2),
        truncate=None if elementwise else dice.choice((None, 2, 3)),
        halves_carry_gradient=dice.one_in(6), elementwise=elementwise, emits=dice.one_in(2),
    )  # fmt: skip


def _renumbered(node: Node, index: dict[int, int]) -> Node:
    kind, *rest = node
    if kind == "leaf":
        return ("leaf", index[rest[0]])
    return (kind, *(_renumbered(part, index) for part in rest))


# ---------------------------------------------------------------- styles and methods


def _variant(dice: Dice, program: Function | Scan, chain: Sequence[Step]) -> Call | Scan:
    """The program with some style of rule, some way to scan."""
    is_scan = isinstance(program, Scan)
    function = program.function if is_scan else program
    styles = [name for name in STYLES if _suits(name, function, is_scan, chain)]
    style = dice.choice(styles)
    function = dataclasses.replace(function, style=style, nested=dice.one_in(2))
    if is_scan:
        # Steps that communicate can't be replayed, which is an error.
        method = dice.choice([m for m in METHODS if not (function.axis and m == "replay")])
        is_real = not any(leaf.dtype.startswith("complex") for leaf in program.leaves)
        online = program.elementwise and is_real and style not in RAW and dice.one_in(2)
        online = online and not style.startswith("own")
        unroll = 1 if method == "replay" or online else dice.choice((1, 1, 1, 2))
        return dataclasses.replace(
            program, function=function, checkpoint=None if online else method, online=online,
            unroll=unroll,
        )  # fmt: skip
    if not style.startswith("method") and style != "module":
        by_keyword = min(dice.choice((0, 0, 1, 2)), len(function.args))
        function = dataclasses.replace(function, by_keyword=by_keyword)
    return Call(_with_closed(dice, function, chain))


def _suits(style: str, function: Function, is_scan: bool, chain: Sequence[Step]) -> bool:
    if style.startswith("own"):
        return is_scan
    if style in RAW:
        if function.axis:
            return False  # JAX's own rules fail where they communicate
        derivatives = [step for step in chain if step.is_derivative]
        if style == "raw, defjvps" and len(derivatives) > 1:
            return False  # in a loop of JAX, the function in its own rule loses the rule
        return not only_in_reverse(style) or derivatives[0].is_reverse
    if style.startswith("elementwise"):
        return not function.axis and _is_elementwise(function)
    return not (function.axis and style.endswith("vmap"))


def _is_elementwise(function: Function) -> bool:
    is_complex = lambda dtype: dtype.startswith("complex")
    # A real function of a complex variable has no partial derivative, which is an error.
    if any(is_complex(leaf.dtype) for leaf in function.leaves) and not all(
        is_complex(formula.dtype) for formula in function.formulas
    ):
        return False
    shape = np.broadcast_shapes(*(leaf.shape for leaf in function.leaves))
    return (
        len(function.formulas) == 1
        and not function.passed
        and not function.formulas[0].is_sum
        and function.formulas[0].shape == shape
        and function.out == ("leaf", 0)
        and all(node[0] == "leaf" for node in function.args)
    )


def _with_closed(dice: Dice, function: Function, chain: Sequence[Step]) -> Function:
    """Some leaves that no step differentiates or carries become variables of the closure."""
    used = {i for step in chain for i in step.chosen if step.name not in BATCHING}
    closed = tuple(i for i in function.differentiable if i not in used)
    if not closed or function.is_raw or dice.one_in(3):
        return function
    args = tuple(a for a in (_pruned(node, closed) for node in function.args) if a is not None)
    if not args or function.style.startswith("elementwise"):
        return function
    by_keyword = min(function.by_keyword, len(args))
    return dataclasses.replace(function, args=args, closed=closed, by_keyword=by_keyword)


def _pruned(node: Node, closed: Sequence[int]) -> Node | None:
    kind, *rest = node
    if kind == "leaf":
        return None if rest[0] in closed else node
    if kind in ("none", "text", "function"):
        return node
    parts = [_pruned(part, closed) for part in rest]
    return (kind, *(part for part in parts if part is not None))


# ---------------------------------------------------------------- chains


def _chain(dice: Dice, program: Any, longest: int, devices: bool) -> tuple[Step, ...]:
    """Random transformations. One to three of them differentiate."""
    leaves, is_scan = program.leaves, isinstance(program, Scan)
    function = program.function if is_scan else program
    is_complex = any(leaf.dtype.startswith("complex") for leaf in leaves)
    names = [name for name in OPTIONS if name not in DERIVATIVES]
    names = [name for name in names if devices or name != "shard_map"]
    names = [name for name in names if not (is_complex and name in FAIL_IF_COMPLEX)]
    if any(leaf.dtype == "key" for leaf in leaves):
        names.remove("cond")  # JAX 0.10.0 can't lower some derivatives of it
    steps: list[Step] = []
    n = dice.randint(2 if function.axis else 1, longest)
    named_at = dice.randrange(n - 1) if function.axis else None
    if function.axis:
        names = [name for name in names if name not in ("named", "shard_map")]
    budget = 8.0 if is_scan else 16.0
    for k in range(n):
        n_derivatives = sum(step.is_derivative for step in steps)
        of_derivatives = [
            name for name in DERIVATIVES if not (is_complex and name in FAIL_IF_COMPLEX)
        ]
        if any(step.name == "while" for step in steps):
            of_derivatives = ["jvp"]
        most = budget if n_derivatives else budget / COSTS["jvp"]
        options = [name for name in names if COSTS.get(name, 1.0) <= most]
        if n_derivatives < 3:
            options += [name for name in of_derivatives if COSTS[name] <= budget]
        if not options or (n_derivatives == 0 and k == n - 1):
            options = of_derivatives
        name = "named" if k == named_at else dice.choice(options)
        step = _step(dice, name, program, steps, leaves)
        if step is None:
            continue
        steps.append(step)
        budget /= COSTS.get(name, 1.0)
        # Not in another one. Nor around a batched predicate, for which `UPSTREAM.md` has
        # "A `cond` in `vmap` in `shard_map`". Nor around a sum over an axis of `vmap`, which
        # JAX takes for one of the mesh there: an `AssertionError` (JAX 0.10).
        batches_cond = name in BATCHING and any(step.name == "cond" for step in steps)
        is_sum = name == "named" and step["sum"] is not None
        if name == "shard_map" or batches_cond or is_sum:
            names = [name for name in names if name != "shard_map"]
    return tuple(steps)


def _step(dice: Dice, name: str, program: Any, steps: Sequence[Step], leaves: Any) -> Any:
    options = tuple((option, dice.choice(values)) for option, values in OPTIONS[name].items())
    if name == "checkpoint" and any(("factors", "complex") in step.options for step in steps):
        return None  # as in `FAIL_IF_COMPLEX`
    anything = name in (*BATCHING, "closure")
    of = range(len(leaves)) if anything else program.differentiable
    if name == "op":
        op = OPS[dict(options)["op"]]
        real = lambda i: leaves[i].dtype not in ("float", "complex64") or op.of_complex
        of = [i for i in of if real(i)]
        return Step(name, (dice.choice(of),), options) if of else None
    if name == "shard_map" and (
        isinstance(program, Scan) or any(step.name in ("scan", "while") for step in steps)
    ):
        # A carry that does not vary over the axis at first has to stay so, says JAX.
        return Step(name, tuple(of))
    names = {step.name for step in steps}
    function = program.function if isinstance(program, Scan) else program
    communicates = function.axis and "named" not in names
    calls_host = any(("op", "host") in step.options for step in steps)
    if name == "scan" and (communicates or calls_host or {"while", "cond"} <= names):
        options = ()  # replays of such steps are an error
    return Step(name, dice.subset(of), options)


def _has_reference(chain: Sequence[Step]) -> bool:
    """Whether JAX has all that the reference of an op needs, in the steps around it."""
    if not any(step.is_derivative for step in chain):
        return False
    for k, step in enumerate(chain):
        op = OPS[step["op"]] if step.name == "op" else None
        if op is None:
            continue
        derivatives = [later for later in chain[k:] if later.is_derivative]
        if len(derivatives) > op.most:
            return False
        if op.is_linear or not derivatives:
            continue
        batched = [later for later in chain[k:] if later.name in BATCHING]
        shared = any(not set(step.chosen) <= set(later.chosen) for later in batched)
        if not derivatives[0].is_reverse or shared:
            return False
    return True


# ---------------------------------------------------------------- batches


def batches(
    seed: int, chains_per_program: int = 3, variants_per_chain: int = 3, programs: int = 2
) -> Iterator[Batch]:
    """Without an end."""
    dice = Dice(seed)
    while True:
        x64, devices = dice.one_in(2), dice.one_in(8)
        eager = not devices and dice.one_in(8)
        cases = []
        for _ in range(programs):
            program = (_scan if dice.one_in(2) else _call)(dice, x64)
            for _ in range(chains_per_program):
                chain = _chain(dice, program, 3 if eager else 5, devices)
                while not _has_reference(chain):
                    chain = _chain(dice, program, 3 if eager else 5, devices)
                for _ in range(variants_per_chain):
                    cases.append(Case(_variant(dice, program, chain), chain))
        leaks = dice.one_in(16)
        yield Batch(tuple(dict.fromkeys(cases)), x64, eager, leaks)


def one_case(seed: int) -> Batch:
    return next(batches(seed, 1, 1, 1))


def fresh_batches(start: int, n_cases: int) -> Iterator[Batch]:
    """`n_cases` cases in all, of which no two differ in values only."""
    seen: set[Case] = set()
    for batch in batches(start):
        fresh = [case for case in batch.cases if case.kind not in seen]
        seen.update(case.kind for case in fresh)
        surplus = max(len(seen) - n_cases, 0)
        yield dataclasses.replace(batch, cases=tuple(fresh[: len(fresh) - surplus]))
        if len(seen) >= n_cases:
            return


def wrong_cases(start: int, n_cases: int) -> list[Wrong]:
    """The cases among `n_cases` that differ from the reference."""
    return [wrong for batch in fresh_batches(start, n_cases) for wrong in judge(batch)]
