"""Workers by fork, for the soak: a process that has imported everything forks one for each request,
in a tenth of the time that a new interpreter takes. From then on it is a worker like any other.

As a program it reads one line of JSON a worker, ``{"argv", "out", "log"}``, and answers with its
pid. It has no threads, channels or loops of its own, so that there is nothing a fork could break.
Dead workers stay zombies until it ends: no pid is ever another process' meanwhile.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path

import psutil
from support.cluster import REPOSITORY, START_S, Cluster, Process


class Zygote:
    """Makes workers of one role that join ``cluster``."""

    def __init__(self, cluster: Cluster, role: str, process: asyncio.subprocess.Process) -> None:
        self._cluster = cluster
        self._process = process
        model = psutil.Process(cluster.of_role(role)[0].pid)
        self._argv = model.cmdline()[3:]
        self._folder = cluster.log.parent
        self._role = role
        self._numbers = count()
        self._pids: list[int] = []

    async def spawn(self, *flags: str) -> Process:
        """One more worker, which all gateways know."""
        number = next(self._numbers)
        out = self._folder / f"forked-{self._role}-{number}.ready"
        order = {"argv": [*self._argv, *flags], "out": str(out), "log": f"{out}.log"}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._pids.append(int(await self._process.stdout.readline()))
        async with asyncio.timeout(START_S):
            while not out.exists() or not (text := out.read_text()).endswith("\n"):
                await asyncio.sleep(0.02)
        ready = json.loads(text)
        del ready["ready"]
        await self._cluster.until_known(ready["id"])
        return Process(**ready)

    def sweep(self, process: Process) -> None:
        """The next worker to start would do it."""
        for pool_file in self._cluster.pool_dir.glob(f"*-{process.id}-*"):
            pool_file.unlink()

    def kill_all(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def zygote(cluster: Cluster, role: str) -> AsyncIterator[Zygote]:
    environment = psutil.Process(cluster.of_role(role)[0].pid).environ()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "faults.zygote", role),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env={**environment, "PYTHONPATH": ".:tests"},
    )
    made = Zygote(cluster, role, process)
    try:
        yield made
    finally:
        made.kill_all()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# ---------------------------------------------------------------- the program


def _main(role: str) -> None:
    import_module(f"{role}_worker.app")
    main: Callable[[], None] = import_module("cli.main").main
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _redirect(0, Path(os.devnull), os.O_RDONLY)
            _redirect(1, Path(order["out"]), os.O_WRONLY | os.O_CREAT)
            _redirect(2, Path(order["log"]), os.O_WRONLY | os.O_CREAT)
            sys.argv = ["baton", *order["argv"]]
            main()
            os._exit(0)
        print(pid, flush=True)


def _redirect(number: int, path: Path, flags: int) -> None:
    opened = os.open(path, flags, 0o600)
    os.dup2(opened, number)
    os.close(opened)


if __name__ == "__main__":
    _main(sys.argv[1])
