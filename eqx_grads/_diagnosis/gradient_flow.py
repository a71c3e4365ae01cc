"""The norm of the gradient at every layer and every step of a model, and a picture of it.

A slot for each step of a scan has to be scanned over, and the scan is in the user's code. So
the layers mark their outputs with a primitive, the loss is traced, and the program is run
again with a `probe` for each mark, and with its slots among the inputs of the scans.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, ArrayLike, Float, PyTree

from .._control_flow.scan import visible_steps
from .._errors import name_of, place_of, rule_error, show_tree
from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.structure import Call, Checkpoint, Cond, inner_programs, Scan, structure
from .._tangent_spaces import is_differentiable
from .probe import GradientStatistics, probe


def gradient_flow(
    loss: Callable[..., Any],
    model: PyTree,
    *args: Any,
    where: Callable[[Any], Any] | None = None,
) -> dict[str, Float[Array, " steps"]]:
    r"""How long the gradient is at every layer of a model, and at every step.

    Where it vanishes, what is before does not learn; where it explodes, nothing does.

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
        assert list(flow) == ["cell", "readout"]
        assert flow["cell"].shape == (20,)
        assert flow["cell"][0] < 0.01 * flow["cell"][-1]  # it vanishes
        ```

    **Arguments:**

    - `loss`: called as `loss(model, *args)`. Returns a real scalar.
    - `model`: a tree of `eqx.Module`s.
    - `*args`: anything.
    - `where`: by default all layers are probed: every Module that can be called and has an
        array of its own, but for the stateful ones, such as `eqx.nn.BatchNorm`. Otherwise a
        function of the model, as for `eqx.tree_at`, that returns those to probe.

    **Returns:**

    A dictionary from the path of a layer to $\lVert \partial\,\mathrm{loss} /
    \partial\,\mathrm{out} \rVert$, one norm for each call of the layer, of all that it
    returned: one for each step where it is called in a `scan` (in the order of what is
    scanned), and then one for each call in the program, where there are several. With a
    batch by `vmap`, it is the norm of the gradient of the whole batch. NaN where the
    gradient is not finite.

    It compiles and computes one gradient. To do so repeatedly, put it under
    `eqx.filter_jit`.

    **Raises:**

    [`eqx_grads.RuleError`][] if there is no layer, if one in `where` is not called, or if
    one is called where no slot can be passed to: in a `while_loop`, a `shard_map`, or a
    function with a derivative of its own.
    """
    names, marked = _mark_layers(model, where)
    dynamic, static = eqx.partition((marked, args), eqx.is_array)
    values, treedef = jax.tree.flatten(dynamic)

    def of_values(values):
        dynamic = jax.tree.unflatten(treedef, values)
        model, args = eqx.combine(dynamic, static)
        return _check_scalar(loss, loss(model, *args))

    with visible_steps():  # of `filter_scan`, so that the marks in them are found
        program = jax.make_jaxpr(of_values)(values)
    sites = _sites(program, names)
    called = {index for index, _ in sites}
    missing = [name for i, name in enumerate(names) if i not in called]
    if not called or (where is not None and missing):
        raise rule_error(
            "`gradient_flow` was asked for layers that are not called.",
            f"they are: {', '.join(missing)}",
            place_of(loss),
            do="Leave them out of `where`. If they are called by a method other than "
            "`__call__`, choose a Module inside of them.",
        )

    def of_slots(slots, consts, values):
        return _run_with_probes(ClosedJaxpr(program.jaxpr, consts), values, slots)[0]

    slots = [GradientStatistics(shape) for _, shape in sites]
    found = jax.jit(jax.grad(of_slots))(slots, program.consts, values)
    norms = [jnp.ravel(jnp.where(s.nonfinite > 0, jnp.nan, s.norm)) for s in found]
    return {
        name: jnp.concatenate([n for n, (i, _) in zip(norms, sites, strict=True) if i == index])
        for index, name in enumerate(names)
        if index in called
    }


def _check_scalar(loss, out):
    if not is_differentiable(out) or jnp.shape(out) != () or jnp.iscomplexobj(out):
        raise rule_error(
            f"The loss `{name_of(loss)}` did not return a real scalar.",
            f"it returned {show_tree(out)}",
            place_of(loss),
            do="`gradient_flow` differentiates one number, without auxiliary output.",
        )
    return out


# ---------------------------------------------------------------- the layers, marked

mark_p = Primitive("eqg_mark")
mark_p.multiple_results = True


def _mark_impl(*xs, layer):
    del layer
    return list(xs)


def _mark_jvp(primals, tangents, *, layer):
    # Where the loss itself contains a derivative: the activations are the primals.
    return mark_p.bind(*primals, layer=layer), list(tangents)


def _mark_batch(xs, dims, *, layer):
    return mark_p.bind(*xs, layer=layer), dims


mark_p.def_impl(_mark_impl)
mark_p.def_abstract_eval(_mark_impl)
ad.primitive_jvps[mark_p] = _mark_jvp
batching.primitive_batchers[mark_p] = _mark_batch
mlir.register_lowering(mark_p, mlir.lower_fun(_mark_impl, multiple_results=True))


class _Marked(eqx.Module):
    """A layer that marks what it returns, and is otherwise like the layer."""

    _eqg_layer: Any
    _eqg_index: int = eqx.field(static=True)

    def __call__(self, *args, **kwargs):
        out = self._eqg_layer(*args, **kwargs)
        leaves, treedef = jax.tree.flatten(out)
        places = [i for i, leaf in enumerate(leaves) if is_differentiable(leaf)]
        if places:
            xs = [jnp.asarray(leaves[i]) for i in places]
            for i, x in zip(places, mark_p.bind(*xs, layer=self._eqg_index), strict=True):
                leaves[i] = x
        return jax.tree.unflatten(treedef, leaves)

    @property
    def __class__(self):  # pyright: ignore  `isinstance` sees the layer
        return type(self._eqg_layer)

    def __getattr__(self, name):
        if name.startswith("_eqg_"):
            raise AttributeError(name)
        return getattr(self._eqg_layer, name)


def _mark_layers(model, where) -> tuple[list[str], Any]:
    """The names of the layers to probe, and the model with these marked."""
    wanted = None
    if where is not None:
        wanted = jax.tree.leaves(where(model), is_leaf=_is_layer)
        strange = [layer for layer in wanted if not _is_layer(layer)]
        if strange or not wanted:
            raise rule_error(
                "`gradient_flow` was given a `where` that does not return layers.",
                f"it returned {show_tree(where(model))}",
                place_of(where),
                do="Return Modules of the model that can be called: one, or a tree of them.",
            )
    names: list[str] = []
    marked = _mark_below(model, "", wanted, names)
    n_wanted = 1 if wanted is None else len({id(layer) for layer in wanted})
    if len(names) < n_wanted:
        raise rule_error(
            "`gradient_flow` found no layers in the model, or not all of those in `where`.",
            f"it found: {', '.join(names) or 'none'}",
            do="A layer is a Module that can be called. Choose them with `where`.",
        )
    return names, marked


def _is_layer(node) -> bool:
    return isinstance(node, eqx.Module) and callable(node)


def _mark_below(node, path, wanted, names):
    is_inner = lambda n: n is not node and _is_layer(n)
    parts, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_inner)
    if wanted is None:
        chosen = any(eqx.is_array(part) for _, part in parts)
        chosen = chosen and not isinstance(node, eqx.nn.StatefulLayer)
    else:
        chosen = any(layer is node for layer in wanted)
    chosen = chosen and _is_layer(node)
    index = len(names)
    if chosen:
        names.append(path.removeprefix(".") or type(node).__name__)
    inner = [
        _mark_below(part, path + jax.tree_util.keystr(p), wanted, names)
        if _is_layer(part)
        else part
        for p, part in parts
    ]
    node = jax.tree.unflatten(treedef, inner)
    return _Marked(node, index) if chosen else node


# ---------------------------------------------------------------- the program, run again

Site = tuple[int, tuple[int, ...]]  # a layer, and how many steps it is called in


def _sites(program: ClosedJaxpr, names: Sequence[str] = ()) -> list[Site]:
    """The marks of a program, in its order."""
    found = []
    for eqn in program.eqns:
        if eqn.primitive is mark_p:
            found.append((eqn.params["layer"], ()))
            continue
        inner = [site for p in inner_programs(eqn) for site in _sites(p, names)]
        known = structure(eqn)
        takes_slots = isinstance(known, Call | Checkpoint | Scan) or (
            isinstance(known, Cond) and not known.by_platform
        )
        if inner and not takes_slots:
            raise rule_error(
                f"The layer `{names[inner[0][0]]}` is called inside of a "
                f"`{eqn.primitive.name}`, and its gradient can't be got out of there.",
                do="Leave it out with `where`, or use `eqx_grads.tap_gradient` in it.",
            )
        if isinstance(known, Scan):
            inner = [(i, (known.length, *shape)) for i, shape in inner]
        found.extend(inner)
    return found


def _run_with_probes(
    program: ClosedJaxpr, args: Sequence[Any], slots: Sequence[PyTree]
) -> list[Any]:
    """Run a program, with a probe in place of each mark."""
    remaining = iter(slots)

    def hook(eqn, values):
        if eqn.primitive is mark_p:
            return probe(values, next(remaining))
        parts = [[next(remaining) for _ in _sites(p)] for p in inner_programs(eqn)]
        return enter(eqn, values, _run_with_probes, parts) if any(parts) else bind(eqn, values)

    return evaluate(program, args, hook)


# ---------------------------------------------------------------- the picture


def plot_gradient_flow(
    flow: Mapping[str, ArrayLike],
    *,
    axes: Any = None,
    limits: tuple[float, float] | None = None,
) -> Any:
    r"""Draw what [`eqx_grads.gradient_flow`][] returned: layers by steps, the color being
    the norm of the gradient on a logarithmic scale.

    A gradient of zero is black, as is one below the scale; one that is not finite is red.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp
        from matplotlib.figure import Figure

        flow = {"cell": 0.5 ** jnp.arange(20.0)[::-1], "readout": jnp.ones(1)}
        figure = Figure()
        axes = eqg.plot_gradient_flow(flow, axes=figure.add_subplot())
        assert axes.get_xlabel() == "step"
        ```

    **Arguments:**

    - `flow`: a dictionary from names to norms. A layer with fewer steps than the others has
        wider cells.
    - `axes`: the `matplotlib.axes.Axes` to draw in; by default, those of a new figure.
    - `limits`: the norms at the two ends of the scale; by default, the smallest that is not
        zero and the largest.

    **Returns:**

    The axes.

    **Raises:**

    `ImportError` if there is no [Matplotlib](https://matplotlib.org).
    """
    try:
        import matplotlib as mpl
        from matplotlib.colors import LogNorm
    except ImportError as error:
        message = "`plot_gradient_flow` needs Matplotlib: `pip install matplotlib`."
        raise ImportError(message) from error
    rows = {name: np.asarray(norms, float).reshape(-1) for name, norms in flow.items()}
    if not rows:
        raise rule_error(
            "`plot_gradient_flow` was given nothing to draw.",
            do="Give it what `gradient_flow` returned.",
        )
    if axes is None:
        from matplotlib import pyplot

        size = (7.0, 1.2 + 0.4 * len(rows))
        axes = pyplot.subplots(figsize=size, layout="constrained")[1]

    every = np.concatenate(list(rows.values()))
    low, high = _limits(every) if limits is None else limits
    colors = mpl.colormaps["viridis"].with_extremes(under="black", bad="red")
    scale = LogNorm(low, high)
    steps = max(norms.size for norms in rows.values())
    mesh = None
    for i, norms in enumerate(rows.values()):
        edges = np.linspace(-0.5, steps - 0.5, norms.size + 1)
        # A logarithmic scale takes zero for a missing value.
        cells = np.ma.masked_invalid(np.where(norms == 0, low / 2, norms))[None]
        mesh = axes.pcolormesh(edges, (i - 0.5, i + 0.5), cells, cmap=colors, norm=scale)
    axes.set(xlabel="step", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), list(rows))
    ends = {(True, True): "both", (True, False): "min", (False, True): "max"}
    extend = ends.get((bool(np.any(every < low)), bool(np.any(every > high))), "neither")
    axes.figure.colorbar(mesh, ax=axes, label="norm of the gradient", extend=extend)
    return axes


def _limits(norms) -> tuple[float, float]:
    positive = norms[np.isfinite(norms) & (norms > 0)]
    low, high = (positive.min(), positive.max()) if positive.size else (1.0, 1.0)
    # A scale has to have two ends.
    return (low, high) if low < high else (low / 2, high * 2)
