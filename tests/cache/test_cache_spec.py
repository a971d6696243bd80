"""Sizes of the declared rows against numbers worked out by hand from the formats."""

import dataclasses

import pytest

from abyssal.cache.spec import CacheSpec
from abyssal.config.topology import Topology
from abyssal.core.errors import ConfigError


def spec_of(config, *args, **kwargs):
    return CacheSpec.of(config, Topology.of(config), *args, **kwargs)


def test_released_row_bytes(released_config):
    spec = spec_of(released_config)
    packed = {group.name: group.packed_row_bytes for group in spec.groups}
    assert packed == {
        "window_kv": 528,
        "compressed_kv": 288,
        "index_keys": 68,
        "partial_groups": 4096,
        "draft_window_kv": 528,
    }
    unpacked = {group.name: group.unpacked_row_bytes for group in spec.groups}
    assert unpacked == {
        "window_kv": 2048,
        "compressed_kv": 2048,
        "index_keys": 512,
        "partial_groups": 4096,
        "draft_window_kv": 2048,
    }


def test_released_owners_and_rows(released_config):
    spec = spec_of(released_config)
    window, compressed, index, partial, draft = spec.groups
    assert (window.kind, window.owners, set(window.rows)) == ("ring", tuple(range(40)), {134})
    assert (compressed.kind, compressed.owners, compressed.rows) == ("paged", (2, 8, 14, 20), (64, 64, 64, 128))
    assert (index.kind, index.owners, index.rows) == ("paged", (2, 8, 14, 20), (64, 64, 64, 128))
    assert (partial.kind, partial.owners, partial.rows) == ("ring", (2, 8, 14), (8, 8, 8))
    assert (draft.kind, draft.owners, set(draft.rows)) == ("ring", (40, 41, 42), {134})
    assert compressed.tokens_per_row(8) == 2
    assert compressed.tokens_per_row(20) == 1
    assert index.rows_of(20) == 128
    assert [g.recovery for g in spec.groups] == ["restored"] * 4 + ["rebuilt"]
    assert [g.allocated for g in spec.groups] == [True] * 4 + [False]


def test_released_totals(released_config):
    spec = spec_of(released_config)
    assert spec.bytes_per_token(packed=True) == 890
    assert spec.block_bytes(packed=True) == 113_920
    assert spec.bytes_per_token(packed=False) == 2.5 * (2048 + 512)
    assert spec.block_bytes(packed=False) == 128 * 6400
    assert spec.slot_bytes(packed=True) == 40 * 134 * 528 + 3 * 8 * 4096 == 2_928_384
    assert spec.slot_bytes(packed=False) == 40 * 134 * 2048 + 3 * 8 * 4096 == 11_075_584


def test_draft_windows_count_once_they_are_used(released_config):
    without, with_drafts = spec_of(released_config), spec_of(released_config, with_drafts=True)
    assert with_drafts.group("draft_window_kv").allocated
    assert with_drafts.slot_bytes(packed=True) - without.slot_bytes(packed=True) == 3 * 134 * 528
    assert with_drafts.block_bytes(packed=True) == without.block_bytes(packed=True)


def test_small_model(small_config):
    spec = spec_of(small_config)
    assert {g.name: g.packed_row_bytes for g in spec.groups} == {
        "window_kv": 66,
        "compressed_kv": 36,
        "index_keys": 17,
        "partial_groups": 512,
        "draft_window_kv": 66,
    }
    assert spec.group("window_kv").rows == (20,) * 8
    assert spec.group("partial_groups").rows == (6,)
    assert spec.group("draft_window_kv").owners == (8, 9)
    assert spec.bytes_per_token(packed=True) == 1.5 * (36 + 17)


def test_rollback_lengthens_every_ring_and_no_block(released_config):
    short, long = spec_of(released_config, 0), spec_of(released_config, 10)
    for name in ("window_kv", "partial_groups", "draft_window_kv"):
        assert [b - a for a, b in zip(short.group(name).rows, long.group(name).rows, strict=True)] == [10] * len(
            short.group(name).owners
        )
    assert short.group("window_kv").rows_of(0) == 128
    assert short.group("partial_groups").rows_of(2) == 2
    assert short.block_bytes(packed=True) == long.block_bytes(packed=True)


def test_a_model_without_partial_groups_or_drafts_declares_none(small_config):
    config = dataclasses.replace(small_config, compress_ratios=(0, 0, 1, 1, 1, 1, 1, 1), num_nextn_predict_layers=0)
    spec = spec_of(config)
    assert [g.name for g in spec.groups] == ["window_kv", "compressed_kv", "index_keys"]
    with pytest.raises(KeyError):
        spec.group("partial_groups")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 72}, "head_dim=72"),
        ({"index_head_dim": 48}, "index_head_dim=48"),
        ({"compress_ratios": (0, 0, 3, 3, 3, 1, 1, 1, 0, 0)}, "ratio 3"),
    ],
)
def test_shapes_that_cannot_be_cut_are_refused(small_config, change, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(dataclasses.replace(small_config, **change))
