"""Start the processes of a program on this machine, as a cluster would start them on many."""

import os
import signal
import socket
import subprocess
import sys
import time


def launch(program, processes, resume):
    """Run `program` (a list of arguments) in this many processes, each with a CPU device of its
    own. If one fails, stop the others, and exit."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, *program, "--worker", "--coordinator", coordinator]
    command += ["--processes", processes, "--process"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    start = lambda i: subprocess.Popen([*map(str, command), str(i)], env=env)
    workers = [start(i) for i in range(processes)]
    try:
        while None in (codes := [w.poll() for w in workers]) and not any(codes):
            time.sleep(0.05)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    name = lambda code: signal.Signals(-code).name if code < 0 else f"status {code}"
    if ended := [f"process {i} ended with {name(c)}" for i, c in enumerate(codes) if c]:
        sys.exit(
            f"Of {processes} processes, {' and '.join(ended)}; the others were stopped. "
            f"The same command goes on from the last checkpoint in {resume}."
        )
