"""What each role may say and hear on NATS; nats-server refuses everything else.

A worker's id is its own choice, so a role's rights reach over all ids of that role, and no further:

==========  ===================================================  ===================================
role        may publish                                          may subscribe to
==========  ===================================================  ===================================
gateway     jobs, cancels, discover; creates the job queue       reports, accepts, tickets
prefill     accepts, tickets, reports; pulls and acks jobs       jobs by name, cancels, discover
decode      reports                                              discover
==========  ===================================================  ===================================

Whoever asks hears answers below an inbox prefix of its role's own, and whoever is asked may answer
once. A decode worker neither asks nor is asked.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from common.bus import (
    DISCOVER_SUBJECT,
    JOB_CONSUMER,
    JOB_STREAM,
    JOB_SUBJECT,
    accept_subject,
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


def _permissions(
    publish: Sequence[str], subscribe: Sequence[str], answers: bool
) -> dict[str, object]:
    """As nats-server's configuration has them."""
    rights: dict[str, object] = {"publish": {"allow": publish}, "subscribe": {"allow": subscribe}}
    return rights | ({"allow_responses": True} if answers else {})


ROLES: Final[Mapping[str, Mapping[str, object]]] = {
    "gateway": _permissions(
        publish=[
            JOB_SUBJECT,
            worker_job_subject(_ANY),
            worker_cancel_subject(_ANY),
            DISCOVER_SUBJECT,
            f"$JS.API.STREAM.CREATE.{JOB_STREAM}",
            f"$JS.API.CONSUMER.DURABLE.CREATE.{JOB_STREAM}.{JOB_CONSUMER}",
        ],
        subscribe=[
            report_subject(_ANY),
            accept_subject(_ANY),
            ticket_subject(_ANY),
            f"{_inboxes('gateway')}.>",
        ],
        answers=True,
    ),
    "prefill": _permissions(
        publish=[
            accept_subject(_ANY),
            ticket_subject(_ANY),
            report_subject(_ANY),
            f"$JS.API.CONSUMER.MSG.NEXT.{JOB_STREAM}.{JOB_CONSUMER}",
            # From 2.15 on it holds the domain and a hash of the account before the stream.
            "$JS.ACK.>",
        ],
        subscribe=[
            worker_job_subject(_ANY),
            worker_cancel_subject(_ANY),
            DISCOVER_SUBJECT,
            f"{_inboxes('prefill')}.>",
        ],
        answers=True,
    ),
    "decode": _permissions(
        publish=[report_subject(_ANY)], subscribe=[DISCOVER_SUBJECT], answers=False
    ),
}
