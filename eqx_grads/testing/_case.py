"""One rule under test: its function at its arguments, in both precisions, and the witnesses."""

import contextlib
import dataclasses
import functools as ft
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._compare import as_real, difference, norm, tolerance_of
from ._compiled import Program
from ._finite_differences import directional
from ._flat_function import double_precision, Subject
from ._random_tangents import normal_like
from ._strip_rules import has_rules, without_rules


@dataclasses.dataclass(frozen=True)
class Options:
    """What `check_rule` was asked for, see there."""

    reference: Callable[..., Any] | None = None
    expected_tangent: Callable[..., Any] | None = None
    expected_cotangent: Callable[..., Any] | None = None
    nonlinear: bool = False
    nondifferentiable: Collection[str] = ()
    tangents: Any = None
    cotangents: Any = None
    order: int = 2
    at: Sequence[Any] = ()
    max_residual_bytes: int | None = None
    tolerance: float | None = None


class Precision:
    """The rule and its witnesses in one precision.

    - `rule`: the function with its rule.
    - `witness`: what autodiff is right for it: of the undecorated function, or of the
        reference. `None` where an explicit derivative is expected instead.
    """

    def __init__(self, subject: Subject, options: Options, context: Callable[[], Any]):
        self.subject = subject
        self.context = context
        leaves = subject.leaves
        self.rule = Program(subject.arrays, leaves, context)
        is_decorated = isinstance(subject.fn, jax.custom_jvp | jax.custom_vjp)
        plain = without_rules(subject.arrays, is_decorated)
        self.plain = Program(plain, leaves, context)
        self.witness = self.plain
        if options.reference is not None:
            self.witness = Program(_reference(subject, options.reference), leaves, context)

    @ft.cached_property
    def outputs(self) -> list[Any]:
        return self.rule.value()

    def like_leaves(self, vectors: Sequence[Any]) -> list[Any]:
        pairs = zip(vectors, self.subject.leaves, strict=True)
        return [_cast(v, x.dtype) for v, x in pairs]

    def like_outputs(self, vectors: Sequence[Any]) -> list[Any]:
        return [_cast(v, x.dtype) for v, x in zip(vectors, self.outputs, strict=True)]


def _cast(v, dtype):
    return np.asarray(v).astype(dtype)


