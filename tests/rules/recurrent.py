"""Recurrent layers, written out as a loop over their cells."""

import jax
import jax.numpy as jnp


def run_cell(cell, xs, state, reverse):
    """One cell over one sequence."""
    ys = []
    for x in xs[::-1] if reverse else xs:
        state = cell(x, state)
        ys.append(jax.tree.leaves(state)[0])
    return jnp.stack(ys[::-1] if reverse else ys), state


def reference(layer, xs, state, lengths=None, run=run_cell):
    """Each example by itself, without its padding: what packed sequences are."""
    all_ys, ends = [], []
    n_cells = sum(len(stage) for stage in layer.cells)
    for b in range(len(xs)):
        ys = xs[b] if lengths is None else xs[b, : lengths[b]]
        of_cell = lambda i, b=b: jax.tree.map(
            lambda s: s[b] if n_cells == 1 else s[i, b], state
        )
        end, i = [], 0
        for stage in layer.cells:
            outputs = []
            for cell, reverse in zip(stage, (layer.reverse, not layer.reverse), strict=False):
                out, last = run(cell, ys, of_cell(i), reverse)
                outputs.append(out)
                end.append(last)
                i += 1
            ys = jnp.concatenate(outputs, -1)
        all_ys.append(jnp.pad(ys, ((0, xs.shape[1] - len(ys)), (0, 0))))
        ends.append(end[0] if n_cells == 1 else jax.tree.map(lambda *s: jnp.stack(s), *end))
    axis = 0 if n_cells == 1 else 1
    return jnp.stack(all_ys), jax.tree.map(lambda *s: jnp.stack(s, axis), *ends)


def loss(run):
    def value(args):
        ys, end = run(*args)
        return jnp.sum(jnp.sin(ys)) + sum(
            jnp.sum(jnp.abs(s) ** 2) for s in jax.tree.leaves(end)
        )

    return value


def losses_of_one_output(run):
    """A loss for each array that a layer returns: nothing else has a gradient."""

    def of(i):
        def value(args):
            out = jax.tree.leaves(run(*args))
            return jnp.sum(jnp.sin(jnp.abs(out[i]))) if i < len(out) else jnp.zeros(())

        return value

    return [of(i) for i in range(5)]
