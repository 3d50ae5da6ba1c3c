"""A worker on a GPU: the model is loaded and measured before its pool has a size."""

from dataclasses import dataclass

from common.config import WorkerSettings
from engine.device_setup import DeviceLimits, LoadedModel, load_on_device
from worker.model import ModelFacts

# Tokens a step, unless told otherwise.
STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class OnGpu:
    """``num_blocks`` that sequences can use; the pool has one more, the null block."""

    loaded: LoadedModel
    num_blocks: int


def load_on_gpu(settings: WorkerSettings, model: ModelFacts) -> OnGpu | None:
    """None on a CPU. Raises ConfigError, with the arithmetic where memory does not suffice."""
    if settings.device == "cpu" or model.entry is None:
        return None
    limits = DeviceLimits(
        settings.max_num_batched_tokens or STEP_TOKENS,
        settings.max_num_seqs,
        model.description.max_model_len,
        settings.enforce_eager,
    )
    loaded, memory = load_on_device(
        model.entry.directory, settings.dtype, settings.kernels, settings.block_size, limits
    )
    use = loaded.measure()
    utilization = settings.gpu_memory_utilization
    num_blocks = use.num_blocks(memory, utilization, model.layout.block_bytes) - 1
    return OnGpu(loaded, settings.num_blocks or num_blocks)
