"""Hand-off by torch.distributed, point to point: `gloo` in host memory, `nccl` from GPU to GPU.

The exporter pushes here, so both ends must enter each transfer together and in the same order. What
brings them together is the *bell*: one TCP connection from the importer to the exporter for each
pair of workers, on which every transfer is asked for. The life of a pair::

    1. ask      importer: magic, lease id, secret. Who has no proof within a while is hung up on.
    2. answer   exporter: blocks of the claim, bytes of a block; the first time also the port and
                the name of a TCPStore in which the two ends of the group find each other
    3. blocks   exporter sends, importer receives, all blocks of the claim in its order
    4. done     exporter: one byte; from here on it touches those blocks no more. Then 1. again.

A group cannot be repaired, so whoever has any trouble (a block that fails its check, a lease that
ended, a silence) hangs up and aborts the group, and the next transfer makes a new pair. A peer that
was killed hangs up by itself, one that stands still is given up after `STALL_S`.

The group's own connections know no proof and no encryption: off loopback both ends refuse unless
settings say that the network is trusted.
"""

from kv_transfer.dist.exporter import GlooExporter, NcclExporter
from kv_transfer.dist.importer import GlooImporter, NcclImporter

__all__ = ["GlooExporter", "GlooImporter", "NcclExporter", "NcclImporter"]
