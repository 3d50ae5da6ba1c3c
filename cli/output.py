"""What all commands print alike."""

import json
import sys
from typing import Any


def print_json(content: Any) -> None:
    """One line on stdout, at once; with --json, nothing else goes there."""
    sys.stdout.write(json.dumps(content, ensure_ascii=False) + "\n")
    sys.stdout.flush()
