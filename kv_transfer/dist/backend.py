"""What differs between gloo and nccl: where the pool must lie, and how a group is made."""

from common.errors import ConfigError
from common.tls import is_loopback
from kv_transfer.base import TransportSettings
from kv_transfer.checksum import Hasher, required_hasher
from kv_transfer.dist.group import GlooGroup, PairGroup, Store, c10d
from kv_transfer.memory import PoolMemory, device_without_checksums

GLOO, NCCL = "gloo", "nccl"


class Backend:
    """Raises ConfigError where ``transport`` cannot work with this pool or these settings."""

    def __init__(self, transport: str, pool: PoolMemory, settings: TransportSettings) -> None:
        self.transport = transport
        self._device = pool.device
        self._host = settings.advertise_host
        self.hash: Hasher | None = None
        if transport == GLOO:
            self.hash = required_hasher(pool.layout.checksum, GLOO)
            if not (c10d.is_available() and c10d.is_gloo_available()):
                raise ConfigError("transport", "this build of torch has no gloo")
        else:
            device_without_checksums(pool, transport)
        require_trusted(settings.host, settings.insecure, transport)

    @property
    def device_uuid(self) -> str:
        return self._device.uuid if self._device is not None else ""

    def make_group(self, store: Store, rank: int) -> PairGroup:
        """Blocks until the other end joins too. Raises RuntimeError when it does not in time."""
        if self._device is not None:
            return self._device.make_group(store, rank)
        return GlooGroup(store, rank, self._host)


def require_trusted(host: str, insecure: bool, transport: str) -> None:
    """Raises ConfigError unless ``host`` is loopback or the network was said to be trusted."""
    if not insecure and not is_loopback(host):
        raise ConfigError(
            "insecure_transfer",
            f"KV by {transport} to {host} is not encrypted; give --insecure-transfer if nobody "
            "else can read that network, or --transport tcp with TLS",
        )
