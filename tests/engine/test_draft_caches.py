"""Rollback by overwriting: after any number of rejected drafts the caches hold what they would hold without drafts."""

from __future__ import annotations

import random

import pytest
import torch

from abyssal.config.engine import BLOCK_TOKENS, EngineConfig
from abyssal.core.batch import SampledToken
from abyssal.core.request import RowSchedule
from abyssal.core.sampling_params import SamplingParams
from abyssal.engine.engine import Engine
from abyssal.runner.drafting import Drafts
from abyssal.scheduler.acceptance import Acceptance
from abyssal.scheduler.speculation import Speculation

NAN = float("nan")


class Caches:
    """Rows of one request in an engine's caches, by position and by entry."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.storage = engine, engine._storage
        text, spec = engine.model_config.text, self.storage.spec
        self.window = text.sliding_window
        self.targets = list(spec.group("window_kv").owners)
        self.stages = list(spec.group("draft_window_kv").owners)
        self.sources = {owner: spec.group("index_keys").tokens_per_row(owner) for owner in spec.group("index_keys").owners}
        self.partials = dict.fromkeys(spec.group("partial_groups").owners, 2)

    def running(self):
        """(request, slot, block table) of each running request."""
        for stay in self.engine._scheduler._running.values():
            name = stay.request.request_id
            yield stay.request, stay.state_slot, self.engine._cache.blocks(name)

    def window_rows(self, layer, slot, positions):
        ring = self.storage.window(layer)[slot]
        return ring[torch.tensor(positions, dtype=torch.long) % len(ring)]

    def partial_rows(self, layer, slot, positions):
        rows = self.storage.partial(layer).unflatten(0, (self.storage.num_slots, -1))[slot]
        return rows[torch.tensor(positions, dtype=torch.long) % len(rows)]

    def entry_index(self, layer, table, entries):
        per_block = BLOCK_TOKENS // self.sources[layer]
        return [table[g // per_block] * per_block + g % per_block for g in entries]

    def entry_rows(self, layer, table, entries):
        index = self.entry_index(layer, table, entries)
        return torch.cat((self.storage.entries(layer)[index], self.storage.index_keys(layer)[index]), 1)


class Reference:
    """Rows by position of texts that were computed without drafts, a few rows a step."""

    def __init__(self, engine: Engine, texts: dict[int, list[int]]) -> None:
        self.caches, self.texts, self.rows = Caches(engine), texts, {}
        engine.set_speculation(1)  # the stages' windows are filled; a request of one token has no drafts
        params = {seed: SamplingParams(seed=seed, max_tokens=1, detokenize=False) for seed in texts}
        for seed, text in texts.items():
            engine.add(text, params[seed], row_schedule=RowSchedule(chunk=3))
        computed = dict.fromkeys(texts, 0)
        while engine.has_unfinished:
            engine.step()
            for request, slot, table in self.caches.running():
                seed, end = request.params.seed, request.num_computed_tokens
                self._capture(seed, slot, table, computed[seed], end)
                computed[seed] = end
        self.computed = computed
        self.stacked = {key: torch.cat(parts) for key, parts in self.rows.items()}

    def _capture(self, seed, slot, table, begin, end):
        caches, positions = self.caches, list(range(begin, end))
        if not positions:
            return
        for layer in caches.targets + caches.stages:
            self._add((seed, "window", layer), caches.window_rows(layer, slot, positions))
        for layer in caches.partials:
            self._add((seed, "partial", layer), caches.partial_rows(layer, slot, positions))
        for layer, ratio in caches.sources.items():
            self._add((seed, "entry", layer), caches.entry_rows(layer, table, range(begin // ratio, end // ratio)))

    def _add(self, key, rows):
        self.rows.setdefault(key, []).append(rows.clone())


class RandomLengths:
    """Any number of drafts, verified or not, from step to step."""

    observes = True

    def __init__(self, block_size, seed):
        self._block_size, self._random = block_size, random.Random(seed)

    def total(self, proposals, other_rows, room):
        return self._random.randint(0, sum(proposal.most for proposal in proposals))

    def wanted(self, most, other_rows, room):
        return [min(limit, self._random.choice((0, self._block_size, self._block_size))) for limit in most]


class Scripted:
    """Draws what the text says, and keeps the drafts that agree with it. The logits are not looked at."""

    def __init__(self, texts):
        self._texts = texts
        self.num_rounds = self.num_rejected = 0

    def draft(self, logits, slots, rows, place):
        return [0] * len(rows)

    def verify(self, logits, requests):
        results = []
        for request in requests:
            text, kept = self._texts[request.params.seed], 0
            while kept < len(request.draft_ids) and request.draft_ids[kept] == text[request.position + kept]:
                kept += 1
            self.num_rounds += 1
            self.num_rejected += len(request.draft_ids) - kept
            results.append([SampledToken(t) for t in text[request.position : request.position + kept + 1]])
        return results


def same(engine, got, wanted):
    """Bit for bit where kernels do not depend on the number of rows."""
    if engine.config.backend == "torch":
        return torch.allclose(got, wanted, rtol=1e-3, atol=1e-4)
    return torch.equal(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "num_rounds"), [("micro", 10_000), ("deep", 400)])
def test_caches_after_forced_acceptance(checkpoint_of, preset, num_rounds):
    """Random drafts accepted and rejected, four texts side by side, longer than many windows, groups and cache blocks.

    After each step every cached row below the committed positions is compared.
    """
    num_texts = 4
    settings = EngineConfig(
        speculation=1, overlap=False, num_threads=1, max_num_seqs=num_texts, num_blocks=4 * 40, bounded_replay="off"
    )
    engine = Engine(checkpoint_of(preset), settings, shuffle_seed=5)
    block_size, rng = engine.model_config.text.dspark_block_size, random.Random(preset)
    length = int(num_rounds / num_texts * 2.0) + 40
    texts = {seed: [rng.randrange(11, 400) for _ in range(length)] for seed in range(num_texts)}
    reference = Reference(engine, texts)

    engine.fill_caches(NAN)
    scripted = Scripted(texts)
    engine._scheduler.speculation = Speculation(RandomLengths(block_size, 3), Acceptance((1.0,) * block_size))
    engine._runner.drafting.rule = scripted

    def oracle(request, drafts):
        first, count = request.position + 1, len(drafts.token_ids)
        right, text = rng.randint(0, count), texts[request.params.seed]
        ids = [text[first + k] if k < right else (text[first + k] + 1) % 400 for k in range(count)]
        return Drafts(ids, drafts.confidence)

    engine.set_draft_oracle(oracle)
    for seed, text in texts.items():
        params = SamplingParams(seed=seed, max_tokens=length - 20 - seed, ignore_eos=True, detokenize=False)
        engine.add(text[: 5 + seed], params)
    caches, checked = Caches(engine), dict.fromkeys(texts, 0)
    while engine.has_unfinished and scripted.num_rounds < num_rounds:
        engine.step()
        for request, slot, table in caches.running():
            check(engine, caches, reference, request, slot, table, checked)
        engine.check_integrity()
    assert scripted.num_rounds >= num_rounds
    assert scripted.num_rejected > num_rounds // 4
    for request, _, table in caches.running():
        for layer, ratio in caches.sources.items():  # nothing was damaged later
            num_entries = request.num_computed_tokens // ratio
            got = caches.entry_rows(layer, table, range(num_entries))
            assert same(engine, got, reference.stacked[request.params.seed, "entry", layer][:num_entries])
    assert max(request.num_computed_tokens for request, *_ in caches.running()) > 1.4 * num_rounds / num_texts


def check(engine, caches, reference, request, slot, table, checked):
    seed, end = request.params.seed, request.num_computed_tokens
    assert request.token_ids() == reference.texts[seed][: request.num_tokens]
    positions = list(range(max(0, end - caches.window), end))
    for layer in caches.targets + caches.stages:
        wanted = reference.stacked[seed, "window", layer][positions]
        assert same(engine, caches.window_rows(layer, slot, positions), wanted), f"window of layer {layer} before {end}"
    for layer, ratio in caches.partials.items():
        recent = list(range(end // ratio * ratio, end))
        wanted = reference.stacked[seed, "partial", layer][recent]
        assert same(engine, caches.partial_rows(layer, slot, recent), wanted), f"open group of layer {layer} before {end}"
    for layer, ratio in caches.sources.items():
        fresh = range(checked[seed] // ratio, end // ratio)
        wanted = reference.stacked[seed, "entry", layer][fresh.start : fresh.stop]
        assert same(engine, caches.entry_rows(layer, table, fresh), wanted), f"entries of layer {layer} before {end}"
    checked[seed] = end


def poison(caches: Caches, value: float) -> None:
    """Spoil everything that no later row may read: rows beyond what is committed, and memory that nobody holds."""
    storage, running = caches.storage, list(caches.running())
    free_slots = set(range(storage.num_slots)) - {slot for _, slot, _ in running}
    held = {block for _, _, table in running for block in table}
    free_blocks = [block for block in range(storage.num_blocks) if block not in held]
    for layer in caches.targets + caches.stages:
        rings = storage.window(layer)
        rings[list(free_slots)] = value
        # a row sees its window, itself included; a draft block sees a whole window before it
        length = caches.window - (layer in caches.targets)
        for request, slot, _ in running:
            end = request.num_computed_tokens
            rings[slot, outside(rings.shape[1], range(max(0, end - length), end))] = value
    for layer, ratio in caches.partials.items():
        rings = storage.partial(layer).unflatten(0, (storage.num_slots, -1))
        rings[list(free_slots)] = value
        for request, slot, _ in running:
            end = request.num_computed_tokens
            rings[slot, outside(rings.shape[1], range(end // ratio * ratio, end))] = value
    for layer, ratio in caches.sources.items():
        per_block = BLOCK_TOKENS // ratio
        beyond = [block * per_block + i for block in free_blocks for i in range(per_block)]
        for request, _, table in running:
            beyond += caches.entry_index(layer, table, range(request.num_computed_tokens // ratio, len(table) * per_block))
        storage.entries(layer)[beyond] = value
        storage.index_keys(layer)[beyond] = value


def outside(size, positions):
    kept = {position % size for position in positions}
    return [i for i in range(size) if i not in kept]


# Kernels may drop a NaN among keys (its weight is no number, hence none), so a large value is tried too.
POISON = [("torch", NAN), ("auto", NAN), ("auto", 1e3)]


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize(("backend", "value"), POISON)
@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_nothing_beyond_the_accepted_position_is_read(checkpoint_of, preset, backend, value, acceptance):
    if (preset, backend) == ("deep", "torch"):
        pytest.skip("the same code as for micro, slowly")
    outputs = []
    common = {"speculation": 3, "num_threads": 1, "max_num_seqs": 5, "num_blocks": 6, "max_num_batched_tokens": 48}
    for poisoned in (False, True):
        engine = Engine(checkpoint_of(preset), EngineConfig(overlap=False, acceptance=acceptance, backend=backend, **common))
        rng = random.Random(1)
        for i in range(7):
            params = SamplingParams(temperature=i % 2, seed=i, max_tokens=25, ignore_eos=True, logprobs=0, detokenize=False)
            engine.add([rng.randrange(11, 400) for _ in range((3, 16, 17, 120, 126, 40, 60)[i])], params)
        caches, done = Caches(engine), {}
        while engine.has_unfinished:
            if poisoned:
                poison(caches, value)
            for output in engine.step():
                done[output.request_id] = (output.outputs[0].token_ids, output.outputs[0].logprobs, output.error)
        outputs.append(done)
    assert outputs[0] == outputs[1]
    assert all(error is None and len(tokens) == 25 for tokens, _, error in outputs[1].values())
    assert sum(place.accepted for place in engine.stats.speculation.places) > 0


@pytest.mark.parametrize(("backend", "value"), [("torch", NAN), ("auto", 1e3)])
def test_poison_reaches_what_is_read(checkpoint_of, backend, value):
    """It would be noticed one row further in: with the newest committed row of one layer spoilt, output breaks."""
    outcomes = []
    for poisoned in (False, True):
        settings = EngineConfig(overlap=False, speculation=3, num_threads=1, num_blocks=4, max_num_seqs=2, backend=backend)
        engine, done = Engine(checkpoint_of("micro"), settings), []
        params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True, detokenize=False)
        engine.add(list(range(20, 60)), params)
        caches = Caches(engine)
        while engine.has_unfinished:
            for request, slot, _ in caches.running():
                ring = caches.storage.window(caches.targets[0])[slot]
                if poisoned:
                    ring[(request.num_computed_tokens - 1) % len(ring)] = value
            done += engine.step()
        outcomes.append((done[-1].error, done[-1].outputs[0].token_ids))
    assert outcomes[0] != outcomes[1]
    assert outcomes[0][0] is None
