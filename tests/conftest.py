"""What holds for the whole suite."""

import os

# Set before torch is imported anywhere: tests and the workers that they start share the cores.
os.environ["OMP_NUM_THREADS"] = "1"
