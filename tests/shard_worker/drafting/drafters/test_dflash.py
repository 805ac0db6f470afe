"""The DFlash draft against a dense restatement of its formulas in float64, which sees the whole context every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from shard_worker.cache import attention_cache
from shard_worker.drafting.choosers.dspark import LEAST_CHANCE
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.drafting.drafters import drafter_of
from shard_worker.drafting.drafters.dflash import DFlashDraft, DFlashState, read_fc
from shard_worker.model.features import Features
from shard_worker.weights.opening import open_checkpoint
from shard_worker.weights.weight import DenseWeight
from tests.combinations import covering
from tests.reference import storage
from tests.reference.dense_draft import DenseDraft, DraftOutput
from tests.reference.draft_checkpoints import DFLASH2, DOMINO, DSPARK
from tests.shard_worker.tiny import AS_GPU, YARN, Tiny, load_draft

HIDDEN, BLOCK, KNOWN = 64, 8, 17
FULL, SLIDING = "full_attention", "sliding_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "full-causal": {"is_causal": True, "form": "nested"},
    "biases": {"attention_bias": True, "is_causal": False},
    "sliding": {"layer_types": (SLIDING, FULL), "sliding_window": 10},
    "sliding-causal": {"layer_types": (SLIDING, FULL), "sliding_window": 10, "is_causal": True},
    "sliding-non-causal": {"layer_types": (SLIDING, SLIDING), "sliding_window": 10, "is_causal": False},
    "window-below-block": {"layer_types": (FULL, SLIDING), "sliding_window": 5, "is_causal": False},
    "window-1": {"layer_types": (SLIDING, SLIDING), "sliding_window": 1},
    "rope_parameters": {"form": "rope_parameters", "rope_theta": 3e4},
    "yarn": {"rope_scaling": YARN},
    "speculators": {"form": "speculators", "layer_types": (SLIDING, FULL), "sliding_window": 10},
    "speculators-non-causal": {
        "form": "speculators",
        "layer_types": (SLIDING, FULL),
        "sliding_window": 10,
        "is_causal": False,
    },
    "three-captures": {"target_layer_ids": (2, 0, 3), "layers": 3, "kv_heads": 4},
    "short-rope": {"max_positions": 16},
    "reduced": {"form": "speculators", "token_ids": range(1, 256, 3)},
    "dflash2": {
        "own": DFLASH2 | {"conv_kernel_size": 3, "conv_group_size": 32},
        "layer_types": (SLIDING, SLIDING),
        "sliding_window": 10,
        "is_causal": False,
    },
    "dspark": {"own": DSPARK, "block_size": 7},
}
REDUCED: dict[str, Any] = {"form": "speculators", "token_ids": range(1, 256, 3)}
CHOOSERS: dict[str, dict[str, Any]] = {
    "dflash2": SHAPES["dflash2"],
    "dflash2-biases": {"own": DFLASH2, "form": "speculators", "attention_bias": True},
    "dspark": SHAPES["dspark"],
    "dspark-gated": {"own": DSPARK | {"markov_head_type": "gated"}, "block_size": 7, **REDUCED},
    "dspark-rnn": {"own": DSPARK | {"markov_head_type": "rnn"}, "block_size": 7},
    "domino": {"own": DOMINO, "block_size": 7},
    "domino-whole": {"own": DOMINO | {"pure_draft_prefix_len": 0, "shift_label": False}},
    "domino-reduced": {"own": DOMINO | {"pure_draft_prefix_len": 2, "shift_label": False}, **REDUCED},
}
"""Drafts that choose each token by those before it in the block."""
CONFIDENT = DSPARK | {"enable_confidence_head": True}
CLOSE = {"rtol": 0.0, "atol": 3e-5}
MakePair = Callable[[str], tuple[DFlashDraft, DenseDraft]]


@pytest.fixture(scope="module")
def make_pair(tiny: Tiny) -> MakePair:
    """A draft and its dense restatement, by the name of its shape."""
    pairs: dict[str, tuple[DFlashDraft, DenseDraft]] = {}

    def make(name: str) -> tuple[DFlashDraft, DenseDraft]:
        if name not in pairs:
            path = tiny.draft("qwen3", name, **(SHAPES | CHOOSERS)[name])
            pairs[name] = load_draft(path), DenseDraft(path)
        return pairs[name]

    return make


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


EMBEDDING, HEAD = random(256, HIDDEN, seed=1), random(256, HIDDEN, seed=2) / 4


def context(draft: DFlashDraft, length: int) -> torch.Tensor:
    """Joined captures of `length` tokens."""
    return random(length, HIDDEN * len(draft.config.capture_layers), seed=3)


@torch.no_grad()
def feed(draft: DFlashDraft, state: DFlashState, joined: torch.Tensor, *, summed: bool = False) -> None:
    """Append joined captures, as slices or as the sum that the stages make of them."""
    if summed:
        draft.append([state], [len(joined)], Features(total=draft.fc.matmul(joined)))
    else:
        draft.append([state], [len(joined)], Features(slices=dict(enumerate(joined.split(HIDDEN, -1)))))


@torch.no_grad()
def propose(draft: DFlashDraft, state: DFlashState, draft_tokens: int = BLOCK - 1) -> torch.Tensor:
    return draft.propose([state], EMBEDDING[[KNOWN, draft.config.mask_token_id]], [draft_tokens])


def assert_dense(own: torch.Tensor, expected: DraftOutput) -> None:
    """Hidden rows and the logits that the target's head makes of them."""
    torch.testing.assert_close(own.double(), expected.hidden, **CLOSE)
    torch.testing.assert_close((own @ HEAD.T).double(), expected.logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("length", [0, 1, 4, 11, 18, 19, 70])
def test_a_block_is_the_dense_formula(make_pair: MakePair, name: str, length: int) -> None:
    """Hidden rows and logits are the formulas' for every shape, before and after windows have ended."""
    draft, dense = make_pair(name)
    joined = context(draft, length)
    state = draft.allocate(100)
    if length:
        feed(draft, state, joined)

    own = propose(draft, state)

    assert_dense(own, dense.forward(joined, EMBEDDING, HEAD, KNOWN))


@pytest.mark.parametrize(
    ("name", "pieces", "summed"),
    covering(product(SHAPES, [(70,), (1,) * 70, (40, 1, 1, 8, 3, 17), (5, 65)], [True, False])),
)
def test_a_context_may_come_in_pieces_and_as_a_sum(
    make_pair: MakePair, name: str, pieces: Sequence[int], summed: bool
) -> None:
    """At once or in any pieces, as slices or as their sum after `fc`, one context gives one block."""
    draft, dense = make_pair(name)
    joined = context(draft, 70)
    state = draft.allocate(100)
    for piece in joined.split(list(pieces)):
        feed(draft, state, piece, summed=summed)

    own = propose(draft, state)

    assert state.length == 70
    assert_dense(own, dense.forward(joined, EMBEDDING, HEAD, KNOWN))


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_along_a_growing_context(make_pair: MakePair, name: str) -> None:
    """Shorter blocks after longer ones, and contexts that grow by any part of a block, read no row left behind."""
    draft, dense = make_pair(name)
    joined = context(draft, 76)
    state = draft.allocate(76)
    feed(draft, state, joined[:3])
    grown = [1, 8, 2, 1, 5, 8, 1, 1, 3, 8, 8, 2, 1, 7, 1, 8, 8]
    blocks = [7, 7, 1, 7, 2, 3, 7, 6, 1, 7, 4, 7, 1, 2, 7, 5, 7]
    for rows, draft_tokens in zip(grown, blocks, strict=True):
        expected = dense.forward(joined[: state.length], EMBEDDING, HEAD, KNOWN, rows=draft_tokens + 1)
        assert_dense(propose(draft, state, draft_tokens), expected)
        feed(draft, state, joined[state.length : state.length + rows])

    assert state.length == 76
    assert_dense(propose(draft, state), dense.forward(joined, EMBEDDING, HEAD, KNOWN))


@torch.no_grad()
def test_a_reduced_vocabulary_has_a_head_of_its_own(make_pair: MakePair) -> None:
    """Draft tokens are those of the checkpoint's lm_head, by the map that says which of the target's tokens it has."""
    draft, dense = make_pair("reduced")
    state, joined, proposed = draft.allocate(100), context(draft, 70), set[int]()
    known_tokens = dense.tensors["t2d"].nonzero().flatten()
    assert draft.own_head is not None
    for piece in joined.split(1):
        feed(draft, state, piece)

        [own] = draft.own_head.choose(propose(draft, state), [KNOWN], [BLOCK - 1])

        expected = dense.forward(joined[: state.length], EMBEDDING, dense.tensors["lm_head.weight"], KNOWN)
        assert list(own) == known_tokens[expected.logits.argmax(-1)].tolist()
        proposed.update(own)
    assert len(proposed) > 10


def head_of(draft: DFlashDraft) -> DraftHead:
    """The draft's own head, or the target's with its chooser."""
    assert draft.chooser is not None
    return draft.own_head or DraftHead(DenseWeight(HEAD), chooser=draft.chooser)


def embedding(token_ids: tuple[int, ...]) -> torch.Tensor:
    return EMBEDDING[list(token_ids)]


@torch.no_grad()
@pytest.mark.parametrize("name", CHOOSERS)
def test_tokens_are_chosen_by_those_before_them(make_pair: MakePair, name: str) -> None:
    """Along a context, draft tokens are those of the dense walk, of which many are not the most probable ones, and so
    are those of shorter blocks."""
    draft, dense = make_pair(name)
    state, joined, overruled = draft.allocate(40), context(draft, 16), 0
    matrix = dense.tensors.get("lm_head.weight", HEAD)
    for count, piece in enumerate(joined.split(1)):
        feed(draft, state, piece)
        tokens = BLOCK - 1 - count % 3
        expected = dense.forward(joined[: state.length], EMBEDDING, matrix, KNOWN, rows=tokens + 1)

        [own] = head_of(draft).choose(propose(draft, state, tokens), [KNOWN], [tokens], embedding)

        assert list(own) == dense.choose(expected, KNOWN, EMBEDDING)
        plain = expected.logits.argmax(-1)
        named = plain + dense.tensors["d2t"][plain].long() if "d2t" in dense.tensors else plain
        overruled += sum(int(a != b) for a, b in zip(own, named.tolist(), strict=True))
    assert 16 < overruled < 16 * (BLOCK - 1)


@torch.no_grad()
@pytest.mark.parametrize("with_token", [True, False])
def test_a_block_ends_where_it_is_unlikely_to_be_accepted(tiny: Tiny, with_token: bool) -> None:
    """DSpark's blocks have the tokens that they have without the confidence head, as many as it says, one at least."""
    own = CONFIDENT | {"confidence_head_with_markov": with_token}
    path = tiny.draft("qwen3", f"confident-{with_token}", own=own, block_size=7)
    draft, dense, lengths = load_draft(path), DenseDraft(path), set()
    state, joined = draft.allocate(40), context(draft, 16)
    for piece in joined.split(1):
        feed(draft, state, piece)
        expected = dense.forward(joined[: state.length], EMBEDDING, HEAD, KNOWN)
        every = dense.choose(expected, KNOWN, EMBEDDING)
        likely = [chance >= LEAST_CHANCE for chance in dense.chances(expected, KNOWN, every)]

        [found] = head_of(draft).choose(propose(draft, state), [KNOWN], [BLOCK - 1])

        assert list(found) == every[: max(1, sum(likely))]
        lengths.add(len(found))
    assert len(lengths) > 1


def test_dflash2_without_its_own_parts_is_dflash(tiny: Tiny, tmp_path: Path) -> None:
    """With convolutions that leave rows as they are, and a selector whose tables are zero, both give the same hidden
    rows and tokens to the last bit."""

    def without(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "_conv." in name or "_codebook" in name:
                tensor.zero_()
            if name.endswith("base_kernel"):
                tensor[:, 0] = 1.0

    reduced, plain = (
        loaded_after(tiny, tmp_path, without, "dflash2"),
        load_draft(tiny.draft("qwen3", "as-dflash2", **(SHAPES["dflash2"] | {"own": None}))),
    )
    joined, hidden, tokens = context(plain, 30), [], []
    for draft in (reduced, plain):
        state = draft.allocate(40)
        feed(draft, state, joined)
        hidden.append(propose(draft, state))
        tokens.append(head_of(draft).choose(hidden[-1], [KNOWN], [BLOCK - 1]))

    assert torch.equal(*hidden)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (lambda tensors: tensors.pop("d2t"), "d2t", "is missing"),
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight", "is missing"),
        (
            lambda tensors: tensors["d2t"].add_(80),
            "d2t",
            "leads to tokens 81 to 333; those of the target are below 256",
        ),
        (lambda tensors: tensors["d2t"].sub_(2), "d2t", "leads to tokens -1 to 251"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"].float()), "d2t", "F32"),
    ],
)
def test_a_map_of_tokens_that_does_not_fit_is_refused(
    tiny: Tiny, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], field: str, words: str
) -> None:
    """A reduced vocabulary without its head, without its map or with one beyond the target's tokens is no draft."""
    with pytest.raises(InvalidArgument) as caught:
        loaded_after(tiny, tmp_path, change, "reduced")

    assert caught.value.where["field"] == field
    assert words in caught.value.message


