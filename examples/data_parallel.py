"""Train a character model with one process, and with many that share every batch.

One command starts the processes, which find each other on this machine as they would on a
cluster. If one is killed, the same command resumes, and ends with the same bits.
"""

import argparse
import functools as ft
import json
import os
import pathlib
import signal
from pydoc_data.topics import topics

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as Spec
from launchers.local import launch
from matplotlib.figure import Figure
from tqdm import trange


CHARACTERS, UNITS, STEPS, CHECKPOINTS, LEARNING_RATE = 128, 128, 300, 6, 2e-3  # all of ASCII
BATCH, LENGTH = 32, 128  # sequences, of all processes together, and their characters


class CharacterModel(eqx.Module):
    embedding: eqx.nn.Embedding
    gru: eqg.nn.GRU
    head: eqx.nn.Linear

    def __init__(self, characters: int, units: int, layers: int, *, key):
        keys = jr.split(key, 3)
        self.embedding = eqx.nn.Embedding(characters, units, key=keys[0])
        self.gru = eqg.nn.GRU(units, units, num_layers=layers, key=keys[1])
        self.head = eqx.nn.Linear(units, characters, key=keys[2])

    def __call__(self, text):  # the loss of predicting each next character
        features, _ = self.gru(self.embedding.weight[text[:, :-1]])
        loss, head = eqg.losses.linear_cross_entropy, self.head
        return loss(features, head.weight, text[:, 1:], bias=head.bias)


def make_step(static, optimizer: optax.GradientTransformation, mesh: Mesh):
    @ft.partial(jax.shard_map, mesh=mesh, in_specs=(Spec(), Spec("batch")), out_specs=Spec())
    def value_and_grad(params, text):
        """Each device has equally many rows, and its own gradient until the mean over all."""
        params = jax.lax.pcast(params, "batch", to="varying")
        loss = lambda params: eqx.combine(params, static)(text)
        # One array is communicated: on CPUs, each array takes a message of its own.
        flat, unravel = ravel_pytree(jax.value_and_grad(loss)(params))
        return unravel(jax.lax.pmean(flat, "batch"))

    @jax.jit
    def step(state, text):
        i, params, optimizer_state, losses = state
        value, grad = value_and_grad(params, text)
        updates, optimizer_state = optimizer.update(grad, optimizer_state)
        params = eqx.apply_updates(params, updates)
        return i + 1, params, optimizer_state, losses.at[i].set(value)

    return step


def work(args):  # what each process does
    # On a cluster that JAX knows, no arguments are given: `initialize` asks the cluster.
    jax.distributed.initialize(args.coordinator, args.processes, args.process)
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    text = np.frombuffer(text, "uint8").astype("int32")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
    model = CharacterModel(CHARACTERS, UNITS, layers=1, key=jr.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    state = (jnp.int32(0), params, optimizer.init(params), jnp.zeros(args.steps))
    state = jax.device_put(state, NamedSharding(mesh, Spec()))
    step, rows = make_step(static, optimizer, mesh), NamedSharding(mesh, Spec("batch"))
    # A checkpoint is a list of all arrays. All processes save and restore it together.
    checkpoints = ocp.CheckpointManager(args.out.absolute() / "checkpoints")
    leaves, treedef = jax.tree.flatten(state)
    if start := checkpoints.latest_step() or 0:
        leaves = checkpoints.restore(start, args=ocp.args.StandardRestore(leaves))
        state = treedef.unflatten(leaves)
    first, last = jax.process_index() == 0, jax.process_index() == jax.process_count() - 1
    # Only the first process has a bar. Every process draws all rows of a batch.
    for i in trange(start, args.steps, disable=None if first else True):
        starts = np.random.default_rng(i).integers(len(text) - LENGTH, size=(BATCH, 1))
        batch = text[starts + np.arange(LENGTH + 1)]
        state = step(state, jax.make_array_from_callback(batch.shape, rows, batch.__getitem__))
        if (i + 1) % max(1, args.steps // CHECKPOINTS) == 0:
            checkpoints.save(i + 1, args=ocp.args.StandardSave(jax.tree.leaves(state)))
        if i + 1 == args.kill and last:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.close()
    if first:
        np.savez(args.out / "trained.npz", *jax.tree.leaves(state), losses=state[-1])


def train(processes, args):  # the losses of a run on this machine
    out = args.out / f"{args.steps}-steps-{processes}-processes"
    if not (out / "trained.npz").exists():
        out.mkdir(parents=True, exist_ok=True)
        kill = args.kill if processes > 1 else 0
        program = [__file__, "--steps", args.steps, "--out", out, "--kill", kill]
        launch(program, processes, resume=out)
    return np.load(out / "trained.npz")["losses"]


def draw(one, many, difference):
    axes = (figure := Figure(figsize=(7, 3.5), layout="constrained")).subplots()
    axes.plot(one, linewidth=3, color="0.75", label="one process")
    axes.plot(many, linewidth=0.8, color="C1", label=f"many: at most {difference:.1e} apart")
    axes.legend(frameon=False)
    axes.set(xlabel="step", ylabel="loss")
    return figure


def main():
    parser = argparse.ArgumentParser(description="Train with one process, and with many.")
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--out", type=pathlib.Path, default="out", help="folder (%(default)s)")
    parser.add_argument("--processes", type=int, help="how many (2)")
    parser.add_argument("--steps", type=int, default=STEPS, help="(%(default)s)")
    parser.add_argument("--kill", type=int, default=0, help="kill the last one after this step")
    parser.add_argument("--worker", action="store_true", help="be one process, on a cluster")
    parser.add_argument("--coordinator", help="for a worker: host and port of process 0")
    parser.add_argument("--process", type=int, help="for a worker: its number")
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    if BATCH % (processes := args.processes or 2):
        parser.error(f"{processes} processes can't have equally many of {BATCH} sequences.")
    args.steps = CHECKPOINTS if args.quick else args.steps
    one, many = train(1, args), train(processes, args)
    difference = float(abs(many / one - 1).max())
    print(f"The last losses: {one[-1]:.6f} and {many[-1]:.6f}; at most {difference:.1e} apart")
    (args.out / "result.json").write_text(json.dumps({"difference": difference}))
    draw(one, many, difference).savefig(picture := args.out / "data-parallel.png", dpi=150)
    print(f"The picture is {picture}.")


if __name__ == "__main__":
    main()
