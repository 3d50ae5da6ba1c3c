"""Who is admitted when, and what the records of the steps say."""

from dataclasses import replace

from support.engines import (
    GREEDY,
    SEEDED,
    Rig,
    prefill_for_hand_off,
    prompt_of,
    spec_of,
)

from common.types import ImportReady


def test_a_queue_that_waits_for_a_lease_is_no_work_until_it_ends() -> None:
    rig = Rig(5)
    holder = spec_of(prompt_of(1, 12), GREEDY, prefill_only=True)
    rig.run(holder)
    waiter = spec_of(prompt_of(2, 8), replace(GREEDY, max_tokens=3))
    rig.run(waiter)
    assert not rig.outputs(waiter)
    assert not rig.engine.has_work
    assert rig.engine.statistics().num_waiting == 1
    assert {b.references[0].kind for b in rig.engine.ledger().blocks} == {"lease"}
    rig.engine.release_lease(holder.seq_id)
    rig.run()
    rig.assert_right([waiter])
    rig.assert_idle()


def test_imports_leave_a_block_for_each_running_sequence() -> None:
    source, target = Rig(), Rig(10, max_model_len=32)
    running = spec_of(prompt_of(1, 13), replace(SEEDED, max_tokens=12))
    target.engine.add(running)
    target.step()
    spec = spec_of(prompt_of(2, 8), SEEDED)
    first = prefill_for_hand_off(source, spec)
    decode = replace(spec, output_ids=first.token_ids)
    # 5 blocks are in use, 4 free; the import wants 4 and must leave one.
    target.engine.add_import(decode)
    target.step()
    assert target.pool.counts().importing == 0
    target.engine.abort(running.seq_id)
    target.until(ImportReady, spec.seq_id)
    target.engine.drop_import(spec.seq_id)
    source.engine.release_lease(spec.seq_id)
    target.run()
    target.assert_idle()
    source.assert_idle()


def test_imports_and_new_work_are_admitted_by_age() -> None:
    rig = Rig(max_num_seqs=1)
    specs = [spec_of(prompt_of(i, 4), GREEDY, (1,)) for i in range(4)]
    for number, spec in enumerate(specs):
        if number % 2:
            rig.engine.add(spec)
        else:
            rig.engine.add_import(spec)
    started: list[int] = []
    while rig.engine.has_work:
        for event in rig.step():
            if event.seq_id not in started:
                started.append(event.seq_id)
            if isinstance(event, ImportReady):
                rig.engine.drop_import(event.seq_id)
    assert started == [spec.seq_id for spec in specs]
    rig.assert_idle()


def test_a_long_prefill_does_not_hold_imports_back() -> None:
    rig = Rig(max_num_batched_tokens=4)
    long, behind = (spec_of(prompt_of(i, 40), GREEDY) for i in range(2))
    rig.engine.add(long)
    rig.engine.add(behind)
    handed = spec_of(prompt_of(3, 4), GREEDY, (1,))
    rig.engine.add_import(handed)
    assert [event.seq_id for event in rig.step()] == [handed.seq_id]
    rig.engine.drop_import(handed.seq_id)
    rig.run()
    rig.assert_right([long, behind])
    rig.assert_idle()


def test_times_of_the_phases() -> None:
    rig = Rig(max_num_batched_tokens=4)
    first, second = (spec_of(prompt_of(i, 8), GREEDY) for i in range(2))
    rig.run(first, second)
    for spec in (first, second):
        counts = rig.last(spec).counts
        assert counts.queue_s > 0
        assert counts.prefill_s > 0
        assert counts.decode_s > 0
    assert rig.last(second).counts.queue_s > rig.last(first).counts.queue_s


def test_records_tell_chunks_and_decodes() -> None:
    rig = Rig(max_num_batched_tokens=4)
    spec = spec_of(prompt_of(1, 10), replace(GREEDY, max_tokens=3))
    rig.run(spec)
    chunks = [(c.start, c.num_tokens) for record in rig.records for c in record.chunks]
    assert chunks == [(0, 4), (4, 4), (8, 2)]
    assert [r.num_prefill_tokens for r in rig.records] == [4, 4, 2, 0, 0]
    assert [r.num_decode_tokens for r in rig.records] == [0, 0, 0, 1, 1]
    assert [r.step_id for r in rig.records] == [1, 2, 3, 4, 5]
    assert all(r.start_s < r.end_s for r in rig.records)


def test_lower_priority_values_go_first() -> None:
    rig = Rig(max_num_seqs=1)
    specs = [spec_of(prompt_of(i, 4), GREEDY, priority=p) for i, p in enumerate((0, 2, -1, 0))]
    for spec in specs:
        rig.engine.add(spec)
    rig.run()
    ended = [event.seq_id for event in rig.events if getattr(event, "finish_reason", None)]
    assert ended == [specs[i].seq_id for i in (2, 0, 3, 1)]
