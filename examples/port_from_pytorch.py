"""Move a model from PyTorch to Equinox, weights and custom derivatives, with equal numbers.

The model reads a digit row by row: a `torch.nn.GRU`, a spike with a surrogate derivative that
is a `torch.autograd.Function`, and a `torch.nn.Linear`. `reference` is the model in PyTorch.
Its weights, outputs and gradients for some digits are in `port_from_pytorch.npz`, which
`--torch` computes again. The rest needs no PyTorch, and compares with what is stored.
"""

import argparse
import importlib
import json
import pathlib
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tqdm import tqdm


STORED = pathlib.Path(__file__).with_name("port_from_pytorch.npz")
UNITS, DIGITS = 24, 32


def reference(images, labels):
    """The model in PyTorch: its weights, its logits, and the gradient of each weight."""
    torch: Any = importlib.import_module("torch")  # only for `--torch`

    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            ctx.save_for_backward(v)
            return (v > 0).to(v.dtype)

        @staticmethod
        def backward(ctx, ct):
            (v,) = ctx.saved_tensors
            return ct / (1 + 2 * v.abs()) ** 2

    torch.manual_seed(0)
    gru = torch.nn.GRU(8, UNITS, batch_first=True)
    readout = torch.nn.Linear(UNITS, 10)
    states, _ = gru(torch.as_tensor(images))
    logits = readout(Spike.apply(states).sum(dim=1))
    torch.nn.functional.cross_entropy(logits, torch.as_tensor(labels)).backward()
    result = {"logits": logits.detach().numpy()}
    for prefix, layer in (("gru.", gru), ("readout.", readout)):
        for name, weight in layer.named_parameters():
            result[prefix + name] = weight.detach().numpy()
            result["gradient of " + prefix + name] = weight.grad.numpy()
    return result


@eqg.custom_vjp
def spike(v):
    return (v > 0).astype(v.dtype)


@spike.def_fwd
def _spike_fwd(v):
    return spike(v), v


@spike.def_bwd
def _spike_bwd(v, ct):
    return (ct / (1 + 2 * jnp.abs(v)) ** 2,)


class Model(eqx.Module):
    gru: eqg.nn.Recurrent
    readout: eqx.nn.Linear

    def __call__(self, images: Float[Array, "batch row pixel"]):
        states, _ = self.gru(images)
        return jax.vmap(self.readout)(spike(states).sum(axis=1))


def port(weights):
    """The model with the weights of a `state_dict`."""
    w = {name: jnp.asarray(weight) for name, weight in weights.items()}
    cell = eqx.nn.GRUCell(8, UNITS, key=jr.key(0))
    # PyTorch has two biases for each gate. Only those of the new state are not just summed.
    of_new = jnp.arange(3 * UNITS) >= 2 * UNITS
    bias = w["gru.bias_ih_l0"] + jnp.where(of_new, 0, w["gru.bias_hh_l0"])
    cell = eqx.tree_at(
        lambda cell: (cell.weight_ih, cell.weight_hh, cell.bias, cell.bias_n),
        cell,
        (w["gru.weight_ih_l0"], w["gru.weight_hh_l0"], bias, w["gru.bias_hh_l0"][2 * UNITS :]),
    )
    readout = eqx.nn.Linear(UNITS, 10, key=jr.key(0))
    values = w["readout.weight"], w["readout.bias"]
    readout = eqx.tree_at(lambda layer: (layer.weight, layer.bias), readout, values)
    return Model(eqg.nn.Recurrent(cell), readout)


def loss(weights, images, labels):
    logits = port(weights)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


@matplotlib.rc_context({"axes.spines.top": False, "axes.spines.right": False})
def draw(pairs):
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    axes.axline((0, 0), slope=1, color="#c4c4c4")
    for name, (theirs, ours) in pairs.items():
        axes.plot(np.ravel(theirs), np.ravel(ours), ".", markersize=3, label=name)
    axes.set(xlabel="PyTorch", ylabel="eqx_grads", title="The gradient of each weight")
    axes.legend(frameon=False, fontsize=7)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Move a model from PyTorch to Equinox.")
    parser.add_argument("--quick", action="store_true", help="nothing is slow: no difference")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    parser.add_argument("--torch", action="store_true", help="compute what is stored again")
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    images, labels = (images[:DIGITS] / 16).reshape(-1, 8, 8).astype("float32"), labels[:DIGITS]
    if args.torch:
        np.savez(STORED, **reference(images, labels))
    stored = dict(np.load(STORED))
    weights = {name: x for name, x in stored.items() if "gradient of " + name in stored}
    gradients, logits = jax.grad(loss, has_aux=True)(weights, images, labels)
    pairs = {name: (stored["gradient of " + name], gradients[name]) for name in weights}
    result = {"logits": float(np.max(np.abs(logits - stored["logits"])))}
    for name, (theirs, ours) in tqdm(pairs.items(), leave=False, disable=None):
        result[name] = float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))
    print("Largest differences to PyTorch, of the logits and of gradients (relative):")
    for name, difference in result.items():
        print(f"{name:20} {difference:.1e}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(result))
    picture = args.out / "port-from-pytorch.png"
    draw(pairs).savefig(picture, dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
