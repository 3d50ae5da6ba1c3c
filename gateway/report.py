"""What a finished request is told about itself: usage and milliseconds by phase."""

from common.types import PhasesMs, Usage
from gateway.output import Finish
from gateway.request import Completed
from gateway.run import Run


def completed(run: Run, finish: Finish, now_s: float) -> Completed:
    account, request = run.accounting, run.request
    usage = Usage(
        prompt_tokens=len(request.prompt_ids),
        output_tokens=finish.num_tokens,
        prefill_computed=account.prefill_computed,
        prefill_cached=account.prefill_cached,
        decode_cached=account.decode_cached,
        decode_transferred=account.decode_transferred,
        decode_computed=account.decode_computed,
        recomputed=account.recomputed,
        drafted=account.drafted,
        accepted=account.accepted,
        preemptions=account.preemptions,
    )
    first_s = run.first_token_s if run.first_token_s is not None else now_s
    phases = PhasesMs(
        tokenize=request.tokenize_ms,
        queue=account.queue_ms,
        prefill_queue=account.prefill_queue_ms,
        prefill=account.prefill_ms,
        transfer=account.transfer_ms,
        decode_queue=account.decode_queue_ms,
        decode=account.decode_ms,
        total=(now_s - run.started_s) * 1000 + request.tokenize_ms,
        time_to_first_token=(first_s - run.started_s) * 1000 + request.tokenize_ms,
    )
    return Completed(
        finish.reason,
        usage,
        phases,
        run.num_attempts,
        request.params.seed,
        finish.matched_token_id,
        finish.matched_string,
    )