@pytest.mark.parametrize("name", ["full", "sliding", "sliding-non-causal", "window-1"])
@pytest.mark.parametrize("length", [3, 30])
def test_a_proposal_leaves_the_context_as_it_was(make_pair: MakePair, name: str, length: int) -> None:
    """Blocks proposed and dropped in between change no later block by a single bit."""
    draft, _ = make_pair(name)
    joined = context(draft, length + 5)
    touched, untouched = draft.allocate(60), draft.allocate(60)
    for state in (touched, untouched):
        feed(draft, state, joined[:length])

    first = propose(draft, touched)
    assert torch.equal(propose(draft, touched), first)
    for draft_tokens in (7, 2, 5):
        propose(draft, touched, draft_tokens)
    for state in (touched, untouched):
        feed(draft, state, joined[length:])

    assert torch.equal(propose(draft, touched), propose(draft, untouched))


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_over_whole_caches(tiny: Tiny, make_pair: MakePair, name: str) -> None:
    """With the fixed shapes of a GPU, where empty slots are masked, blocks are the same along a growing context."""
    _, dense = make_pair(name)
    draft = load_draft(tiny.draft("qwen3", name, **SHAPES[name]), device=AS_GPU)
    joined = context(draft, 45)
    state = draft.allocate(60)
    for length, draft_tokens in ((1, 7), (6, 3), (20, 7), (23, 1), (45, 7)):
        feed(draft, state, joined[state.length : length])
        expected = dense.forward(joined[:length], EMBEDDING, HEAD, KNOWN, rows=draft_tokens + 1)
        assert_dense(propose(draft, state, draft_tokens), expected)


