"""Step times on a thin wire: hosts in network namespaces, joined by links of a given rate (Linux).

    sudo python benchmarks/thin_wire.py                       # 10, 1 and 0.1 Gbit/s, 4 hosts
    sudo python benchmarks/thin_wire.py --gbit 1 --ranks 2 --json

Each rank runs in a network namespace of its own, whose only link (a veth pair with a token bucket
at both ends) leads to a bridge in another namespace. Nothing of the host's network is touched, and
deleting the namespaces removes everything. It needs root, `ip` and `tc`, and says so where it
lacks them.

A step is forward, backward with DistributedDataParallel, the preconditioner and SGD. Where it says
`local`, there is no DistributedDataParallel, and the preconditioner averages gradients. `median` is
that of a step that takes statistics and does not solve; `mean` is over whole cycles, solves
included. Bytes are those of one rank in one step, a mean over cycles: `curvature` those that
soframe's collectives carry, `sent` what really left the rank's link, gradients and TCP included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STRATEGIES = (
    "none (DDP alone)",
    "comm-opt",
    "hybrid-opt",
    "mem-opt",
    "sharded",
    "sharded, deferred",
    "owner-local",
    "sharded, local",
    "sharded, deferred, local",
)
DDP_ALONE = STRATEGIES[0]
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


# -- the network -----------------------------------------------------------------------------


def why_not() -> str | None:
    """Why this machine cannot run it; None if it can."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux's network namespaces"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} of iproute2 not found"
    if os.geteuid() != 0:
        return "only root may make network namespaces: run it with sudo"
    probe = f"probe-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return None


def sh(*words: object) -> None:
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def limit(namespace: str, device: str, gbit: float) -> None:
    burst = max(1 << 17, int(gbit * 1e9 / 8 * 0.004))  # bytes: of 4 ms, which a kernel tick is
    sh("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate",
       f"{gbit * 1000:g}mbit", "burst", burst, "latency", "400ms")  # fmt: skip


