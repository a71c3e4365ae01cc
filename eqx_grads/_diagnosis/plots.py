"""`plot_gradient_flow`: gradient norms, layers by steps."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import ArrayLike

from .._errors import optional_import, rule_error


def plot_gradient_flow(
    flow: Mapping[str, ArrayLike],
    *,
    axes: Any = None,
    limits: tuple[float, float] | None = None,
) -> Any:
    r"""Plot the result of [`eqx_grads.gradient_flow`][]: layers by steps, colored by the norm
    of the gradient on a logarithmic scale.

    A norm that is zero or below the scale is black; one that is not finite is red.

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

    - `flow`: a dictionary from names to norms. The cells of a layer with fewer steps than the
        others are wider.
    - `axes`: the `matplotlib.axes.Axes` to draw in; by default, the axes of a new figure.
    - `limits`: the smallest and the largest norm of the scale; by default, the smallest
        positive and the largest norm in `flow`.

    **Returns:**

    The axes.

    **Raises:**

    `ModuleNotFoundError` if [Matplotlib](https://matplotlib.org), the extra `plot`, is not
    installed.
    """
    optional_import("matplotlib", "plot_gradient_flow", "plot")
    import matplotlib as mpl
    from matplotlib.colors import LogNorm

    rows = {name: np.asarray(norms, float).reshape(-1) for name, norms in flow.items()}
    if not rows:
        raise rule_error(
            "`plot_gradient_flow` was given nothing to draw.",
            do="Give it the result of `gradient_flow`, for a model with at least one layer.",
        )
    if axes is None:
        from matplotlib import pyplot

        size = (7.0, 1.2 + 0.4 * len(rows))
        axes = pyplot.subplots(figsize=size, layout="constrained")[1]

    all_norms = np.concatenate(list(rows.values()))
    low, high = _limits(all_norms) if limits is None else limits
    colors = mpl.colormaps["viridis"].with_extremes(under="black", bad="red")
    scale = LogNorm(low, high)
    steps = max(norms.size for norms in rows.values())
    mesh = None
    for i, norms in enumerate(rows.values()):
        edges = np.linspace(-0.5, steps - 0.5, norms.size + 1)
        # Zero would be masked on a logarithmic scale: put it below the scale instead.
        cells = np.ma.masked_invalid(np.where(norms == 0, low / 2, norms))[None]
        mesh = axes.pcolormesh(edges, (i - 0.5, i + 0.5), cells, cmap=colors, norm=scale)
    axes.set(xlabel="step", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.figure.colorbar(mesh, ax=axes, label="norm of the gradient", extend="both")
    return axes


def _limits(norms) -> tuple[float, float]:
    positive = norms[np.isfinite(norms) & (norms > 0)]
    low, high = (positive.min(), positive.max()) if positive.size else (1.0, 1.0)
    # A logarithmic scale needs `low < high`.
    return (low, high) if low < high else (low / 2, high * 2)