def test_sessions_do_not_share_their_context(make_pair: MakePair) -> None:
    """Two sessions on one draft, fed in turn, each see their own context."""
    draft, dense = make_pair("sliding")
    joined = [context(draft, 30), context(draft, 30).flip(0)]
    states = [draft.allocate(50), draft.allocate(50)]
    for first in range(0, 30, 10):
        for state, own in zip(states, joined, strict=True):
            feed(draft, state, own[first : first + 10])
            propose(draft, state)

    for state, own in zip(states, joined, strict=True):
        assert_dense(propose(draft, state), dense.forward(own, EMBEDDING, HEAD, KNOWN))


def test_what_a_block_depends_on(make_pair: MakePair) -> None:
    """The order of the captures, each one of them, the known token and the context's last row all matter."""
    draft, _ = make_pair("full")
    joined = context(draft, 20)
    first, second = joined.split(HIDDEN, -1)
    variants = [joined, torch.cat((second, first), -1), torch.cat((first, first), -1), joined[:19]]
    blocks = []
    for variant in variants:
        state = draft.allocate(50)
        feed(draft, state, variant)
        blocks.append(propose(draft, state, 3))
    with torch.no_grad():
        blocks.append(draft.propose([state], EMBEDDING[[KNOWN + 1, draft.config.mask_token_id]], [3]))

    for index, block in enumerate(blocks):
        for other in blocks[:index]:
            assert (block - other).abs().max() > 1e-2


