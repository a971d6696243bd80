"""The drafter against two independent public implementations, and what its rows may and may not see."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from abyssal.backends.cpu.table import cpu_table
from abyssal.cache.spec import CacheSpec
from abyssal.cache.storage import CacheStorage
from abyssal.config.engine import EngineConfig, Numerics
from abyssal.config.model import ModelConfig
from abyssal.config.topology import Topology
from abyssal.core.batch import ScheduledRows, SchedulerOutput, SlotAssignment
from abyssal.core.sampling_params import SamplingParams
from abyssal.loading.names import expected_tensors
from abyssal.loading.open import open_weights
from abyssal.model.common import ModelContext
from abyssal.model.dspark import DSpark
from abyssal.model.flash import FlashModel
from abyssal.runner.input_batch import BatchGeometry, InputBatch
from abyssal.text.vocabulary import token_map_of

SLOT, BLOCKS = 1, (3, 5, 1)


class RecordingWeights:
    """Notes every name that was asked for."""

    def __init__(self, weights):
        self._weights, self.names = weights, set()

    def matrix(self, name):
        self.names |= {name, f"{name}.weight", f"{name}.scale"}
        return self._weights.matrix(name)

    def dense(self, name):
        self.names.add(name)
        return self._weights.dense(name)

    def engram_table(self, name):
        self.names |= {f"{name}.weight", f"{name}.scale"}
        return self._weights.engram_table(name)


class Loaded:
    """Target and drafter of one checkpoint."""

    def __init__(self, folder, numerics, backend):
        self.config = ModelConfig.load(folder)
        settings = EngineConfig(numerics=numerics, weights="decoded", engram="memory")
        self.weights = RecordingWeights(open_weights(folder, self.config, settings))
        table = cpu_table(backend, 1)
        ctx = ModelContext(self.config.text, Numerics.parse(numerics), table, "decoded", self.weights)
        self.topology = Topology.of(self.config.text)
        self.flash = FlashModel(ctx, self.topology, torch.from_numpy(token_map_of(folder, self.config.text)))
        self.drafter = DSpark(ctx, self.flash.embed, self.flash.head)

    def sequence(self, token_ids):
        return Sequence(self, token_ids)


@dataclass
class Sequence:
    """One sequence in slot 1, fed piece by piece."""

    loaded: Loaded
    token_ids: list[int]
    num_computed: int = 0
    features: torch.Tensor | None = None
    storage: CacheStorage = field(init=False)

    def __post_init__(self):
        config = self.loaded.config.text
        spec = CacheSpec.of(config, self.loaded.topology, with_drafts=True)
        self.storage = CacheStorage(spec, 8, 2)
        self.storage.fill(float("nan"))
        self._inputs = InputBatch(BatchGeometry.of(config, spec, self.loaded.topology, 2, 384))
        self._inputs.assign(SlotAssignment("r", SLOT, tuple(self.token_ids), SamplingParams(), 0))

    @torch.inference_mode()
    def feed(self, until):
        """Compute the rows up to position `until`, exclusively."""
        if until > self.num_computed:
            blocks = BLOCKS if not self.num_computed else ()
            rows = ScheduledRows("r", SLOT, self.num_computed, until - self.num_computed, 0, blocks, False)
            batch = self._inputs.gather(SchedulerOutput((), (rows,)), frozenset())
            features = []
            self.loaded.flash.forward(batch, self.storage, features)
            self.features = torch.cat(features, 1)
            self.loaded.drafter.observe(self.features, batch, self.storage)
            self.num_computed = until

    @torch.inference_mode()
    def draft(self, previous=None):
        """The block whose anchor is the next token, chained by `previous` or by its own best tokens."""
        drafter, start = self.loaded.drafter, self.num_computed
        anchor = torch.tensor([self.token_ids[start]], dtype=torch.int32)
        batch = drafter.batch(anchor, torch.tensor([start], dtype=torch.int32), torch.tensor([SLOT], dtype=torch.int32))
        block = drafter.propose(batch, self.storage)

        def choose(k, logits):
            if previous is None or k + 1 == len(previous):
                return logits.argmax(1).to(torch.int32)
            return previous[k + 1 : k + 2]

        return block, drafter.chain(block, anchor, drafter.block_size, choose)

    def windows(self):
        """Rows of all stages in this slot, [stages, ring, D]."""
        text = self.loaded.config.text
        stages = range(text.num_hidden_layers, text.num_hidden_layers + text.num_nextn_predict_layers)
        return torch.stack([self.storage.window(layer)[SLOT] for layer in stages])


@pytest.fixture(scope="module")
def loaded_of(checkpoint_of):
    cache = {}

    def make(preset, numerics="exact", backend="auto"):
        key = (preset, numerics, backend)
        if key not in cache:
            cache[key] = Loaded(checkpoint_of(preset), numerics, backend)
        return cache[key]

    return make


def error(got, wanted):
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_golden(loaded_of, golden_of, preset, backend):
    golden = golden_of(preset)
    sequence = loaded_of(preset, "exact", backend).sequence(golden["input_ids"].tolist())
    for i, anchor in enumerate(golden["dspark.anchor_positions"].tolist()):
        sequence.feed(anchor)
        block, chain = sequence.draft(golden["dspark.previous_ids"][i])
        assert error(block.base_logits[0], golden["exact.dspark.base_logits"][i]) < 1e-4
        assert error(chain.logits[0], golden["exact.dspark.draft_logits"][i]) < 1e-4
        torch.testing.assert_close(
            torch.sigmoid(chain.confidence[0]), golden["exact.dspark.confidence"][i], rtol=1e-4, atol=1e-6
        )
    sequence.feed(len(sequence.token_ids))
    assert error(sequence.features[-1], golden["exact.dspark.features_last"]) < 1e-5


def test_golden_with_rounded_windows(loaded_of, golden_of):
    """Block rows are rounded like window rows are; leaving that out is seen at once."""
    golden = golden_of("micro")
    sequence = loaded_of("micro", "window").sequence(golden["input_ids"].tolist())
    sequence.feed(1)
    block, _ = sequence.draft()
    assert error(block.base_logits[0], golden["window.dspark.base_logits"][1]) < 1e-5
    assert error(block.base_logits[0], golden["exact.dspark.base_logits"][1]) > 1e-3


@pytest.mark.parametrize("preset", ["micro", "deep"])
def test_every_tensor_of_the_text_model_and_the_drafter_is_loaded(loaded_of, preset):
    loaded = loaded_of(preset)
    wanted = {name for name, spec in expected_tensors(loaded.config).items() if spec.part != "vision"}
    left = wanted - loaded.weights.names
    assert all(name.endswith("gate.bias_vl") for name in left), sorted(left)


def test_rows_see_each_other_in_both_directions(loaded_of):
    sequence = loaded_of("micro").sequence(list(range(20, 60)))
    sequence.feed(30)
    drafter = sequence.loaded.drafter
    start = torch.tensor([30], dtype=torch.int32)
    slot = torch.tensor([SLOT], dtype=torch.int32)
    batch = drafter.batch(torch.tensor([50], dtype=torch.int32), start, slot)
    before = drafter.propose(batch, sequence.storage).hidden[0, 0].clone()
    batch.token_ids[-1] = 77
    assert not torch.allclose(drafter.propose(batch, sequence.storage).hidden[0, 0], before, rtol=1e-3)


@pytest.mark.parametrize("start", [5, 16, 17, 40, 55])
def test_the_window_is_that_before_the_anchor(loaded_of, start):
    """Positions start - W .. start - 1 are read, by every row; anything else in the ring may be lost."""
    sequence = loaded_of("micro").sequence(list(range(20, 90)))
    sequence.feed(start)
    window, ring = sequence.loaded.config.text.sliding_window, sequence.windows().shape[1]
    wanted, _ = sequence.draft()
    read = {p % ring for p in range(max(0, start - window), start)}
    stages = sequence.windows()
    for layer in range(stages.shape[0]):
        rows = sequence.storage.window(sequence.loaded.config.text.num_hidden_layers + layer)[SLOT]
        rows[[i for i in range(ring) if i not in read]] = float("nan")
    block, _ = sequence.draft()
    assert torch.equal(block.hidden, wanted.hidden)
    first = sequence.storage.window(sequence.loaded.config.text.num_hidden_layers)[SLOT]
    first[max(0, start - window) % ring] += 1.0
    block, _ = sequence.draft()
    assert ((block.hidden - wanted.hidden).norm(dim=-1) > 1e-4 * wanted.hidden.norm(dim=-1)).all()


@pytest.mark.parametrize("preset", ["micro", "deep"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_windows_do_not_depend_on_how_the_text_was_cut(loaded_of, preset, chunk):
    ids = [(37 * i) % 390 + 11 for i in range(150)]
    whole, pieces = (loaded_of(preset).sequence(ids) for _ in range(2))
    whole.feed(len(ids))
    for end in range(chunk, len(ids) + chunk, chunk):
        pieces.feed(min(end, len(ids)))
    text = whole.loaded.config.text
    ring = whole.windows().shape[1]
    rows = [p % ring for p in range(len(ids) - text.sliding_window, len(ids))]
    assert error(pieces.windows()[:, rows], whole.windows()[:, rows]) < 1e-5


def test_a_bias_depends_on_the_token_before(loaded_of):
    """Place k is biased by the token drawn at k - 1, the first by the anchor."""
    sequence = loaded_of("micro").sequence(list(range(20, 60)))
    sequence.feed(20)
    block, chain = sequence.draft()
    drafter = sequence.loaded.drafter
    weights = sequence.loaded.weights
    last = sequence.loaded.config.text.num_nextn_predict_layers - 1
    embed = weights.matrix(f"mtp.{last}.markov_head.embed").data.double()
    head = weights.matrix(f"mtp.{last}.markov_head.head").data.double()
    previous = [sequence.token_ids[20], *chain.token_ids[0, :-1].tolist()]
    for k, token in enumerate(previous):
        wanted = block.base_logits[0, k].double() + head @ embed[token]
        torch.testing.assert_close(chain.logits[0, k].double(), wanted, rtol=1e-5, atol=1e-5)
    assert drafter.block_size == len(previous)
