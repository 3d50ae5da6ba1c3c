"""API keys: who may ask, and as which tenant.

The file (mode 0600) is YAML, and so JSON will do: a list of entries, or nothing but keys, one a
line, each of which is a tenant of its own::

    - key: sk-3f9c...              # 16 to 256 characters of A-Z a-z 0-9 . _ ~ + / = -
      tenant: research             # shares prefixes and limits with equal names
      max_concurrent_requests: 32  # optional, as is the next
      max_queued_tokens: 100000

A tenant's cached prefixes are its own (docs/design.md, section 4): the tenant comes from the key,
never from the request. Keys are kept, and looked for, as digests under a secret of this process:
how long a search takes says nothing of any key, and is the same for one as for ten thousand.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from common.config import read_secret
from common.errors import ConfigError, Unauthenticated

_SETTING = "api_key_file"
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None: no limit but the gateway's own."""

    max_concurrent_requests: int | None = None
    max_queued_tokens: int | None = None


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    key: str = Field(pattern=r"^[A-Za-z0-9._~+/=-]{16,256}$")
    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    max_concurrent_requests: int | None = Field(None, ge=1)
    max_queued_tokens: int | None = Field(None, ge=1)


_ENTRIES = TypeAdapter(Annotated[list[_Entry], Field(min_length=1, max_length=10_000)])


class ApiKeys:
    """``tenants`` by the digests of their keys. Without any, everybody may ask, as ``""``."""

    def __init__(self, tenants: Mapping[bytes, str], limits: Mapping[str, TenantLimits]) -> None:
        self._secret = secrets.token_bytes(32)
        self._tenants = {self._blinded(digest): tenant for digest, tenant in tenants.items()}
        self.limits = dict(limits)

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def max_queued_tokens(self) -> dict[str, int]:
        """Of the tenants that have such a limit."""
        given = {tenant: limits.max_queued_tokens for tenant, limits in self.limits.items()}
        return {tenant: limit for tenant, limit in given.items() if limit is not None}

    def tenant(self, authorization: str) -> str:
        """The tenant of an ``Authorization`` header. Raises Unauthenticated."""
        if not self._tenants:
            return ""
        given = authorization[len(_SCHEME) :] if authorization.lower().startswith(_SCHEME) else ""
        tenant = self._tenants.get(self._blinded(_digest(given.strip())))
        if tenant is None:
            raise Unauthenticated("this needs an API key: `Authorization: Bearer KEY`")
        return tenant

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def load_api_keys(path: Path | None) -> ApiKeys:
    """Raises ConfigError that names the entry and never shows a key."""
    if path is None:
        return ApiKeys({}, {})
    entries = _read(path)
    tenants: dict[bytes, str] = {}
    limits: dict[str, TenantLimits] = {}
    for entry in entries:
        digest = _digest(entry.key)
        tenant = entry.tenant or f"key-{digest.hex()[:12]}"
        given = TenantLimits(entry.max_concurrent_requests, entry.max_queued_tokens)
        if digest in tenants:
            raise ConfigError(_SETTING, f"{path} has a key twice, one of tenant {tenant}")
        if limits.setdefault(tenant, given) != given:
            raise ConfigError(_SETTING, f"{path} gives tenant {tenant} two different limits")
        tenants[digest] = tenant
    return ApiKeys(tenants, limits)


def _read(path: Path) -> Sequence[_Entry]:
    try:
        content = yaml.safe_load(read_secret(path, _SETTING))
    except yaml.YAMLError:
        raise ConfigError(_SETTING, f"{path} is neither YAML nor a list of keys") from None
    if isinstance(content, str):
        content = [{"key": key} for key in content.split()]
    try:
        return _ENTRIES.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(_SETTING, f"{path}: {where}: {first['msg']}") from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
