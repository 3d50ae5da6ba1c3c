"""The checks, in order. What runs on a GPU alone says why it cannot run elsewhere."""

from bench.gpu import graphs, handover, kernels, rates, transports
from bench.gpu.report import Check

_RATE = "a rate of the device needs a device"
_SHARE = "a share of a device's rate needs a device"

CHECKS = (
    Check("attention", kernels.check_attention),
    Check("small_kernels", kernels.check_small_kernels),
    Check("block_copies", kernels.check_block_copies),
    Check("sampling", kernels.check_sampling),
    Check("large_pool", kernels.check_large_pool),
    Check("graph_control", graphs.check_graph_control),
    Check("cuda_ipc", transports.check_cuda_ipc),
    Check("nccl_control", transports.check_nccl_control, over_stand_in=True),
    Check("nccl", transports.check_nccl),
    Check("device_rates", rates.check_device_rates, _RATE),
    Check("decode_attention_rate", rates.check_decode_attention, _SHARE),
    Check("prefill_attention_rate", rates.check_prefill_attention, _SHARE),
    Check("decode_step", graphs.check_decode_steps, _SHARE),
    Check("handover", handover.check_handover),
)
