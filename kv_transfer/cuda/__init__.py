"""KV pools on a GPU: their memory, its hand-off by CUDA IPC, and the two-rank groups of NCCL.

`Device` is all that transports know of CUDA, so that the same code runs against a device that
tests bring (tests/kv_transfer/fake_device.py), which checks what hardware would punish.
"""
