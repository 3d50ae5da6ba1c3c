"""What no code of ours may do, and what may be installed (V1, V2, V19, V24, F20)."""

import re
import tomllib

import pytest
from faults.forbidden import ROOT, main, violations


@pytest.mark.fault("V1", "V2", "V13", "F20")
def test_no_package_does_what_is_forbidden(capsys: pytest.CaptureFixture[str]) -> None:
    status = main()
    assert status == 0, capsys.readouterr().err


@pytest.mark.fault("V1")
@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "import torch.multiprocessing, cloudpickle",
        "eval('1')",
        "torch.load(path)",
        "yaml.load(text)",
        "key = hash((1, 2))",
        "socket.recv_pyobj()",
        "subprocess.run(command, shell=True)",
        "AutoConfig.from_pretrained(name, trust_remote_code=True)",
        "np.load(path, allow_pickle=flag)",
        "deadline = time.time() + 5",
    ],
)
def test_the_gate_sees_it(source: str) -> None:
    """The negative twin."""
    assert list(violations("common/anything.py", source))


@pytest.mark.fault("V24")
def test_every_dependency_is_pinned_to_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(name for extra in optional for name in extra)]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    pinned = {_name(name) for name in pins}
    # Stubs of types run nothing.
    missing = {_name(line) for line in wanted} - pinned
    assert {name for name in missing if not name.startswith("types-")} == set()


@pytest.mark.fault("V24")
def test_there_is_one_index() -> None:
    """A second one could give any of our names another content."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run"):
        assert "index-url" not in (ROOT / name).read_text()


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement)[0].lower().replace("_", "-")


@pytest.mark.fault("V19")
def test_protobuf_is_the_one_in_c() -> None:
    """Its limits on nesting do not hold in the one in Python (CVE-2025-4565)."""
    from google.protobuf.internal import api_implementation

    assert api_implementation.Type() == "upb"
