"""Planning: what is shared, what fits together, and that nothing but the operation decides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.decoder.blocks import blocks
from trainer.decoder.plan import Ids, MicroBatch, PlanSettings, plan


def ids(*runs: tuple[int, int]) -> Ids:
    """Token ids from (token, count) runs."""
    return np.concatenate([np.full(count, token) for token, count in runs]).astype(np.int64)


def tokens_of(batch: MicroBatch, place: int) -> Ids:
    return batch.tokens[batch.rows(batch.paths[place])]


def test_a_common_prefix_is_computed_once() -> None:
    group = [ids((1, 40), (10 + i, 12)) for i in range(8)]
    (batch,) = plan(group, PlanSettings())
    assert len(batch.tokens) == 40 + 8 * 12
    assert sorted(node.length for node in batch.nodes) == [12] * 8 + [40]


def test_a_nested_branch_is_computed_once() -> None:
    group = [ids((1, 100), (2, 50), (10 + i, 5)) for i in range(3)] + [ids((1, 100), (3, 9)), ids((1, 100), (4, 9))]
    (batch,) = plan(group, PlanSettings())
    assert len(batch.tokens) == 100 + 50 + 3 * 5 + 2 * 9
    assert {len(path) for path in batch.paths} == {2, 3}


def test_equal_datums_are_computed_once() -> None:
    (batch,) = plan([ids((1, 9)), ids((1, 9)), ids((2, 9))], PlanSettings())
    assert len(batch.tokens) == 18


def test_a_datum_that_is_a_prefix_of_another_has_no_rows_of_its_own() -> None:
    (batch,) = plan([ids((1, 70), (2, 4)), ids((1, 70))], PlanSettings())
    assert len(batch.tokens) == 74


def test_a_short_common_prefix_is_not_worth_sharing() -> None:
    (batch,) = plan([ids((1, 8), (10 + i, 20)) for i in range(4)], PlanSettings(min_saved_tokens=64))
    assert len(batch.tokens) == 4 * 28
    assert all(node.parent == -1 for node in batch.nodes)


def test_groups_under_a_short_common_start_still_share_their_own_prefix() -> None:
    data = [ids((1, 3), (g, 40), (100 + 8 * g + i, 12)) for g in range(10, 14) for i in range(8)]
    (batch,) = plan(data, PlanSettings(max_tokens=4096))
    assert len(batch.tokens) == 4 * (43 + 8 * 12)


def test_datums_that_differ_in_the_first_token_share_nothing() -> None:
    (batch,) = plan([ids((10 + i, 1), (1, 60)) for i in range(3)], PlanSettings())
    assert len(batch.tokens) == 3 * 61


def test_a_group_larger_than_the_budget_is_cut_and_repeats_its_prefix() -> None:
    group = [ids((1, 100), (10 + i, 100)) for i in range(9)]
    batches = plan(group, PlanSettings(max_tokens=500))
    assert [len(batch.tokens) for batch in batches] == [500, 500, 200] or sum(len(b.tokens) for b in batches) == 1200
    assert all(len(batch.tokens) <= 500 for batch in batches)


def test_a_datum_longer_than_the_budget_stands_alone() -> None:
    batches = plan([ids((1, 300)), ids((2, 5))], PlanSettings(max_tokens=100))
    assert sorted(len(batch.tokens) for batch in batches) == [5, 300]


def test_an_empty_datum_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 has no tokens"):
        plan([ids((1, 3)), np.zeros(0, np.int64)], PlanSettings())


def test_the_order_of_datums_does_not_change_what_is_computed_together() -> None:
    data = [ids((1, 50), (10 + i, 10 + i)) for i in range(12)] + [ids((2, 33 + i)) for i in range(5)]
    settings = PlanSettings(max_tokens=150)
    forward = plan(data, settings)
    backward = plan(data[::-1], settings)
    assert sorted(b.tokens.tolist() for b in forward) == sorted(b.tokens.tolist() for b in backward)


datums = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=24).map(lambda tokens: np.array(tokens, np.int64)),
    min_size=1,
    max_size=16,
)


def test_prefixes_too_short_to_share_count_as_rows() -> None:
    data = [ids((1, 5), (10 + i, 1)) for i in range(10)]
    batches = plan(data, PlanSettings(max_tokens=20, min_saved_tokens=1000))
    assert sum(len(batch.tokens) for batch in batches) == 60
    assert max(len(batch.tokens) for batch in batches) <= 20


def test_a_prefix_longer_than_a_micro_batch_is_shared() -> None:
    group = [ids((1, 4000), (10 + i, 60)) for i in range(32)]
    batches = plan(group, PlanSettings(max_tokens=2048))
    assert sum(len(batch.tokens) for batch in batches) <= 2 * 4000 + 32 * 60
    assert max(len(batch.tokens) for batch in batches) <= 4060 + 1024


def test_a_micro_batch_asks_for_no_more_targets_than_allowed() -> None:
    group = [ids((1, 90), (10 + i, 3)) for i in range(12)]
    batches = plan(group, PlanSettings(max_tokens=1000, max_targets=4 * 93))
    assert sorted(index for batch in batches for index in batch.datums) == list(range(12))
    assert all(len(batch.datums) <= 4 for batch in batches)
    wide = plan(group, PlanSettings(max_tokens=1000, max_targets=4 * 93), [93 * 3] * 12)
    assert [len(batch.datums) for batch in wide] == [1] * 12


@given(data=datums, max_tokens=st.integers(1, 60), min_saved=st.integers(0, 12), share=st.booleans())
def test_every_datum_is_one_path_with_its_tokens_and_positions(
    data: list[Ids], max_tokens: int, min_saved: int, share: bool
) -> None:
    batches = plan(data, PlanSettings(max_tokens=max_tokens, min_saved_tokens=min_saved, share=share))
    assert sorted(index for batch in batches for index in batch.datums) == list(range(len(data)))
    for batch in batches:
        longest = max(len(data[index]) for index in batch.datums)
        assert len(batch.tokens) <= max(max_tokens, longest + max_tokens // 2)
        for place, index in enumerate(batch.datums):
            assert (tokens_of(batch, place) == data[index]).all()
            assert (batch.positions[batch.rows(batch.paths[place])] == np.arange(len(data[index]))).all()


@given(data=datums, min_saved=st.integers(0, 12))
def test_blocks_cover_every_row_once_and_see_all_of_its_ancestors(data: list[Ids], min_saved: int) -> None:
    for batch in plan(data, PlanSettings(max_tokens=100, min_saved_tokens=min_saved)):
        covered = [row for block in blocks(batch) for row in block.own_rows.reshape(-1).tolist() if row >= 0]
        assert sorted(covered) == list(range(len(batch.tokens)))
        for block in blocks(batch):
            for own, prefix in zip(block.own_rows, block.prefix_rows, strict=True):
                for row in own[:, 0][own[:, 0] >= 0]:
                    node = next(i for i, n in enumerate(batch.nodes) if n.start == row)
                    ancestors = batch.rows(batch.path_to(node)[:-1])
                    assert prefix[prefix >= 0].tolist() == ancestors.tolist()
