import hashlib

import pytest

from common.block_keys import block_key, chain_keys, pack_ids, root_key


@pytest.mark.fault("V13")
def test_the_chain_is_sha256_over_parent_and_ids() -> None:
    root = root_key("model", "tenant", "salt")
    ids = list(range(10))
    first = hashlib.sha256(root + pack_ids(ids[:4])).digest()
    second = hashlib.sha256(first + pack_ids(ids[4:8])).digest()
    assert chain_keys(root, ids, 4) == [first, second]
    assert block_key(first, pack_ids(ids[4:8])) == second
    assert pack_ids([1, 256]) == b"\x01\0\0\0\0\x01\0\0"


def test_fields_of_the_root_never_run_together() -> None:
    roots = {
        root_key("m", "ab", "c"),
        root_key("m", "a", "bc"),
        root_key("ma", "b", "c"),
        root_key("m", "abc", ""),
        root_key("m", "", "abc"),
    }
    assert len(roots) == 5


def test_one_other_token_changes_every_later_key() -> None:
    root = root_key("m", "", "")
    ids = list(range(12))
    changed = [*ids[:5], 99, *ids[6:]]
    before, after = chain_keys(root, ids, 4), chain_keys(root, changed, 4)
    assert before[0] == after[0]
    assert before[1] != after[1]
    assert before[2] != after[2]


def test_only_full_blocks_have_keys() -> None:
    root = root_key("m", "", "")
    assert [len(chain_keys(root, range(n), 4)) for n in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]