def _reference(subject, reference):
    def arrays(*leaves):
        _, args = subject.tree(leaves)
        out = jax.tree.leaves(reference(*args, **subject.kwargs))
        out = [x for x in out if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        # The derivatives of the reference, with the values of the function: a second
        # derivative of what comes after depends on them.
        values = jax.lax.stop_gradient(subject.arrays(*leaves))
        return [v + (x - jax.lax.stop_gradient(x)) for v, x in zip(values, out, strict=True)]

    return arrays


class Case:
    """A rule, its arguments and the options. What several checks need is made once."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        options: Options,
    ):
        self.options = options
        self.subject = Subject(fn, args, kwargs, options.nondifferentiable)
        # The checks that have failed so far, for the words of those that follow.
        self.failed: set[str] = set()
        self.own = Precision(self.subject, options, contextlib.nullcontext)
        self.reseed(0)

    def reseed(self, seed: int) -> None:
        """Look along other random directions."""
        self.rng = np.random.default_rng(seed)
        self.differences: list[Any] | None = None  # along some of them, see `forward`

    @property
    def names(self) -> list[str]:
        return self.subject.names

    @ft.cached_property
    def output_names(self) -> list[str]:
        flat = jax.tree_util.tree_leaves_with_path(self.subject.call(self.subject.leaves))
        names = [
            f"output{jax.tree_util.keystr(path)}"
            for path, leaf in flat
            if jnp.issubdtype(getattr(leaf, "dtype", int), jnp.inexact)
        ]
        return names if len(names) == len(self.own.outputs) else self._numbered()

    def _numbered(self):
        return [f"output[{i}]" for i in range(len(self.own.outputs))]

    @ft.cached_property
    def has_rule(self) -> bool:
        try:
            return has_rules(self.subject.arrays, *self.subject.leaves)
        except Exception:  # what can't be traced is reported by the checks that trace it
            return True

    @ft.cached_property
    def is_wide(self) -> bool:
        """Whether the user's own precision is double."""
        return all(jnp.finfo(x.dtype).bits == 64 for x in self.subject.leaves)

    @ft.cached_property
    def wide(self) -> Precision | None:
        """All in float64, if the function can be run so."""
        if self.is_wide and jax.dtypes.canonicalize_dtype(float) == np.float64:
            return self.own
        try:
            with double_precision():
                wide = Precision(self.subject.in_float64(), self.options, double_precision)
                wide.rule.value()
                try:
                    _pull_zeros(wide)
                except Exception:
                    # A rule that is for single precision only; or one that never works.
                    if not _fails(_pull_zeros, self.own):
                        return None
            return wide
        except Exception:  # the function is for single precision only
            return None

    @ft.cached_property
    def offers_forward(self) -> bool:
        """A `jax.custom_vjp` has no forward mode, and JAX says so."""
        leaves = self.subject.leaves
        zeros = [np.zeros(x.shape, x.dtype) for x in leaves]
        run = lambda xs: self.own.rule.jvp_of(xs, zeros)
        return not _raises(run, leaves, "forward-mode")

    @ft.cached_property
    def offers_reverse(self) -> bool:
        """A `while_loop` has no reverse mode, nor has a `custom_vmap`."""

        def run(xs):
            out, pull = jax.vjp(self.own.rule.fn, *xs)
            return pull([jnp.zeros_like(x) for x in out])

        return not _raises(run, self.subject.leaves, "everse-mode")

    def tangents(self) -> list[Any]:
        return normal_like(self.rng, self.subject.leaves)

    def cotangents(self) -> list[Any]:
        return normal_like(self.rng, self.own.outputs)

    # ------------------------------------------------------------ what is expected

    @property
    def precision(self) -> Precision:
        """The better of the two."""
        return self.wide or self.own

    def expected_jvp(self, precision: Precision, tangents: Sequence[Any]):
        """What forward mode should give, by exact means."""
        if self.options.expected_tangent is None:
            return precision.witness.jvp(tangents)
        with precision.context():
            _, primals = precision.subject.tree(precision.subject.leaves)
            _, t_args = precision.subject.tree([jnp.asarray(t) for t in tangents])
            out = self.options.expected_tangent(primals, t_args)
            return [np.asarray(x) for x in jax.tree.leaves(out)]

    def expected_vjp(self, precision: Precision, cotangents: Sequence[Any]):
        """What reverse mode should give, by exact means."""
        if self.options.expected_cotangent is None:
            return precision.witness.vjp(cotangents)
        subject = precision.subject
        with precision.context():
            _, primals = subject.tree(subject.leaves)
            ct = _like_output(subject, cotangents)
            out = self.options.expected_cotangent(primals, ct)
            return [np.asarray(x) for x in subject.cotangents_by_leaf(out)]

    @property
    def is_wrong_on_purpose(self) -> bool:
        options = (
            self.options.reference,
            self.options.expected_tangent,
            self.options.expected_cotangent,
        )
        return any(option is not None for option in options)

    def finite_difference(self, tangents: Sequence[Any]):
        """Along `tangents`: the derivative in float64, and its relative error."""
        p = self.precision
        with p.context():
            evaluate = lambda *xs: p.plain.value_at(xs)
            return directional(evaluate, [np.asarray(x) for x in p.subject.leaves], tangents)

    def scaled_tangents(self) -> list[Any]:
        """Random, each entry in proportion to that of the leaf: small steps for all."""
        out = []
        for x, t in zip(self.precision.subject.leaves, self.tangents(), strict=True):
            x = np.abs(np.asarray(x))
            usual = norm(as_real(x)) / max(np.sqrt(x.size), 1) or 1.0
            t = np.clip(as_real(t), -2, 2) if not np.iscomplexobj(t) else np.asarray(t)
            out.append(np.where(x > 0, x, usual) * t)
        return out

    # ------------------------------------------------------------ how much may differ

    def tolerance(self, precision: Precision, *arrays: Any) -> float:
        """What rounding explains in this precision."""
        if self.options.tolerance is not None:
            return self.options.tolerance
        if precision is self.own:
            return tolerance_of(self.subject.leaves, list(arrays))
        # In float64, on behalf of coarser numbers: constants may be given in float32.
        return 1e-5

    @ft.cached_property
    def noise(self) -> float:
        """How far plain autodiff in the user's precision is off by rounding alone."""
        if self.wide is None or self.wide is self.own:
            return 0.0
        w = normal_like(np.random.default_rng(0), self.own.outputs)
        try:
            exact = self.wide.plain.vjp(self.wide.like_outputs(w))
            rounded = self.own.plain.vjp(w)
        except Exception:  # the function has no plain derivative
            return 0.0
        error = difference(exact, rounded, self.names, entrywise=False).error
        return error if np.isfinite(error) else 0.0


def _pull_zeros(precision: Precision) -> None:
    zeros = [np.zeros(x.shape, x.dtype) for x in precision.outputs]
    precision.rule.vjp(zeros)


def _fails(run, *args) -> bool:
    try:
        run(*args)
    except Exception:
        return True
    return False


def _raises(run, leaves, text: str) -> bool:
    """Whether JAX says that a mode is not to be had. Other errors are for the checks."""
    try:
        run(leaves)  # eagerly, as tracing alone does not bring out all of them
    except (TypeError, ValueError, NotImplementedError) as e:
        return text in str(e)
    except Exception:
        return False
    return False


def _like_output(subject, cotangents):
    out = jax.eval_shape(lambda xs: _dynamic(subject.call(xs)), subject.leaves)
    leaves, treedef = jax.tree.flatten(out)
    rest = iter(cotangents)
    filled = [
        jnp.asarray(next(rest)) if jnp.issubdtype(x.dtype, jnp.inexact) else None
        for x in leaves
    ]
    return jax.tree.unflatten(treedef, filled)


def _dynamic(out):
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, out)
