"""The checks, in order. What runs on a GPU alone says why it cannot run elsewhere."""

from importlib import import_module
from importlib.util import find_spec

from bench.gpu import graphs, handover, kernels, rates
from bench.gpu.report import Check, Machine, NotRun, Outcome

# Of the transports themselves: `check(machine) -> Outcome`, where the build has it.
_TRANSPORT_CHECKS = "bench.gpu.transports"
_RATE = "a rate of the device needs a device"
_SHARE = "a share of a device's rate needs a device"


def check_transports(machine: Machine) -> Outcome:
    if find_spec(_TRANSPORT_CHECKS) is None:
        raise NotRun("the checks of cuda_ipc, gloo and nccl are not in this build")
    outcome: Outcome = import_module(_TRANSPORT_CHECKS).check(machine)
    return outcome


CHECKS = (
    Check("attention", kernels.check_attention),
    Check("small_kernels", kernels.check_small_kernels),
    Check("block_copies", kernels.check_block_copies),
    Check("sampling", kernels.check_sampling),
    Check("large_pool", kernels.check_large_pool),
    Check("graph_control", graphs.check_graph_control),
    Check("transports", check_transports),
    Check("device_rates", rates.check_device_rates, _RATE),
    Check("decode_attention_rate", rates.check_decode_attention, _SHARE),
    Check("prefill_attention_rate", rates.check_prefill_attention, _SHARE),
    Check("decode_step", graphs.check_decode_steps, _SHARE),
    Check("handover", handover.check_handover),
)
