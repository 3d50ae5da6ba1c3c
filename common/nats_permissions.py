"""What each role may say and hear on NATS; nats-server refuses everything else.

A worker's id is its own choice, so a role's rights reach over all ids of that role, and no further:

==========  ===================================================  ===================================
role        may publish                                          may subscribe to
==========  ===================================================  ===================================
gateway     jobs, cancels, discover, cache snapshot requests;    reports, accepts, tickets, cache
            creates the job queue                                events
prefill     accepts, tickets, reports, cache events;             jobs by name, cancels, discover,
            pulls and acks jobs                                  cache snapshot requests
decode      reports, cache events                                discover, cache snapshot requests
==========  ===================================================  ===================================

Whoever asks hears answers below an inbox prefix of its role's own, and whoever is asked may answer
once. A decode worker asks nobody.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from common.bus import (
    DISCOVER_SUBJECT,
    JOB_CONSUMER,
    JOB_STREAM,
    JOB_SUBJECT,
    accept_subject,
    kv_events_subject,
    kv_snapshot_subject,
    report_subject,
    ticket_subject,
    worker_cancel_subject,
    worker_job_subject,
)

_ANY = "*"


def inbox_prefix(user: str, instance_id: str) -> str:
    """Where the answers to one connection of ``user`` arrive."""
    return f"{_inboxes(user)}.{instance_id}"


def _inboxes(user: str) -> str:
    # The first token differs by role: a wildcard stands for whole tokens only.
    return f"_INBOX_{user}"


def _permissions(publish: Sequence[str], subscribe: Sequence[str]) -> dict[str, object]:
    """As nats-server's configuration has them; every role is asked something."""
    return {
        "publish": {"allow": publish},
        "subscribe": {"allow": subscribe},
        "allow_responses": True,
    }


ROLES: Final[Mapping[str, Mapping[str, object]]] = {
    "gateway": _permissions(
        publish=[
            JOB_SUBJECT,
            worker_job_subject(_ANY),
            worker_cancel_subject(_ANY),
            DISCOVER_SUBJECT,
            kv_snapshot_subject(_ANY),
            f"$JS.API.STREAM.CREATE.{JOB_STREAM}",
            f"$JS.API.CONSUMER.DURABLE.CREATE.{JOB_STREAM}.{JOB_CONSUMER}",
        ],
        subscribe=[
            report_subject(_ANY),
            accept_subject(_ANY),
            ticket_subject(_ANY),
            kv_events_subject(_ANY),
            f"{_inboxes('gateway')}.>",
        ],
    ),
    "prefill": _permissions(
        publish=[
            accept_subject(_ANY),
            ticket_subject(_ANY),
            report_subject(_ANY),
            kv_events_subject(_ANY),
            f"$JS.API.CONSUMER.MSG.NEXT.{JOB_STREAM}.{JOB_CONSUMER}",
            # From 2.15 on it holds the domain and a hash of the account before the stream.
            "$JS.ACK.>",
        ],
        subscribe=[
            worker_job_subject(_ANY),
            worker_cancel_subject(_ANY),
            DISCOVER_SUBJECT,
            kv_snapshot_subject(_ANY),
            f"{_inboxes('prefill')}.>",
        ],
    ),
    "decode": _permissions(
        publish=[report_subject(_ANY), kv_events_subject(_ANY)],
        subscribe=[DISCOVER_SUBJECT, kv_snapshot_subject(_ANY)],
    ),
}
