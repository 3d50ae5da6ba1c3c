"""Hand-off over TCP, for workers that share no memory: straight from pool to pool, no staging.

The life of a connection, which serves one claimed lease::

    1. first frame   importer: magic, version, lease id, secret. Anything else, or nothing for a
                     while, and the exporter hangs up without a word.
    2. answer        exporter: number of claimed blocks, bytes of a block
    3. ask           importer: first and number of positions in the claim's order, any number of
                     times; what reaches out of the claim is hung up on
    4. blocks        exporter: their bytes as they lie in the pool, one after the other

The importer receives into the target block itself and checks it there. Cut off in the middle, it
connects again and asks for what is missing. When the lease ends the exporter hangs up, in the
middle of a block too; nobody could use that copy any more.

On loopback connections are plain. Elsewhere they are under the mutual TLS of all internal links,
or settings say that the network is trusted; else both ends refuse.
"""

from kv_transfer.tcp.exporter import TcpExporter
from kv_transfer.tcp.importer import TcpImporter

__all__ = ["TcpExporter", "TcpImporter"]
