"""Kernels for a CPU, compiled by numba (the extra ``cpu``).

The life of a weight: quantised and packed into panels (packing.py), multiplied by a few or many
rows (products.py), inside the one compiled function of a step (forward.py), by a team of threads
that share its items of work (team.py, sync.py). simd.py has the instructions that numba lacks.
"""