def remove_leftovers() -> None:
    """Remove the namespaces of runs that were killed before they could."""
    for path in Path("/var/run/netns").glob("wire[0-9]*-*"):
        maker = path.name.removeprefix("wire").split("-")[0]
        if not maker.isdigit() or Path("/proc", maker).exists():
            continue
        told = subprocess.run(
            ["ip", "netns", "pids", path.name], capture_output=True, text=True, check=False
        )
        for process in told.stdout.split():
            os.kill(int(process), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


@contextmanager
def network(ranks: int, gbit: float) -> Iterator[list[str]]:
    """Namespaces, one per rank, with addresses 10.77.0.1 and up; removed whatever happens."""
    name = f"wire{os.getpid()}"
    switch, hosts = f"{name}-switch", [f"{name}-{rank}" for rank in range(ranks)]
    try:
        for namespace in (switch, *hosts):
            sh("ip", "netns", "add", namespace)
        sh("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", switch, "link", "set", "br0", "up")
        for rank, host in enumerate(hosts):
            port = f"port{rank}"
            sh("ip", "-n", switch, "link", "add", port, "type", "veth",
               "peer", "name", "eth0", "netns", host)  # fmt: skip
            sh("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            sh("ip", "-n", host, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                sh("ip", "-n", host, "link", "set", device, "up")
            limit(host, "eth0", gbit)
            limit(switch, port, gbit)
        yield hosts
    finally:
        for namespace in (*hosts, switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def run_on(hosts: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Run the workers, one per namespace; return what the first one found."""
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:
        answer = Path(folder) / "answer.json"
        words = [sys.executable, str(Path(__file__).resolve()), "--worker", str(answer)]
        for key in ("width", "layers", "batch", "statistics_every", "solve_every", "cycles"):
            words += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
        words += ["--strategies", *options.strategies]
        try:
            for rank, host in enumerate(hosts):
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(hosts)),
                    "MASTER_ADDR": "10.77.0.1",
                    "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": "1",
                }
                command = ["ip", "netns", "exec", host, *words]
                processes.append(subprocess.Popen(command, env=environment))
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break  # one failed: the others would wait for it
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            codes = [process.returncode for process in processes]
            raise RuntimeError(f"the workers ended with {codes}")
        found: dict[str, Any] = json.loads(answer.read_text())
    return found


# -- a worker --------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: measure(name, options) for name in options.strategies}
    if dist.get_rank() == 0:
        Path(options.worker).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import soframe
    from soframe.strategies import Sharded

    torch.manual_seed(0)
    layers = [m for _ in range(options.layers) for m in (_linear(options.width), nn.Tanh())]
    strategy, *how = name.split(", ")
    local = "local" in how
    model: nn.Module = nn.Sequential(*layers)
    if not local:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    own = None
    if name != DDP_ALONE:
        own = soframe.Preconditioner(
            model,
            strategy=Sharded(deferred=True) if "deferred" in how else strategy,
            gradients="local" if local else "averaged",
            optimizer=optimizer,
            statistics_every=options.statistics_every,
            solve_every=options.solve_every,
        )
    torch.manual_seed(dist.get_rank())
    seconds, began = [], (0, 0)
    steps = options.cycles * options.solve_every
    for step in range(1 + steps):
        if step == 1:  # the first one warms up, and solves
            began = _carried(own)
        x = torch.randn(options.batch, options.width)
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if own is not None:
            own.step()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    ended = _carried(own)
    if own is not None:
        own.close()
    between = [
        s
        for step, s in enumerate(seconds)
        if step % options.solve_every and step % options.statistics_every == 0
    ]
    return {
        "median_ms": 1e3 * statistics.median(between or seconds[1:]),
        "mean_ms": 1e3 * statistics.mean(seconds[1:]),
        "curvature_mb": (ended[0] - began[0]) / steps / 1e6,
        "sent_mb": (ended[1] - began[1]) / steps / 1e6,
    }


def _linear(width: int) -> Any:
    from torch import nn

    return nn.Linear(width, width)


def _carried(own: Any) -> tuple[int, int]:
    carried = 0 if own is None else own.traffic()["total"]["bytes"]
    return carried, int(SENT.read_text())


# -- the answer ------------------------------------------------------------------------------


def show(found: dict[str, dict[str, dict[str, float]]], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("strategy", no_wrap=True)
    for gbit in found:
        table.add_column(f"{gbit} Gbit/s\nmedian ms", justify="right")
        table.add_column("\nmean ms", justify="right")
    for header in ("curvature\nMB", "sent\nMB"):
        table.add_column(header, justify="right")
    for name, last in list(found.values())[-1].items():
        times = [
            f"{own[name][key]:.0f}" for own in found.values() for key in ("median_ms", "mean_ms")
        ]
        table.add_row(name, *times, f"{last['curvature_mb']:.2f}", f"{last['sent_mb']:.2f}")
    Console(width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description="Step times of every strategy on a thin wire.")
    parser.add_argument("--gbit", type=float, nargs="+", default=[10.0, 1.0, 0.1])
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 3, 4))
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--statistics-every", type=int, default=1)
    parser.add_argument("--solve-every", type=int, default=10)
    parser.add_argument("--cycles", type=int, default=1, help="of solves, measured")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    if reason := why_not():
        print(f"thin_wire: skipped, {reason}", file=sys.stderr)
        return 0
    # So that what is asked to end cleans up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where started with "&"
    remove_leftovers()
    found = {}
    for gbit in options.gbit:
        with network(options.ranks, gbit) as hosts:
            found[f"{gbit:g}"] = run_on(hosts, options)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    show(
        found,
        f"{options.layers} x {options.width}, {options.ranks} hosts, batch {options.batch} each, "
        f"statistics every {options.statistics_every}, solves every {options.solve_every}",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
