"""`gradient_flow`: the norm of the gradient at every layer and every step of a model.

`probe` needs a slot for each step of a scan, which has to be scanned over, but the scan is in
the user's code. So each layer marks its outputs by `checkpoint_name`, and the loss is traced to
a jaxpr. The jaxpr is then evaluated with a `probe` instead of each mark, and with the slots as
additional inputs of the scans.
"""

import functools as ft
import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Float, PyTree

from .._control_flow.visible_steps import called_cells, visible_steps
from .._errors import check_function, place_of, rule_error
from .._gradient_ops.probe import GradientStatistics, probe
from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.structure import Call, Checkpoint, Cond, inner_programs, Scan, structure
from .._rules.tree_split import TreeSplit
from .._tangent_spaces import is_differentiable
from .layers import cells_of, has_arrays, is_layer, wrap_layers
from .traced_loss import check_scalar


def gradient_flow(
    loss: Callable[..., Any],
    model: PyTree,
    *args: Any,
    where: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> dict[str, Float[Array, " steps"]]:
    r"""Return the norm of the gradient at every layer of a model, and at every step.

    It shows where the gradient explodes, and where it vanishes, so that earlier layers and
    steps do not learn.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        class Network(eqx.Module):
            cell: eqx.nn.GRUCell
            readout: eqx.nn.Linear

            def __call__(self, xs):
                step = lambda h, x: (self.cell(x, h), None)
                h, _ = jax.lax.scan(step, jnp.zeros(4), xs)
                return self.readout(h)

        key1, key2 = jax.random.split(jax.random.key(0))
        network = Network(eqx.nn.GRUCell(3, 4, key=key1), eqx.nn.Linear(4, 1, key=key2))
        loss = lambda network, xs: jnp.sum(network(xs) ** 2)

        flow = eqg.gradient_flow(loss, network, jnp.ones((20, 3)))
        print({path: norms.shape for path, norms in flow.items()})
        print(flow["cell"][0] < 0.01 * flow["cell"][-1])  # it vanishes
        ```

        ```text
        {'cell': (20,), 'readout': (1,)}
        True
        ```

    **Arguments:**

    - `loss`: called as `loss(model, *args, **kwargs)`. Returns a real scalar.
    - `model`: a tree of `eqx.Module`s.
    - `*args`, `**kwargs`: anything.
    - `where`: a function of the model, as for `eqx.tree_at`, that returns the layers to
        probe. By default these are all layers: every Module that is callable and has an array
        as a direct child, except stateful layers such as `eqx.nn.BatchNorm`. For a recurrent
        layer such as [`eqx_grads.nn.GRU`][], its cells are probed.

    **Returns:**

    A dictionary from the path of a layer to the norms $\lVert \partial\,\mathrm{loss} /
    \partial\,\mathrm{out} \rVert$ of the gradient of its output, one for each call. In a
    `scan`, there is one for each step, in the order of `xs`. The norms of several calls in
    the program are concatenated. Under `vmap`, it is the norm over the whole batch. NaN where
    the gradient is not finite.

    A recurrent layer of one cell has one norm for each step: the norm of the gradient of its
    state. A layer of several cells has an entry for each: `rnn.cells[1][0]` is the entry of the
    second layer, first direction. `nn.LRU`, `S5`, `MinGRU` and `MinLSTM` have no cells to call,
    and have one norm for all steps.

    This compiles and computes one gradient. To call it repeatedly, wrap it in
    `eqx.filter_jit`.

    **Raises:**

    [`eqx_grads.RuleError`][] if it finds no layer, if a layer in `where` is not called, or if
    a layer is called where no slot can be passed: inside a `while_loop`, a `shard_map`, or a
    function with a custom derivative.
    """
    check_function(loss, "loss", "gradient_flow")
    if where is not None:
        check_function(where, "where", "gradient_flow")
    names, marked = _mark_layers(model, where)
    rest, values = TreeSplit.split((marked, args, kwargs), eqx.is_array)

    def flat_loss(values):
        model, args, kwargs = rest.tree(values)
        return check_scalar("gradient_flow", loss, loss(model, *args, **kwargs))

    # So that the marks in the steps of `filter_scan` and of recurrent layers are found.
    with visible_steps(), called_cells():
        program = jax.make_jaxpr(flat_loss)(values)
    sites = _sites(program, names)
    called = {index for index, _, _ in sites}
    missing = [name for i, name in enumerate(names) if i not in called]
    if not called or (where is not None and missing):
        raise rule_error(
            "`gradient_flow` was asked for layers that are not called.",
            f"they are: {', '.join(missing)}",
            place_of(loss),
            do="Leave them out of `where`. Only calls of `__call__` count: if another method "
            "is called, choose a Module inside these layers.",
        )

    def probed_loss(slots, consts, values):
        return _eval_with_probes(ClosedJaxpr(program.jaxpr, consts), values, slots)[0]

    slots = [GradientStatistics(shape) for _, _, shape in sites]
    statistics = jax.jit(jax.grad(probed_loss))(slots, program.consts, values)
    flow: dict[int, list[Any]] = {}
    for (index, i, _), s in zip(sites, statistics, strict=True):
        norm = jnp.ravel(jnp.where(s.nonfinite > 0, jnp.nan, s.norm))
        calls = flow.setdefault(index, [])
        calls.append(norm if i == 0 else jnp.hypot(calls.pop(), norm))
    return {names[index]: jnp.concatenate(calls) for index, calls in sorted(flow.items())}


# ---------------------------------------------------------------- marking the layers


def _call_marked(layer, index, *args, **kwargs):
    """Call a layer, and name each array of its output by the layer and a number from zero."""
    split, arrays = TreeSplit.split(layer(*args, **kwargs), is_differentiable)
    # A derivative in the loss keeps the name of the primal, and the tangent has none.
    named = [checkpoint_name(x, f"eqg_flow_{index}_{i}") for i, x in enumerate(arrays)]
    return split.tree(named)


def _mark_of(eqn) -> tuple[int, int] | None:
    """The layer and the number in the name of an equation."""
    # With the flag `jax_remat3`, the name is in an object.
    name = eqn.params.get("name", getattr(eqn.params.get("_prim"), "name", ""))
    found = re.fullmatch(r"eqg_flow_(\d+)_(\d+)", str(name))
    return None if found is None else (int(found[1]), int(found[2]))


def _mark_layers(model, where) -> tuple[list[str], Any]:
    """The names of the layers to probe, and the model in which these are marked."""
    given = [] if where is None else jax.tree.leaves(where(model), is_leaf=is_layer)
    selected = [cell for layer in given for cell in cells_of(layer)]

    def selects(node):
        if where is not None:
            return any(layer is node for layer in selected)
        stands_for_itself = cells_of(node)[0] is node
        is_stateful = isinstance(node, eqx.nn.StatefulLayer)
        return has_arrays(node) and stands_for_itself and not is_stateful

    paths, marked = wrap_layers(model, selects, _call_marked)
    if len(paths) < max(1, len({id(layer) for layer in selected})):
        raise rule_error(
            "`gradient_flow` found no layers in the model, or not all layers in `where`.",
            f"it found: {', '.join(paths) or 'none'}",
            do="A layer is a callable Module with an array as a direct child. Select others "
            "with `where`, which returns callable Modules of the model.",
        )
    return list(map(ft.partial(_without_single_cell, paths), paths)), marked


def _without_single_cell(paths: Sequence[str], path: str) -> str:
    """A recurrent layer with a single cell has its own path."""
    layer, cells, rest = path.rpartition(".cells[")
    is_single = rest == "0][0]" and sum(p.startswith(layer + cells) for p in paths) == 1
    return layer if is_single else path


# ---------------------------------------------------------------- evaluation with probes

# The index of a layer, the number of its output, and the lengths of the scans that call it.
Site = tuple[int, int, tuple[int, ...]]


def _sites(program: ClosedJaxpr, names: Sequence[str] = ()) -> list[Site]:
    """The layer and the number of steps of each mark in a program, in the program's order."""
    found = []
    for eqn in program.eqns:
        if mark := _mark_of(eqn):
            found.append((*mark, ()))
            continue
        inner = [site for p in inner_programs(eqn) for site in _sites(p, names)]
        known = structure(eqn)
        takes_slots = isinstance(known, Call | Checkpoint | Scan) or (
            isinstance(known, Cond) and not known.by_platform
        )
        if inner and not takes_slots:
            raise rule_error(
                f"The layer `{names[inner[0][0]]}` is called inside a `{eqn.primitive.name}`, "
                "where `gradient_flow` can't see its gradient.",
                do="Leave it out with `where`, or use `eqg.tap_gradient` in it.",
            )
        if isinstance(known, Scan):
            inner = [(*mark, (known.length, *shape)) for *mark, shape in inner]
        found.extend(inner)
    return found


def _eval_with_probes(
    program: ClosedJaxpr, args: Sequence[Any], slots: Sequence[PyTree]
) -> list[Any]:
    """Evaluate a program with a `probe` instead of each mark. `slots`: as from `_sites`."""
    remaining = iter(slots)

    def hook(eqn, values):
        if _mark_of(eqn):
            (x,) = values
            return [probe(x, next(remaining))]
        parts = [[next(remaining) for _ in _sites(p)] for p in inner_programs(eqn)]
        return enter(eqn, values, _eval_with_probes, parts) if any(parts) else bind(eqn, values)

    return evaluate(program, args, hook)
