"""The tokens of one engine step, as one message a gateway."""

from common import failpoints
from common.types import SequenceOutput
from common.wire import finish_reason_to_proto, logprobs_to_proto
from common.wire import worker as wire
from decode_worker.link import GatewayLink
from decode_worker.sequences import DecodeSequence


class StepMessages:
    def __init__(self) -> None:
        self._by_link: dict[GatewayLink, wire.StepTokens] = {}

    def add(self, sequence: DecodeSequence, output: SequenceOutput) -> None:
        step = self._by_link.get(sequence.link)
        if step is None:
            step = self._by_link[sequence.link] = wire.StepTokens()
        step.sequences.append(_sequence_tokens(sequence, output))

    def send(self, step_end_s: float) -> None:
        for link, step in self._by_link.items():
            action = failpoints.hit("decode.before_send")
            if action == failpoints.DROP:
                continue
            link.send(wire.StreamResponse(step_tokens=step), step_end_s)
            if action == failpoints.DUP:
                link.send(wire.StreamResponse(step_tokens=step), step_end_s)


def _sequence_tokens(sequence: DecodeSequence, output: SequenceOutput) -> wire.SequenceTokens:
    message = wire.SequenceTokens(
        request_id=sequence.spec.request_id,
        attempt=sequence.spec.attempt,
        index=output.index,
        token_ids=output.token_ids,
        logprobs=logprobs_to_proto(output.logprobs),
        finish_reason=finish_reason_to_proto(output.finish_reason),
        matched_token_id=output.matched_token_id,
        prompt_logprobs=logprobs_to_proto(output.prompt_logprobs),
    )
    if output.finish_reason is not None or not sequence.told_usage:
        sequence.told_usage = True
        message.usage.CopyFrom(_usage(sequence, output))
    return message


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
