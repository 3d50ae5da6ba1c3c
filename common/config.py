"""Every setting of every process: the one place that reads environment, YAML and flags.

A setting comes, first match wins, from a flag, from ``BATON_<NAME>``, from the YAML file named by
``--config`` or ``BATON_CONFIG``, or from the default here. Settings are frozen; what is found out
at start (ports, block counts) lives in other types. Secrets come by file only.
Names are vLLM's where the meaning is the same.
"""

import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from common.config_check import (
    check_environment,
    check_names,
    explain,
    has_nvidia_driver,
    yaml_reason,
)
from common.errors import ConfigError
from common.secret_files import is_exposed
from common.sizes import Bytes
from common.tls import PublicTlsFiles, TlsFiles
from common.types import LocalPrefill, Role

PROTOCOL_VERSION = 1
_DRAFT = "draft="
Quantization = Literal["none", "int8", "int4"]


class ProcessSettings(BaseSettings):
    """What every Baton process needs to find the others."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_", frozen=True, extra="forbid", validate_default=True
    )

    nats_url: str = Field("nats://127.0.0.1:4222", description="where nats-server listens")
    nats_credentials_file: Path | None = Field(
        None, description="JSON file with user and password for NATS; mode 0600"
    )
    token_file: Path | None = Field(
        None, description="file with the run's token, which every internal call carries; mode 0600"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    advertise_host: str | None = Field(None, description="name or address other processes dial")
    tls_cert_file: Path | None = Field(
        None, description="PEM certificate of this process, for all internal links (mutual TLS)"
    )
    tls_key_file: Path | None = Field(None, description="its PEM key; mode 0600")
    tls_ca_file: Path | None = Field(None, description="PEM authority that signed all of them")
    admin_port: int = Field(0, ge=0, le=65535, description="metrics, health, debug; 0 means free")
    otlp_endpoint: str | None = Field(None, description="OTLP/gRPC collector, host:port")
    otlp_token_file: Path | None = Field(
        None, description="file with a bearer token for the collector; mode 0600"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")
    failpoints: str = Field("", description="tests only: name=action@count;...")
    allow_failpoints: bool = Field(False, description="for tests")
    reflection: bool = Field(False, description="serve gRPC reflection")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings)

    @property
    def tls(self) -> TlsFiles | None:
        """Mutual TLS on all internal links, or None: they are plain."""
        cert, key, ca = self.tls_cert_file, self.tls_key_file, self.tls_ca_file
        return TlsFiles(cert, key, ca) if cert and key and ca else None

    @model_validator(mode="after")
    def _tls_files_come_together(self) -> Self:
        num_given = sum(map(bool, (self.tls_cert_file, self.tls_key_file, self.tls_ca_file)))
        if num_given not in (0, 3):
            raise ConfigError("tls_cert_file", "tls_key_file and tls_ca_file go together with it")
        return self

    @model_validator(mode="after")
    def _failpoints_are_for_tests(self) -> Self:
        if self.failpoints and not self.allow_failpoints:
            raise ConfigError("failpoints", "need allow_failpoints; they are for tests")
        return self


class GatewaySettings(ProcessSettings):
    """The front: gRPC (and HTTP) for clients, dispatch to both pools."""

    # One token of NATS subjects.
    gateway_id: str = Field(
        default_factory=lambda: f"gw-{secrets.token_hex(6)}", pattern=r"^[A-Za-z0-9_-]{1,96}$"
    )
    model: str = Field("default", description="prepared model entry (DIR), oracle or null")
    grpc_port: int = Field(50051, ge=0, le=65535, description="public gRPC port; 0 means free")
    http_port: int = Field(
        8000, ge=0, le=65535, description="OpenAI-compatible HTTP port; 0 means free"
    )
    api_key_file: Path | None = Field(
        None, description="keys of those who may ask, with tenants and limits; mode 0600"
    )
    public_tls_cert_file: Path | None = Field(
        None, description="PEM certificate that clients of gRPC and HTTP see"
    )
    public_tls_key_file: Path | None = Field(None, description="its PEM key; mode 0600")
    public_tls_client_ca_file: Path | None = Field(
        None, description="PEM authority that must have signed clients' certificates (mutual TLS)"
    )
    cors_origin: str = Field("", description="origins whose pages may call, commas between them")
    http_max_connections: int = Field(2048, ge=1, description="HTTP connections at the same time")
    http_read_timeout_s: float = Field(
        20.0, gt=0, description="time for a request's headers, and again for its body, to arrive"
    )
    max_message_bytes: Bytes = Field(4 << 20, ge=1 << 16, description="largest public message")
    quantization: Quantization = Field("none", description="of the workers' weights")
    max_model_len: int | None = Field(None, ge=1, description="longest prompt + output")
    max_queued_requests: int = Field(1024, ge=1, description="requests waiting for a worker")
    max_queued_tokens: int = Field(1 << 20, ge=1, description="prompt tokens waiting for a worker")
    max_queued_requests_per_tenant: int = Field(
        512, ge=1, description="of one tenant's, waiting for a worker"
    )
    max_queued_tokens_per_tenant: int = Field(
        1 << 19, ge=1, description="of one tenant's prompts, waiting for a worker"
    )
    routing: Literal["auto", "load", "random"] = Field(
        "auto", description="prefill worker by cached prefix and load, by load alone, at random"
    )
    local_prefill_threshold: int | None = Field(
        None, ge=0, description="compute prompts on decode workers up to so many uncached tokens"
    )
    request_timeout_s: float = Field(600.0, gt=0, le=86400, description="longest life of a request")
    flush_interval_s: float = Field(0.02, ge=0, le=1, description="at most one message a stream in")
    max_attempts: int = Field(3, ge=1, le=100, description="failures before a request is given up")
    worker_timeout_s: float = Field(3.0, gt=0, description="silence after which a peer is dead")
    slow_client_s: float = Field(30.0, gt=0, description="a buffer that does not shrink: cancel")
    drain_budget_s: float = Field(60.0, ge=0, description="time to finish after SIGTERM")
    max_n: int = Field(16, ge=1, le=1024, description="largest n of one request")
    max_logprobs: int = Field(20, ge=0, le=1000, description="largest logprobs of one request")

    @property
    def public_tls(self) -> PublicTlsFiles | None:
        """TLS on the public ports, or None: they are plain."""
        cert, key = self.public_tls_cert_file, self.public_tls_key_file
        return PublicTlsFiles(cert, key, self.public_tls_client_ca_file) if cert and key else None

    @model_validator(mode="after")
    def _public_tls_files_come_together(self) -> Self:
        given = [self.public_tls_cert_file, self.public_tls_key_file]
        if any(given) != all(given) or (self.public_tls_client_ca_file and not all(given)):
            raise ConfigError("public_tls_cert_file", "public_tls_key_file goes together with it")
        return self


class WorkerSettings(ProcessSettings):
    """What prefill and decode workers share."""

    worker_id: str | None = Field(None, description="default: role, host and a start nonce")
    model: str = Field("default", description="prepared model entry (DIR), oracle or null")
    port: int = Field(0, ge=0, le=65535, description="internal gRPC port; 0 means free")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    dtype: Literal["float32", "float16", "bfloat16"] = Field("float32", description="activations")
    kernels: Literal["auto", "torch", "numba", "triton"] = Field(
        "auto", description="numba: compiled steps on a CPU; auto picks it or torch, triton on cuda"
    )
    quantization: Quantization = Field(
        "none", description="weights made smaller: int8 by row, int4 by 32 (int8 head)"
    )
    transport: Literal["auto", "shm", "tcp", "cuda_ipc", "nccl", "nixl", "gloo"] = Field(
        "auto", description="KV hand-off; auto takes the best that both ends can prove"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="this worker's share of the whole GPU's memory"
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs")
    insecure_transfer: bool = Field(
        False, description="KV data port off loopback without TLS: who reads it, reads prompts"
    )
    pool_dir: Path = Field(Path("/dev/shm"), description="where shm pools lie; a tmpfs")
    block_size: int = Field(16, ge=1, le=256, description="tokens a KV block")
    num_blocks: int | None = Field(None, ge=2, description="KV blocks, instead of a memory size")
    kv_cache_memory_bytes: Bytes = Field(
        1 << 29, ge=1 << 16, description="size of the KV pool, as 1GiB"
    )
    enable_prefix_caching: bool = Field(True, description="reuse blocks of equal prefixes")
    enable_chunked_prefill: bool = Field(True, description="split long prompts over steps")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="tokens a step; default: what this machine computes in 250 ms"
    )
    max_num_seqs: int = Field(256, ge=1, description="sequences a step")
    max_num_partial_prefills: int = Field(
        4, ge=1, description="prompts computed in turns, so that short ones pass long ones"
    )
    allocator: Literal["paged", "contiguous"] = Field(
        "paged", description="contiguous reserves max_model_len for each request, to compare with"
    )
    on_ledger_fault: Literal["count", "raise"] = Field(
        "count", description="when the books of the KV pool are wrong: log and count, or stop"
    )
    max_model_len: int | None = Field(None, ge=1, description="longest prompt + output")
    async_depth: int | None = Field(None, ge=0, le=1, description="steps in flight")
    lease_s: float = Field(10.0, gt=0, description="life of an offer without renewal")
    drain_budget_s: float = Field(60.0, ge=0, description="time to finish after SIGTERM")
    step_delay_ms: float = Field(0.0, ge=0, description="oracle and null runners: pace of a step")
    token_delay_us: float = Field(0.0, ge=0, description="oracle and null runners: a prompt token")
    oracle_vocab_size: int = Field(512, ge=2, le=65536, description="oracle runner's vocabulary")

    @model_validator(mode="after")
    def _the_device_is_there(self) -> Self:
        wanted, device = self.transport, self.device
        if device == "cpu" and self.kernels == "triton":
            raise ConfigError("kernels", "triton needs device cuda")
        if device == "cpu" and wanted in ("cuda_ipc", "nccl"):
            raise ConfigError("transport", f"{wanted} is for pools on a GPU; device is cpu")
        if device == "cuda" and wanted in ("shm", "tcp", "gloo"):
            raise ConfigError("transport", f"{wanted} is for pools in host memory; device is cuda")
        if device == "cuda" and not has_nvidia_driver():
            raise ConfigError("device", "cuda needs an NVIDIA driver, and this machine has none")
        return self


class PrefillSettings(WorkerSettings):
    @property
    def role(self) -> Role:
        return Role.PREFILL


class DecodeSettings(WorkerSettings):
    local_prefill: LocalPrefill = Field(LocalPrefill.AUTO, description="compute prompts here")
    decode_lookahead: float = Field(1.25, ge=1, le=4, description="promises over the pool's size")
    outbox_max_bytes: Bytes = Field(
        64 << 20, ge=1 << 16, description="undelivered tokens a gateway"
    )
    outbox_timeout_s: float = Field(4.0, gt=0, description="outbox not drained for this: closed")
    speculation: str = Field(
        "off", description="drafts: off, ngram, draft=DIR, draft=self:N (layers), auto (ngram)"
    )
    num_speculative_tokens: int = Field(5, ge=1, le=16, description="k, drafts a step at most")
    fixed_k: bool = Field(False, description="always k drafts, instead of as many as pay")
    prompt_lookup_min: int = Field(2, ge=1, description="shortest n-gram that is looked up")
    prompt_lookup_max: int = Field(4, ge=1, le=32, description="longest n-gram that is looked up")
    draft_kv_cache_memory_bytes: Bytes = Field(
        1 << 28, ge=1 << 16, description="size of a draft model's KV pool"
    )

    @property
    def role(self) -> Role:
        return Role.DECODE

    @property
    def draft_model(self) -> str | None:
        """DIR or self:N; None without a model that drafts."""
        return self.speculation[len(_DRAFT) :] if self.speculation.startswith(_DRAFT) else None

    @model_validator(mode="after")
    def _speculation_can_be(self) -> Self:
        draft = self.draft_model
        if self.speculation not in ("off", "ngram", "auto") and not draft:
            raise ConfigError(
                "speculation",
                f"must be off, ngram, draft=DIR, draft=self:N or auto, not {self.speculation!r}",
            )
        if draft and draft.startswith("self:") and not re.fullmatch(r"self:[1-9]\d{0,3}", draft):
            raise ConfigError("speculation", f"self:N needs a number of layers, not {draft[5:]!r}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                "prompt_lookup_min", f"must be at most prompt_lookup_max ({self.prompt_lookup_max})"
            )
        if self.speculation == "off":
            return self
        if self.async_depth:
            raise ConfigError("async_depth", "must be 0 with speculation")
        budget = self.max_num_batched_tokens
        if budget is not None and self.num_speculative_tokens >= budget:
            raise ConfigError(
                "num_speculative_tokens",
                f"must be less than max_num_batched_tokens ({budget}): they share a step",
            )
        return self


def advertised(settings: ProcessSettings) -> str:
    """Host name or address that other processes dial; never a wildcard address."""
    if settings.advertise_host:
        return settings.advertise_host
    if settings.host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return settings.host


SettingsT = TypeVar("SettingsT", bound=ProcessSettings)


def load(
    kind: type[SettingsT], flags: dict[str, Any], config_file: Path | None = None
) -> SettingsT:
    """Settings of one process. ``flags`` holds what was given on the command line (None: not
    given). Raises ConfigError naming the setting and what would do."""
    check_environment(_names())
    path = config_file or (Path(os.environ["BATON_CONFIG"]) if os.getenv("BATON_CONFIG") else None)
    values = _from_yaml(kind, path) if path else {}
    values = {k: v for k, v in values.items() if f"BATON_{k.upper()}" not in os.environ}
    values.update({k: v for k, v in flags.items() if v is not None})
    try:
        return kind(**values)
    except ValidationError as error:
        raise explain(error) from None


def _names() -> set[str]:
    """Of all settings: one YAML file, and one environment, serve every kind of process."""
    kinds: tuple[type[ProcessSettings], ...] = (GatewaySettings, PrefillSettings, DecodeSettings)
    return {name for kind in kinds for name in kind.model_fields}


def _from_yaml(kind: type[ProcessSettings], path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError("config", f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("config", f"{path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError("config", f"{path}: {yaml_reason(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError("config", f"{path} must hold a mapping of settings")
    check_names(content, _names())
    return {k: v for k, v in content.items() if k in kind.model_fields}


def read_token(path: Path | None, setting: str) -> str:
    """Content of a secret file that is not required; empty where none is given."""
    return "" if path is None else read_secret(path, setting)


def read_secret(path: Path, setting: str) -> str:
    """Content of a secret file; refuses one that others may read."""
    try:
        exposed = is_exposed(path.stat())
        text = path.read_text().strip()
    except OSError as error:
        raise ConfigError(setting, f"cannot read {path}: {error.strerror}") from None
    if exposed:
        raise ConfigError(setting, f"{path} is readable by others; chmod 600 it")
    if not text:
        raise ConfigError(setting, f"{path} is empty")
    return text
