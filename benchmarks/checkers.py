"""Claim: `check_rule` catches all planted faults, and other checkers 85 to 103 of 142.

The faults come from `tests/faults`: each is a rule that is wrong in one way, with the same
rule without the fault. A checker catches a fault if it rejects the wrong rule and accepts the
right one. The peers have their strictest options, in single and in double precision; PyTorch
needs double precision. They are given configuration as constants, arguments that are not to be
perturbed too, and all orders and modes that the rule offers. Chex and PyTorch are measured if
they are installed. Prints a Markdown table, which `--write` saves. The saved results are of 142
faults: 42 of them are left, of each kind.

    python benchmarks/checkers.py [--quick] [--write] [--check NAME]
"""

import argparse
import collections
import importlib
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np


ROOT = pathlib.Path(__file__).parents[1]
QUICK = ("twice", "cotangents_swapped")
TABLE = ROOT / "benchmarks" / "checkers.md"


# ---------------------------------------------------------------- the peers

# What `check_rule` is told, and its peers have no word for.
_OPTIONS = (
    *("reference", "nonlinear", "nondifferentiable", "order", "at", "max_residual_bytes"),
)


def _of_what_moves(fn, args, options):
    """The function and its arguments, without the arguments that are not to be perturbed."""
    kwargs = {name: value for name, value in options.items() if name not in _OPTIONS}
    n_fixed = len(options.get("nondifferentiable", ()))  # the last arguments, in all cases
    moving, fixed = args[: len(args) - n_fixed], args[len(args) - n_fixed :]
    return lambda *moving: fn(*moving, *fixed, **kwargs), moving


def _modes(fn, args) -> tuple[str, ...]:
    """A `jax.custom_vjp` has no forward mode, and says so."""
    try:
        jax.jvp(fn, tuple(args), tuple(args))
    except TypeError as error:
        if "forward-mode" in str(error):
            return ("rev",)
    except Exception:  # is for the checker to report
        pass
    return ("fwd", "rev")


def _with_modes(check):
    """For JAX's checker, and Chex's, which has the same arguments."""

    def run(fn, args, options):
        fn, args = _of_what_moves(fn, args, options)
        check()(fn, args, order=options.get("order", 2), modes=_modes(fn, args))

    return run


jax_check_grads = _with_modes(lambda: jax.test_util.check_grads)
chex_assert_numerical_grads = _with_modes(
    lambda: importlib.import_module("chex").assert_numerical_grads
)


# `torch.autograd.gradcheck` tests a `torch.autograd.Function`. This one calls JAX by way of
# NumPy in `forward`, `backward` and `jvp`, and its backward pass is such a function again.

_SMALL = 100  # entries; above, PyTorch's fast mode, as the slow one takes a call per entry


def torch_gradcheck(fn, args, options):
    torch = importlib.import_module("torch")
    fn, args = _of_what_moves(fn, args, options)
    leaves, treedef = jax.tree.flatten(args)
    leaves = [jnp.asarray(x) if isinstance(x, float) else x for x in leaves]
    places = [i for i, x in enumerate(leaves) if eqx.is_inexact_array(x)]

    def of_leaves(*moving):
        out = fn(*jax.tree.unflatten(treedef, _replaced(leaves, places, moving)))
        return [x for x in jax.tree.leaves(out) if eqx.is_inexact_array(x)]

    function = _torch_function(torch)
    # A copy, as the memory of JAX's arrays must not be written.
    inputs = tuple(torch.from_numpy(np.array(leaves[i])).requires_grad_() for i in places)
    apply = lambda *inputs: function.apply(of_leaves, *inputs)
    strict = {
        "fast_mode": sum(x.numel() for x in inputs) > _SMALL,
        "check_forward_ad": "fwd" in _modes(of_leaves, [leaves[i] for i in places]),
    }
    torch.autograd.gradcheck(apply, inputs, **strict)
    with warnings.catch_warnings():
        # It warns of outputs that do not depend on an input, as is so for linear rules.
        warnings.simplefilter("ignore")
        torch.autograd.gradgradcheck(apply, inputs, fast_mode=strict["fast_mode"])


def _torch_function(torch):
    to_jax = lambda x: jnp.asarray(x.detach().numpy())
    to_torch = lambda x: torch.from_numpy(np.array(x))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, fn, *inputs):
            ctx.fn = fn
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)
            ctx.set_materialize_grads(False)
            return tuple(to_torch(x) for x in fn(*map(to_jax, inputs)))

        @staticmethod
        def backward(ctx, *cts):
            fn, n = ctx.fn, len(ctx.saved_tensors)
            used = [i for i, ct in enumerate(cts) if ct is not None]
            if not used:
                return (None,) * (n + 1)

            def pull_back(*args):
                # PyTorch's gradient of a complex number is the conjugate of JAX's.
                of_used = lambda *xs: [fn(*xs)[i] for i in used]
                out = jax.vjp(of_used, *args[:n])[1]([jnp.conj(ct) for ct in args[n:]])
                return [jnp.conj(ct) for ct in out]

            given = [cts[i] for i in used]
            return None, *Function.apply(pull_back, *ctx.saved_tensors, *given)

        @staticmethod
        def jvp(ctx, _, *ts):
            xs = [to_jax(x) for x in ctx.saved_tensors]
            live = [i for i, t in enumerate(ts) if t is not None]
            of_live = lambda *moved: ctx.fn(*_replaced(xs, live, moved))
            out = jax.jvp(of_live, [xs[i] for i in live], [to_jax(ts[i]) for i in live])
            return tuple(to_torch(x) for x in out[1])

    return Function


