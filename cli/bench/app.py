"""`baton bench ...`: its commands."""

import typer

from cli.bench.memory import memory
from cli.bench.roofline import roofline
from cli.bench.serve import serve
from cli.bench.sweep import sweep

app = typer.Typer(no_args_is_help=True, help="Measure: latency, throughput, goodput, memory.")
for command in (serve, sweep, memory, roofline):
    app.command()(command)
