"""Build hook: writes the protobuf and gRPC stubs of proto/ into the package baton/v1/."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs protoc before every build, an editable one too."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        protos = sorted(str(path) for path in (root / "proto").rglob("*.proto"))
        # Both tools come with the build requirements, whose scripts pip puts on the path.
        plugin = shutil.which("protoc-gen-mypy_grpc")
        if plugin is None:
            raise RuntimeError("protoc-gen-mypy_grpc is not on the path; install mypy-protobuf")
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{root / 'proto'}",
            f"--python_out={root}",
            f"--pyi_out={root}",
            f"--grpc_python_out={root}",
            f"--plugin=protoc-gen-mypy_grpc={plugin}",
            f"--mypy_grpc_out=quiet:{root}",
        ]
        subprocess.run([*command, *protos], check=True)