@pytest.mark.parametrize("step", [1, 300])
def test_a_sliding_layer_keeps_no_more_than_it_can_see(make_pair: MakePair, step: int) -> None:
    """What is behind a sliding layer's window gives its memory back as the context grows, and is not even stored where
    many rows come at once; its blocks are the dense formula's all the same."""
    draft, dense = make_pair("sliding")
    state, joined = draft.allocate(4000), context(draft, 600)
    for rows in joined.split(step):
        feed(draft, state, rows)
    sliding, full = (state.caches[kind] for kind, _ in state.layers)
    most = 10 + attention_cache.CUT_ROWS + attention_cache.PAGE_ROWS
    assert sliding.size_bytes * 600 == full.size_bytes * (600 - sliding.first)
    assert 600 - sliding.first <= most
    assert sliding.shortest <= 600 - attention_cache.CUT_ROWS
    assert_dense(propose(draft, state), dense.forward(joined, EMBEDDING, HEAD, KNOWN))


def test_a_draft_may_run_in_another_dtype(tiny: Tiny) -> None:
    """A bfloat16 checkpoint with biases runs in float32 on demand, where it is the dense formula."""
    path = tiny.draft("qwen3", "bf16", dtype="bfloat16", attention_bias=True)
    draft, dense = load_draft(path, "float32"), DenseDraft(path)
    joined = context(draft, 20)
    state = draft.allocate(50)
    feed(draft, state, joined)

    assert_dense(propose(draft, state), dense.forward(joined, EMBEDDING, HEAD, KNOWN))
    assert load_draft(path).dtype == torch.bfloat16


