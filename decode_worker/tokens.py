"""The tokens of one engine step, as one message a gateway."""

import logging

from common import failpoints
from common.types import SequenceOutput
from common.wire import finish_reason_to_proto, logprobs_to_proto
from common.wire import worker as wire
from decode_worker.link import GatewayLink
from decode_worker.sequences import DecodeSequence

log = logging.getLogger(__name__)


class StepMessages:
    def __init__(self) -> None:
        self._by_link: dict[GatewayLink, wire.StreamResponse] = {}

    def add(self, sequence: DecodeSequence, output: SequenceOutput) -> None:
        message = self._by_link.get(sequence.link)
        if message is None:
            message = self._by_link[sequence.link] = wire.StreamResponse()
        sequences = message.step_tokens.sequences
        # Filled in place: a message given to another is copied.
        tokens = sequences.add()
        try:
            _fill(tokens, sequence, output)
        except Exception:
            # A part of it would be sent after the end that the gateway is told of.
            del sequences[-1]
            raise

    def send(self, step_end_s: float) -> None:
        for link, message in self._by_link.items():
            try:
                _send(link, message, step_end_s)
            except Exception:
                # To this gateway as if they were lost on the way; the others get theirs.
                log.exception("a bug in the sending of a step's tokens")


def _send(link: GatewayLink, message: wire.StreamResponse, step_end_s: float) -> None:
    action = failpoints.hit("decode.before_send")
    if action == failpoints.DROP:
        return
    link.send(message, step_end_s)
    if action == failpoints.DUP:
        link.send(message, step_end_s)


def _fill(message: wire.SequenceTokens, sequence: DecodeSequence, output: SequenceOutput) -> None:
    message.request_id = sequence.spec.request_id
    message.attempt = sequence.spec.attempt
    message.index = output.index
    message.token_ids.extend(output.token_ids)
    if output.logprobs:
        message.logprobs.extend(logprobs_to_proto(output.logprobs))
    if output.prompt_logprobs:
        message.prompt_logprobs.extend(logprobs_to_proto(output.prompt_logprobs))
    if output.finish_reason is not None:
        message.finish_reason = finish_reason_to_proto(output.finish_reason)
    if output.matched_token_id is not None:
        message.matched_token_id = output.matched_token_id
    # With drafts each time: the gateway may end the request at a stop string.
    if output.finish_reason is not None or not sequence.told_usage or output.num_drafts:
        sequence.told_usage = True
        message.usage.CopyFrom(_usage(sequence, output))


def _usage(sequence: DecodeSequence, output: SequenceOutput) -> wire.DecodeUsage:
    counts = output.counts
    return wire.DecodeUsage(
        cached_tokens=counts.cached,
        transferred_tokens=counts.transferred,
        computed_tokens=counts.computed,
        recomputed_tokens=counts.recomputed,
        preemptions=counts.preemptions,
        drafted=counts.drafted,
        accepted=counts.accepted,
        transfer_ms=sequence.transfer_s * 1000,
        queue_ms=counts.queue_s * 1000,
        decode_ms=counts.decode_s * 1000,
        prefill_ms=counts.prefill_s * 1000,
    )
