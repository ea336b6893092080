"""Step times on a thin wire: hosts in network namespaces, joined by links of a given rate (Linux).

    sudo python -m benchmarks.thin_wire                       # 10, 1 and 0.1 Gbit/s, 4 hosts
    sudo python -m benchmarks.thin_wire --gbit 1 --ranks 2 --json
    sudo python -m benchmarks.thin_wire --plan 30             # plans beside measured steps

Each rank runs in a network namespace of its own, whose only link (a veth pair with a token bucket
at both ends) leads to a bridge in another namespace. The host's network is not touched, and
deleting the namespaces removes everything. It needs root, `ip` and `tc`, and fails with a message
without them.

Measurements are printed on the error output; if it is interrupted it shows the complete rates.

A step is forward, backward with DistributedDataParallel, the preconditioner and SGD. In rows with
`local` the preconditioner averages gradients instead of DistributedDataParallel. `median` is over
steps that take statistics and do not solve; `mean` is over whole cycles, solves included. If every
step takes statistics, all steps of a cycle but the first and the last are alike: `--between` is the
number of them that run between two solves, and the others count like these. Bytes are one rank's in
one step, a mean over cycles: `curvature` in soframe's collectives, `sent` all bytes that left the
rank's link, gradients and TCP included.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
KEYS = ("width", "layers", "batch", "statistics_every", "solve_every", "between", "cycles", "plan")
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


# -- the network -----------------------------------------------------------------------------


def why_not() -> str | None:
    """Return the reason why this machine cannot run it; None if it can."""
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
    """Namespaces, one per rank, with addresses 10.77.0.1 and up; always removed at the end."""
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


def run_on(
    hosts: Sequence[str], words: Sequence[str], tell: Callable[[str, dict[str, float]], None]
) -> dict[str, Any]:
    """Run a worker in each namespace, report the first one's results, and return them.

    Args:
        hosts: The namespaces.
        words: Arguments of Python; those that follow name the file of results.
        tell: Called with each result.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:
        answer = Path(folder) / "answer.json"
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
                command = ["ip", "netns", "exec", host, sys.executable, *words]
                command += ["--worker", str(answer)]
                processes.append(subprocess.Popen(command, env=environment))
            told: set[str] = set()
            running = True
            while running:
                running = any(process.poll() is None for process in processes)
                for name, row in read(answer).items():
                    if name not in told:
                        tell(name, row)
                    told.add(name)
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
        return read(answer)


def publish(found: dict[str, Any], answer: Path) -> None:
    """Write the first worker's measurements so far, at once."""
    part = answer.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.replace(answer)


def read(answer: Path) -> dict[str, Any]:
    """Return the first worker's measurements so far."""
    found: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
    return found


# -- a worker --------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    # NOTE: Its functions keep the default group of the moment when they are imported, if only by
    # torch's compiler. Then destroying the group does not end its threads, and one that still lets
    # go of a tensor while the interpreter ends aborts the process.
    import torch.distributed.nn.functional  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found, answer = {}, Path(options.worker)
    planned = plan(options) if options.plan else {}
    for name in options.strategies:
        found[name] = measure(name, options)
        if name in planned:
            found[name]["planned_ms"] = 1e3 * planned[name]
        if dist.get_rank() == 0:
            publish(found, answer)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # models in cycles hold the group, too