# --- loading


def loaded_after(
    tiny: Tiny, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], shape: str = "full"
) -> DFlashDraft:
    """A draft whose tensors were changed."""
    path = tmp_path / "draft"
    storage_copy(tiny.draft("qwen3", shape, **SHAPES[shape]), path)
    storage.edit_tensors(path, change)
    return load_draft(path)


def storage_copy(source: Path, path: Path) -> None:
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())


def test_other_spellings_and_copies_of_the_target_are_taken(tiny: Tiny, tmp_path: Path) -> None:
    """Known aliases are read, and copies of the target's embedding and head are left alone."""

    def respell(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "midlayer.", 1)] = tensors.pop(name)
        tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
        tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
        tensors["embed_tokens.weight"] = torch.zeros(256, HIDDEN)
        tensors["lm_head.weight"] = torch.zeros(256, HIDDEN)

    respelt, plain = loaded_after(tiny, tmp_path, respell), load_draft(tiny.draft("qwen3", "full"))

    joined, blocks = context(plain, 9), []
    for draft in (respelt, plain):
        state = draft.allocate(20)
        feed(draft, state, joined)
        blocks.append(propose(draft, state))
    assert torch.equal(*blocks)
    assert respelt.weight_bytes == plain.weight_bytes


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda tensors: tensors.pop("layers.1.self_attn.k_norm.weight"), "layers.1.self_attn.k_norm.weight"),
        (lambda tensors: tensors.update({"layers.0.attention_conv.weight": torch.zeros(2)}), "layers.0.attention_conv"),
        (lambda tensors: tensors.update({"d2t": torch.zeros(10)}), "d2t"),
        (lambda tensors: tensors.update({"layers.2.mlp.up_proj.weight": torch.zeros(2, 2)}), "layers.2.mlp.up_proj"),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(64, 192)}), "fc.weight"),
        (lambda tensors: tensors.update({"norm.weight": torch.zeros(32)}), "norm.weight"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tiny: Tiny, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], field: str
) -> None:
    """Missing, unknown and mis-shaped tensors are refused by name, the width of the captures among them."""
    with pytest.raises(InvalidArgument) as caught:
        loaded_after(tiny, tmp_path, change)

    assert caught.value.where["field"].startswith(field)
    assert field in caught.value.message


def test_a_config_for_more_captures_than_fc_has_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """The number of captured blocks in the config must be the number that `fc` has columns for."""
    path = tmp_path / "draft"
    storage_copy(tiny.draft("qwen3", "full"), path)
    storage.edit_config(path, lambda config: config["dflash_config"].update(target_layer_ids=[0, 1, 2]))

    with pytest.raises(InvalidArgument, match=r"fc\.weight has shape \[64, 128\].*\[64, 192\]"):
        load_draft(path)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"architectures": ["DominoDraftModel"], "dflash_config": None}, InvalidArgument, "gru_hidden_dim is None"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "dflash_config": None}, Unimplemented, "known kinds: dflash"),
        ({"architectures": ["LlamaForCausalLM"], "dflash_config": None}, Unimplemented, "LlamaForCausalLM"),
        ({"architectures": None, "dflash_config": None}, Unimplemented, "none"),
        ({"architectures": ["DFlash2DraftModel"]}, InvalidArgument, "selector_rank is None"),
    ],
)
def test_a_draft_of_another_kind_is_refused_by_name(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any], kind: type[FlashsplitError], words: str
) -> None:
    """A checkpoint that isn't a DFlash draft is refused with what it is and what is known."""
    path = tmp_path / "draft"
    storage_copy(tiny.draft("qwen3", "full"), path)
    storage.write_config(
        path, {key: value for key, value in (storage.read_config(path) | changes).items() if value is not None}
    )

    with pytest.raises(kind, match=words):
        load_draft(path)


def test_stages_read_the_fc_alone(tiny: Tiny) -> None:
    """A target stage gets the draft's shape and `fc` without loading anything else."""
    path = tiny.draft("qwen3", "three-captures", **SHAPES["three-captures"])
    checkpoint = open_checkpoint(path, "--draft")

    config, fc = read_fc(checkpoint)

    assert drafter_of(checkpoint).read_fc is read_fc
    assert config.capture_layers == (2, 0, 3)
    assert torch.equal(fc, storage.load_tensors(path)["fc.weight"])
