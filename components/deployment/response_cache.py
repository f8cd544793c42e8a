"""Triton's response cache: the flags that give a server one.

Joins whoever starts a Triton (this machine's demo, the cluster's overlay). A model answers from the cache only if its
configuration says so too (`triton_config`). What has to be known before turning it on:

The key is one 64-bit hash of the model's name, the version that answers, and the names and bytes of the inputs; no
weights. So an answer never comes from another version, and a version number must never be given to other weights: the
cache would go on answering with the old ones, also after an unload and a load. Deployment gives no number twice.
Hashing takes about 2 ns a byte of every request, and the server's own `nv_cache_*` times leave it out.
"""

from __future__ import annotations

from components.runtime.errors import ContractError

MIN_LOCAL_BYTES = 1024
"""The server's allocator cannot keep its books in less, and the server ends."""
REDIS_TIMEOUT_MILLISECONDS = 100
"""For a connection and for an answer; Redis's client library would wait for ever, and a miss costs less than this."""


def local_cache_flags(num_bytes: int) -> list[str]:
    """Flags of a cache in the server's own memory, which starts empty and evicts what was used longest ago.

    Raises:
        ContractError: `num_bytes` is below `MIN_LOCAL_BYTES`.

    >>> local_cache_flags(1 << 20)
    ['--cache-config=local,size=1048576']
    """
    if num_bytes < MIN_LOCAL_BYTES:
        raise ContractError(f"response cache has {num_bytes} bytes, expected at least {MIN_LOCAL_BYTES}")
    return [f"--cache-config=local,size={num_bytes}"]


def redis_cache_flags(host: str, port: int = 6379) -> list[str]:
    """Flags of a cache in Redis, which all replicas share and which outlives them.

    One Redis for one model store: another store counts its versions from 1 too, and its answers have the same keys.
    Entries never expire, so Redis needs a `maxmemory` and an evicting policy; a server that cannot reach it does not
    start. A password comes by the environment (`TRITONCACHE_REDIS_PASSWORD`), never by a flag.

    Triton's images hold this cache; the server wheel of a laptop does not and ends with "unable to find
    'libtritoncache_redis.so'", so all this is from Triton's documentation and source and was not run.

    Raises:
        ContractError: there is no host, or the port is none.

    >>> redis_cache_flags("redis")[:2]
    ['--cache-config=redis,host=redis', '--cache-config=redis,port=6379']
    """
    if not host or "," in host or "/" in host:
        raise ContractError(f"redis host is {host!r}, expected a host name")
    if not 0 < port < 65536:
        raise ContractError(f"redis port is {port}, expected one in 1..65535")
    settings = {
        "host": host,
        "port": port,
        "connect_timeout": REDIS_TIMEOUT_MILLISECONDS,
        "socket_timeout": REDIS_TIMEOUT_MILLISECONDS,
    }
    return [f"--cache-config=redis,{name}={value}" for name, value in settings.items()]
