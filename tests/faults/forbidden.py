"""What no package may do: turn bytes into code, use `hash()` as a key, read the wall clock.

Part of `make check`: `python tests/faults/forbidden.py` prints each place and ends with status 1.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "common", "engine", "kv_transfer", "worker",
    "gateway", "prefill_worker", "decode_worker", "cli",
)  # fmt: skip

# Whatever reads their format runs what its writer wanted.
MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib",
    "jsonpickle", "multiprocessing",
}  # fmt: skip
CALLS = {
    "eval": "runs text",
    "exec": "runs text",
    "compile": "runs text",
    "__import__": "imports by text",
    "hash": "is the same for equal ints in every process: keys are SHA-256",
    "torch.load": "unpickles",
    "torch.save": "pickles",
    "yaml.load": "builds objects: safe_load",
    "yaml.unsafe_load": "builds objects: safe_load",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "time.time": "is the wall clock",
    "datetime.now": "is the wall clock",
    "datetime.utcnow": "is the wall clock",
}
# Methods of sockets and queues that pickle, by name on whatever object.
METHODS = {"send_pyobj", "recv_pyobj", "send_object", "recv_object", "send_obj", "recv_obj"}
KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}
# Where the date itself is wanted: OpenAI's `created`, and `strftime_now` of chat templates.
ALLOWED = {
    ("gateway/http/server.py", "time.time"),
    ("gateway/http/generate.py", "time.time"),
    ("gateway/chat_template.py", "datetime.now"),
}


def violations(path: str, source: str) -> Iterator[str]:
    """``path`` relative to the repository."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names):
                if name.partition(".")[0] in MODULES:
                    yield f"{path}:{node.lineno}: imports {name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.partition(".")[0] in MODULES:
                yield f"{path}:{node.lineno}: imports {node.module}"
        elif isinstance(node, ast.Call):
            yield from _call(path, node)


def _call(path: str, node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    if name in CALLS and (path, name) not in ALLOWED:
        yield f"{path}:{node.lineno}: {name}() {CALLS[name]}"
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        yield f"{path}:{node.lineno}: {node.func.attr}() pickles"
    for keyword in node.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
        if keyword.arg in KEYWORDS and not is_off:
            yield f"{path}:{node.lineno}: {keyword.arg} is not False"


def main() -> int:
    found = [
        violation
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for violation in violations(str(path.relative_to(ROOT)), path.read_text())
    ]
    sys.stderr.writelines(f"{violation}\n" for violation in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