def plan(options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a step of each strategy, planned from what these hosts measure."""
    import torch
    from torch import nn

    from soframe.comm import TorchDistributed
    from soframe.planning import Option, Task
    from soframe.planning import plan as price
    from soframe.planning.measure import measure as measured
    from soframe.strategies import CommOpt, HybridOpt, MemOpt, OwnerLocal, Sharded

    strategies = {
        "comm-opt": CommOpt(),
        "hybrid-opt": HybridOpt(),
        "mem-opt": MemOpt(),
        "sharded": Sharded(),
        "sharded, deferred": Sharded(deferred=True),
        "owner-local": OwnerLocal(),
    }
    layers = [m for _ in range(options.layers) for m in (_linear(options.width), nn.Tanh())]
    task = Task.of(nn.Sequential(*layers), (torch.empty(options.batch, options.width),))
    backend = TorchDistributed()
    sides = [options.width, options.width + 1]
    hardware = measured("cpu", backend=backend, sides=sides, budget=options.plan)
    found = {}
    for name in set(options.strategies) - {DDP_ALONE}:
        option = Option(
            strategies[name.removesuffix(", local")],
            local=name.endswith("local") and "," in name,
            statistics_every=options.statistics_every,
            solve_every=options.solve_every,
        )
        made = price(task, ranks=backend.world_size, hardware=hardware, options=[option])
        found[name] = made.rows[0].timing.mean
    return found


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
    # Where every step takes statistics, one between solves is like the other.
    left_out = 0
    if options.statistics_every == 1:
        left_out = max(0, options.solve_every - 1 - options.between)
    interval = options.solve_every - left_out
    own = None
    if name != DDP_ALONE:
        own = soframe.Preconditioner(
            model,
            strategy=Sharded(deferred=True) if "deferred" in how else strategy,
            distribution=soframe.Distribution(gradients="local" if local else "averaged"),
            optimizer=optimizer,
            statistics_every=options.statistics_every,
            solve_every=interval,
        )
    torch.manual_seed(dist.get_rank())
    steps = []
    for _ in range(1 + options.cycles * interval):
        before = _carried(own)
        x = torch.randn(options.batch, options.width)
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if own is not None:
            own.step()
        optimizer.step()
        seconds = time.perf_counter() - start
        after = _carried(own)
        steps.append((seconds, *(b - a for a, b in zip(before, after, strict=True))))
    if own is not None:
        own.close()
    del steps[0]  # it warms up, and solves
    between = [
        row[0]
        for step, row in enumerate(steps, 1)
        if step % interval and step % options.statistics_every == 0
    ]
    means = over_cycles(steps, interval, left_out)
    return {
        "median_ms": 1e3 * statistics.median(between or [row[0] for row in steps]),
        "mean_ms": 1e3 * means[0],
        "curvature_mb": means[1] / 1e6,
        "sent_mb": means[2] / 1e6,
    }


def over_cycles(rows: Sequence[Sequence[float]], interval: int, left_out: int) -> list[float]:
    """Return the mean of each column over whole cycles, in which some steps were left out.

    A transfer still under way at the end of a step counts in the next one. So steps left out are
    like the others between solves but the first, which has none before it.
    """
    means = []
    for column in zip(*rows, strict=True):
        total = 0.0
        for start in range(0, len(column), interval):
            cycle = column[start : start + interval]
            like = cycle[1:-1] or cycle[:1]
            total += sum(cycle) + left_out * statistics.mean(like)
        means.append(total / (len(rows) // interval * (interval + left_out)))
    return means


def _linear(width: int) -> Any:
    from torch import nn

    return nn.Linear(width, width)


def _carried(own: Any) -> tuple[int, int]:
    carried = 0 if own is None else own.traffic()["total"]["bytes"]
    return carried, int(SENT.read_text())


# -- the answer ------------------------------------------------------------------------------


def show(found: dict[str, dict[str, dict[str, float]]], title: str) -> None:
    from experiments import display

    with_plan = any("planned_ms" in row for own in found.values() for row in own.values())
    keys = ["median_ms", "mean_ms", *["planned_ms"] * with_plan]
    columns, rows = ["strategy"], []
    for gbit in found:
        columns += [f"{gbit} Gbit/s\nmedian ms", "\nmean ms", *["\nplanned"] * with_plan]
    columns += ["curvature\nMB", "sent\nMB"]
    for name, last in list(found.values())[-1].items():
        times = [
            f"{own[name][key]:.0f}" if key in own[name] else "-"
            for own in found.values()
            for key in keys
        ]
        rows.append([name, *times, f"{last['curvature_mb']:.2f}", f"{last['sent_mb']:.2f}"])
    display.console(width=120).print(display.table(title, columns, rows))


def main() -> int:
    parser = argparse.ArgumentParser(description="Step times of every strategy on a thin wire.")
    parser.add_argument("--gbit", type=float, nargs="+", default=[10.0, 1.0, 0.1])
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 3, 4))
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--statistics-every", type=int, default=1)
    parser.add_argument("--solve-every", type=int, default=10)
    parser.add_argument("--between", type=int, default=4, help="steps run between two solves")
    parser.add_argument("--cycles", type=int, default=1, help="of solves, measured")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument(
        "--plan", type=float, default=0, help="seconds in which hosts measure, to plan steps"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.between < 1:
        parser.error("--between must be at least 1")
    if options.worker:
        work(options)
        return 0
    if reason := why_not():
        print(f"thin_wire: skipped, {reason}", file=sys.stderr)
        return 0
    # So that a terminated process cleans up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # ignored where started with "&"
    remove_leftovers()
    words = [str(Path(__file__).resolve())]
    for key in KEYS:
        words += [f"--{key.replace('_', '-')}", str(getattr(options, key))]
    words += ["--strategies", *options.strategies]
    found: dict[str, dict[str, dict[str, float]]] = {}
    try:
        for gbit in options.gbit:
            tell = functools.partial(say, f"{gbit:g} Gbit/s")
            with network(options.ranks, gbit) as hosts:
                found[f"{gbit:g}"] = run_on(hosts, words, tell)
    finally:  # also of a terminated run: complete measurements are not lost
        if options.json:
            print(json.dumps(found, indent=2))
        elif found:
            show(
                found,
                f"{options.layers} x {options.width}, {options.ranks} hosts, batch "
                f"{options.batch} each, statistics every {options.statistics_every}, "
                f"solves every {options.solve_every}",
            )
    return 0


def say(where: str, name: str, row: dict[str, float]) -> None:
    text = f"{where}, {name}: median {row['median_ms']:.0f} ms, mean {row['mean_ms']:.0f} ms"
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
