"""One thread for torch, set before it is imported: tests and their workers share the cores."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
