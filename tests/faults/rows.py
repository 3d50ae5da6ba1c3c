"""The rows of docs/reliability.md: what can go wrong and what is promised then. Which test is of
which row stands with the tests, in ``@pytest.mark.fault("F7")``.

F rows are faults of the world, V rows published classes of vulnerabilities (by their CVEs where one
is typical). ``why_not`` says in one line why a row needs no test here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    promise: str
    why_not: str = ""


ROWS = {
    "F1": Row("prefill worker killed in mid-prefill", "the job runs again elsewhere; one answer"),
    "F2": Row(
        "prefill worker killed between ticket and fetch, or under the copy",
        "the fetch fails, the prompt is computed again; no block of it is used",
    ),
    "F3": Row(
        "prefill worker back under its old address", "old handles are refused by their epoch"
    ),
    "F4": Row("decode worker killed in mid-stream", "the stream goes on after a pause, the same"),
    "F5": Row("tokens were sent and never arrived", "computed again, equal, each index once"),
    "F6": Row("a worker freezes and wakes up later", "what it says then is refused and counted"),
    "F7": Row(
        "all decode workers dead", "UNAVAILABLE within the bound; served again when one is back"
    ),
    "F8": Row("every attempt fails", "given up after three failures, without a storm"),
    "F9": Row("nats-server killed", "streams go on; new requests wait, none is lost or doubled"),
    "F10": Row("what NATS had stored is gone", "jobs are published again under a new attempt"),
    "F11": Row("NATS frozen", "publishing times out within 2 s; new requests fail fast or wait"),
    "F12": Row("a worker cut off by the network", "its work moves; healed, it is fenced"),
    "F13": Row("a slow consumer of jobs", "jobs are pulled by free slots, never dropped silently"),
    "F14": Row("gateway killed", "its clients are told; workers free all within two leases"),
    "F15": Row("a client leaves, in any phase", "all blocks back on both sides, no late token"),
    "F16": Row("a client leaves during the copy", "blocks stay held until the copy has returned"),
    "F17": Row("KV pool exhausted", "the youngest is preempted; something always runs"),
    "F18": Row("preemption thrash", "every request ends, preemptions are bounded"),
    "F19": Row("a request larger than the pool", "refused at once"),
    "F20": Row("the wall clock jumps", "nothing but log times is of the wall clock"),
    "F21": Row("a job delivered twice", "the second copy finds it owned: no work, no harm"),
    "F22": Row("a request that kills its workers", "INTERNAL after two owners; others go on"),
    "F23": Row("a frozen or half-open client", "cancelled within 5 s"),
    "F24": Row("SIGTERM, and a rolling restart", "finish or hand over, exit 0, no request fails"),
    "F25": Row("a worker out of memory", "as a killed worker; the gateway lives"),
    "F26": Row("/dev/shm full", "an error at start that says so, never SIGBUS"),
    "F27": Row("pools of killed runs", "swept by the next start; never those of others"),
    "F28": Row("KV bytes corrupted", "found before use, computed again, never cached"),
    "F29": Row("workers of another version or model", "refused with the field, never routed to"),
    "F30": Row("a client that reads slowly or never", "bounded buffer, cancelled; others unhurt"),
    "F31": Row("all clients come back at once", "bounded, with jitter, no second wave"),
    "F32": Row("thousands of idle connections", "live requests are served, memory bounded"),
    "F33": Row("malformed protobuf, bad UTF-8", "INVALID_ARGUMENT without internals"),
    "F34": Row("empty, too long and odd prompts", "refused by field name, or served"),
    "F35": Row("logits that are not finite", "that request fails alone"),
    "F36": Row("idle for long, then a burst", "the first request after it is served"),
    "F37": Row("trace collector down or a black hole", "nothing; 2 s at most when stopping"),
    "F38": Row("log cannot be written", "the service goes on"),
    "V1": Row("pickle on sockets (CVE-2025-32444)", "no code of ours can unpickle anything"),
    "V2": Row("model files that run code (CVE-2025-32434)", "safetensors only, never remote code"),
    "V3": Row("open internal ports (CVE-2025-30202)", "loopback, tokens, rights by role"),
    "V4": Row("tensors from outside (CVE-2025-62164)", "no such field; frames are bounds-checked"),
    "V5": Row("shared memory names and bounds (CVE-2025-23320)", "0600, unguessable, never told"),
    "V6": Row("unbounded numbers (CVE-2026-34756)", "INVALID_ARGUMENT by field, at no cost"),
    "V7": Row("NaN, infinities, negatives (CVE-2026-54235)", "INVALID_ARGUMENT by field"),
    "V8": Row("token ids out of range (CVE-2026-54234)", "refused; never fed back"),
    "V9": Row("empty and odd prompts (CVE-2024-8768)", "refused or served; no process dies"),
    "V10": Row("special tokens spelled in text (CVE-2026-44222)", "they stay text"),
    "V11": Row(
        "regex and grammar bombs (CVE-2025-48942)",
        "fields of guided decoding are refused by name",
    ),
    "V12": Row("chat template attacks (CVE-2025-61620)", "no template from requests; a sandbox"),
    "V13": Row("prefix hash collisions (CVE-2025-25183)", "SHA-256, and ids are compared too"),
    "V14": Row("probing others' prefixes (CVE-2025-46570)", "nothing is shared between tenants"),
    "V15": Row("flooding the prefix cache", "a flood drives out its own tenant's blocks"),
    "V16": Row("stale or foreign KV (CVE-2026-7141)", "poisoned blocks never show in a text"),
    "V17": Row("cancel races (CVE-2025-23322)", "cancels at all phases leave both ledgers empty"),
    "V18": Row("big headers, bodies, bombs (CVE-2025-48956)", "refused, memory bounded"),
    "V19": Row("transport floods (CVE-2023-44487)", "live requests are served; upb is used"),
    "V20": Row("authentication (CVE-2025-59425)", "constant time, on every call but health"),
    "V21": Row(
        "URLs and paths in fields (CVE-2025-6242)",
        "no field is ever opened as a path or URL",
    ),
    "V22": Row("log and label injection (CVE-2020-7694)", "escaped, short, series bounded"),
    "V23": Row("batch-mates share fate (CVE-2026-44223)", "a bad row ends its own sequence only"),
    "V24": Row(
        "supply chain (CVE-2026-54232)",
        "every version is pinned",
    ),
    "V25": Row("NATS itself (CVE-2026-27571)", "patched, nothing but the client port is open"),
}
