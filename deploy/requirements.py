"""What the image must hold, read from pyproject.toml; standard library alone.

requirements.py build          packages to install, one a line, to make our own wheel
requirements.py torch          torch alone, which has a layer of its own
requirements.py run [EXTRAS]   all that serving needs, with these extras, commas between them
requirements.py check-torch X  fails unless the installed torch is the build X: cpu or cuda
"""

import runpy
import sys
import sysconfig
import tomllib
from pathlib import Path


def requirements(kind: str, extras: str = "") -> list[str]:
    """Raises KeyError for an extra that there is not."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    if kind == "build":
        return list(project["build-system"]["requires"])
    names: list[str] = project["project"]["dependencies"]
    if kind == "torch":
        return [name for name in names if name.startswith("torch>")]
    optional: dict[str, list[str]] = project["project"]["optional-dependencies"]
    return names + [name for extra in filter(None, extras.split(",")) for name in optional[extra]]


def check_torch(wanted: str) -> str:
    """What is wrong, or nothing. Reads torch's version file: torch takes seconds to import."""
    if wanted not in ("cpu", "cuda"):
        return f"TORCH: must be cpu or cuda, not {wanted!r}"
    version_file = Path(sysconfig.get_path("purelib")) / "torch" / "version.py"
    found = "cuda" if runpy.run_path(str(version_file)).get("cuda") else "cpu"
    if found == wanted:
        return ""
    return f"TORCH: pip found the {found} build, not {wanted}; PIP_OPTIONS tell it where to look"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["check-torch"]:
        problem = check_torch(*arguments[1:2])
        sys.stderr.write(problem and f"error: {problem}\n")
        return 1 if problem else 0
    sys.stdout.write("".join(f"{name}\n" for name in requirements(*arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
