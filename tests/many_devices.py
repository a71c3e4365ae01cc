"""Programs over eight devices, and the collectives of a compiled program."""

import collections
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from eqx_grads.testing._subject import FlatFunction
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec


N_DEVICES = 8
MESH = jax.make_mesh((N_DEVICES,), ("i",), axis_types=(AxisType.Auto,))
EXPLICIT_MESH = jax.make_mesh((N_DEVICES,), ("i",), axis_types=(AxisType.Explicit,))


def put(tree: Any, spec: Spec, mesh: jax.sharding.Mesh = MESH) -> Any:
    """The arrays of a tree, sharded over the devices."""
    return jax.device_put(tree, NamedSharding(mesh, spec))


# ---------------------------------------------------------------- collectives

_KINDS = {
    "all-gather": "gathers",
    "all-reduce": "sums",
    "reduce-scatter": "sums",
    "all-to-all": "moves",
    "collective-permute": "moves",
    "collective-broadcast": "moves",
}
_COLLECTIVE = re.compile(rf"[\s)]({'|'.join(_KINDS)})(?:-start)?\(([^)]*)\)")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")


def collectives(compiled: Any) -> collections.Counter[str]:
    """How many arrays a run of a compiled program gathers, sums over devices, and moves between
    devices: `gathers`, `sums` (all-reduce) and `moves` (all-to-all, collective-permute).

    Those in the body of a loop count once for each step, where XLA knows how many there are.
    """
    bodies, entry = _computations(compiled.as_text())
    counts: collections.Counter[str] = collections.Counter()

    def visit(name: str, times: int) -> None:
        for line in bodies.get(name, ()):
            for kind, operands in _COLLECTIVE.findall(line):
                counts[_KINDS[kind]] += times * max(operands.count("%"), 1)
            steps = times * _trip_count(line) if " while(" in line else times
            for called in _called(line):
                visit(called, steps)

    visit(entry, 1)
    return counts


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation of a program, and the name of the first one."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith(" "):
            name = header.group(2)
            entry = name if header.group(1) else entry
        bodies.setdefault(name, []).append(line)
    return bodies, entry


def _trip_count(line: str) -> int:
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
    return int(known.group(1)) if known else 1


def _called(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    yield from re.findall(r"(?:body|condition)=%?([\w.\-]+)", line)
    for names in re.findall(r"branch_computations=\{([^}]*)\}", line):
        yield from (name.strip().lstrip("%") for name in names.split(","))


# ---------------------------------------------------------------- programs of a case


def normals(seed: int, like: Sequence[Any]) -> list[jax.Array]:
    keys = jr.split(jr.key(seed), max(len(like), 1))
    pairs = zip(keys, like, strict=False)
    return [jr.normal(key, x.shape, x.dtype) for key, x in pairs]


class Setting:
    """A function of arrays, and its sharded arguments.

    - `fn`: from arrays to a list of arrays.
    - `leaves`, `specs`: its arguments, and their shardings.
    - `out_spec`: the sharding of an output, and of its cotangent.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        leaves: Sequence[Any],
        specs: Sequence[Spec],
        out_spec: Callable[[Any], Spec],
    ):
        self.fn = fn
        outputs = jax.eval_shape(fn, *leaves)
        self.args = [list(leaves), normals(1, leaves), normals(2, outputs)]
        self.specs = [list(specs), list(specs), [out_spec(y) for y in outputs]]
        self.n_replicated = sum(spec == Spec() for spec in specs)

    def distributed(self, mesh: jax.sharding.Mesh = MESH) -> list[list[jax.Array]]:
        return [
            [put(x, spec, mesh) for x, spec in zip(xs, specs, strict=True)]
            for xs, specs in zip(self.args, self.specs, strict=True)
        ]

    def forward(self, leaves, tangents, _):
        return jax.jvp(self.fn, leaves, tangents)

    def reverse(self, leaves, _, cotangents):
        out, pull_back = jax.vjp(self.fn, *leaves)
        return out, pull_back(cotangents)

    def both(self, *args):
        return self.forward(*args), self.reverse(*args)


def over_batch(fn: Callable[..., Any], leaves: Sequence[Any], kept: Collection[int]) -> Setting:
    """Eight examples, one on each device, of the leaves in `kept`, and one of the others."""
    factors = np.linspace(1.0, 0.9, N_DEVICES)
    axes = [0 if i in kept else None for i in range(len(leaves))]
    many = [
        jnp.stack([x * factor.astype(x.dtype) for factor in factors]) if axis == 0 else x
        for x, axis in zip(leaves, axes, strict=True)
    ]
    specs = [Spec("i") if axis == 0 else Spec() for axis in axes]
    return Setting(jax.vmap(fn, in_axes=axes), many, specs, lambda y: Spec("i"))


def subject_of(case: Any) -> FlatFunction:
    fn, args = case.make()
    return FlatFunction(fn, args, {}, case.options.get("nondifferentiable", ()))


def data_of(subject: FlatFunction) -> list[int]:
    """The leaves that are data, where each device has its own: the arguments of a Module, and
    otherwise the first argument. The others are parameters."""
    if -1 in subject.groups:
        return [i for i, group in enumerate(subject.groups) if group >= 0]
    return [i for i, group in enumerate(subject.groups) if group == subject.groups[0]]
