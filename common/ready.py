"""What a process does on its way to being ready, and once it is."""

import gc
import json
import os
import sys

# Objects that a process makes before the youngest are looked through for garbage. A step of 256
# rows makes 2,000, nearly none of them in cycles; Python's own 700 costs a tenth of the step's
# overhead.
_YOUNG_OBJECTS = 50_000


def make_collections_rare() -> None:
    """To be called before what takes long to import: little of that is garbage, and looking through
    it for some costs a twelfth of a worker's start."""
    gc.set_threshold(_YOUNG_OBJECTS)


def make_collections_short() -> None:
    """What start-up made lives as long as the process, so collections leave it out from now on:
    each would look through all of it, and no token moves meanwhile (50 to 150 ms)."""
    gc.collect()
    gc.freeze()


def announce(instance_id: str, role: str, grpc: str, admin: str, http: str = "") -> None:
    """Prints the one line on stdout that says so. ``http`` is a gateway's."""
    make_collections_short()
    line = {
        "ready": True,
        "id": instance_id,
        "role": role,
        "grpc": grpc,
        "admin": admin,
        "http": http,
        "pid": os.getpid(),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