def _replaced(xs, places, values):
    full = list(xs)
    for i, x in zip(places, values, strict=True):
        full[i] = x
    return full


class Peer(NamedTuple):
    """A checker, `check(fn, args, options)`, which raises if it rejects the rule."""

    name: str
    module: str
    precision: str
    check: Callable[..., None]

    @property
    def why_not(self) -> str:
        """Empty if it can be had here."""
        try:
            importlib.import_module(self.module)
        except ImportError:
            return f"{self.module} is not installed"
        return ""


_NAMES = {
    "jax.test_util.check_grads": (jax_check_grads, ("float32", "float64")),
    "chex.assert_numerical_grads": (chex_assert_numerical_grads, ("float32", "float64")),
    "torch.autograd.gradcheck": (torch_gradcheck, ("float64",)),
}
PEERS = [
    Peer(name, name.partition(".")[0], precision, check)
    for name, (check, precisions) in _NAMES.items()
    for precision in precisions
]


CAUGHT, MISSED = "caught", "missed"
CANNOT_RUN, ACCUSES = "cannot run", "rejects the right one too"


def verdict(peer: Peer, fault: Any) -> str:
    """Of one checker about one fault, at the arguments and at the edge points.

    A fault is caught if the faulty rule is rejected and its right twin is not. A twin that is
    rejected with anything but the failure of an assertion could not be run.
    """
    with jax.enable_x64(peer.precision == "float64"):
        n_points = 1 + len(fault.make()[2].get("at", ()))
        verdicts = [_verdict_at(point, peer.check, fault) for point in range(n_points)]
    return min(verdicts, key=[CAUGHT, MISSED, ACCUSES, CANNOT_RUN].index)


def _verdict_at(point: int, check, fault) -> str:
    of_right = _rejects(check, *_case_at(point, fault.right()))
    if of_right is None:
        of_wrong = _rejects(check, *_case_at(point, fault.make()))
        return MISSED if of_wrong is None else CAUGHT
    return ACCUSES if isinstance(of_right, AssertionError) else CANNOT_RUN


def _case_at(point: int, case):
    fn, args, options = case
    return fn, [args, *options.get("at", ())][point], options


def _rejects(check, fn, args: Sequence[Any], options) -> Exception | None:
    try:
        check(fn, args, options)
    except Exception as error:
        if type(error).__name__ == "GradcheckError":  # a `RuntimeError`
            return AssertionError(str(error))
        return error
    return None


# ---------------------------------------------------------------- the table


def table(rows, columns, totals) -> str:
    lines = ["| fault | " + " | ".join(columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    lines += [f"| {name} | " + " | ".join(row) + " |" for name, row in [*totals, *rows]]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few faults, for the tests")
    parser.add_argument("--write", action="store_true", help=f"save the table as {TABLE.name}")
    parser.add_argument("--check", help="only the faults that this check should catch")
    options = parser.parse_args()

    sys.path.insert(0, str(ROOT))

    import eqx_grads.testing as eqgt
    from tests.faults import FAULTS

    def ours(fn, args, options):
        eqgt.check_rule(fn, *args, **options)

    us = Peer("eqx_grads.testing.check_rule", "eqx_grads", "float32", ours)
    checkers = {"`check_rule`, float32": us}
    for peer in PEERS:
        if peer.why_not:
            print(f"{peer.name}: left out, {peer.why_not}")
        else:
            checkers[f"`{peer.name}`, {peer.precision}"] = peer
    faults = {
        name: fault
        for name, fault in FAULTS.items()
        if (name in QUICK or not options.quick) and options.check in (None, fault.check)
    }
    rows, seconds = [], collections.defaultdict(float)
    counts = {name: collections.Counter() for name in checkers}
    for fault_name, fault in sorted(faults.items(), key=lambda item: item[1].check):
        row = []
        for name, peer in checkers.items():
            start = time.perf_counter()
            said = verdict(peer, fault)
            seconds[name] += time.perf_counter() - start
            counts[name][said] += 1
            row.append(said)
        print(f"{fault.check}: {fault_name}: {row}", file=sys.stderr, flush=True)
        words = fault_name.replace("_", " ")
        rows.append((f"{fault.check}: {words}", row))
    caught = [f"**{counts[name][CAUGHT]}**" for name in checkers]
    spent = [f"{seconds[name]:.0f}" for name in checkers]
    totals = [(f"**caught, of {len(faults)}**", caught), ("seconds, in all", spent)]
    text = table(rows, checkers, totals)
    print(text)
    if options.write:
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
