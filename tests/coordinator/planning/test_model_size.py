"""Sizes from headers: those of what a worker loads and allocates, to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from coordinator.planning.draft_size import read_draft_size
from coordinator.planning.memory import Models, cache_bytes, draft_share, stage_shares
from coordinator.planning.model_size import read_model_size
from services.errors import DataLoss, InvalidArgument, NotFound, Unimplemented
from services.layers import LayerRange
from services.messages.description import FeatureTransport, HeadPlace
from services.model.cached_tensors import PAGE_ROWS
from services.model.quantization import Quantization, QuantizedTo
from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.cache.recurrent_cache import RecurrentCache
from shard_worker.device.devices import parse_devices
from shard_worker.drafting.drafters import drafter_of
from shard_worker.drafting.drafters.dflash import DFlashDraft
from shard_worker.model.layer_weights import ExpertsWeights, matrices_of
from shard_worker.stage.loader import CaptureRequest, HeldWeights, StageLoader
from shard_worker.stage.stage import Stage
from shard_worker.weights.opening import open_checkpoint
from shard_worker.weights.weight import Weight
from tests.reference import checkpoints, storage
from tests.reference.draft_checkpoints import DFLASH2
from tests.reference.packed_checkpoints import write_packed
from tests.shard_worker.packed import CASES
from tests.shard_worker.tiny import AS_GPU

Pairs = dict[str, tuple[Path, Path]]
CPU = parse_devices("cpu")


def load(
    path: Path,
    layers: LayerRange,
    dtype: str | None,
    capture: CaptureRequest | None = None,
    kv_dtype: str | None = None,
) -> Stage:
    return StageLoader(open_checkpoint(path), layers, dtype, kv_dtype).load(CPU, capture, lambda loaded, total: None)


def allocated(cache: AttentionCache | RecurrentCache | None) -> int:
    if cache is None:
        return 0
    if isinstance(cache, AttentionCache):
        return sum(page.nbytes for page in cache.pages)
    return sum(value.nbytes for value in vars(cache).values() if hasattr(value, "nbytes"))


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_moe"])
def test_stages_take_what_is_said(pairs: Pairs, family: str, dtype: str | None, kv_dtype: str | None) -> None:
    """Weights and caches of every stage of a split and of the whole, as a worker has them."""
    path, draft = pairs[family]
    target = read_model_size(path, dtype, kv_dtype)
    assert target.kv_dtype == (kv_dtype or target.dtype)
    models = Models(target, read_draft_size(draft, target, dtype), transport=FeatureTransport.SLICES)
    count = len(target.layers)
    for layers in (LayerRange(0, 2), LayerRange(2, count - 1), LayerRange(count - 1, count), LayerRange(0, count)):
        stage = load(path, layers, dtype, kv_dtype=kv_dtype)
        (share,) = stage_shares(models, layers, 1, draft_here=False)
        assert share.weight_bytes == stage.weight_bytes

        state = stage.allocate(100, models.block_rows)
        held = sum(allocated(caches.attention) + allocated(caches.recurrent) for caches in state.caches)
        for caches in state.caches:
            caches.reserve(100)
        assert state.size_bytes == held
        assert cache_bytes(models, share, 100, 1) == held
        assert cache_bytes(models, share, 100, 3) == 3 * held


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("quantization", [None, Quantization(QuantizedTo.INT4)])
def test_experts_in_the_hosts_memory_are_counted_apart(
    pairs: Pairs, share: float, quantization: Quantization | None
) -> None:
    """On a GPU what is left there, beside it what a CPU takes for them; on a CPU nothing changes."""
    path, _ = pairs["qwen3_moe"]
    models = Models(read_model_size(path, None, quantization=quantization), None)
    for layers in (LayerRange(0, 2), LayerRange(1, 4), LayerRange(0, 4)):
        checkpoint = open_checkpoint(path, quantization=quantization)
        loader = StageLoader(checkpoint, layers, None, host_experts=share)
        (share_of,) = stage_shares(models, layers, 1, draft_here=False, host_experts=share)

        stage = loader.load([AS_GPU], None, lambda loaded, total: None)
        assert share_of.bytes_on("cuda:0") == stage.weight_bytes
        assert share_of.left_bytes == stage.host_weight_bytes > 0
        on_cpu = [weights.mlp for weights in stage.segments[0].weights]
        held = [
            matrix.nbytes
            for mlp in on_cpu
            if isinstance(mlp, ExpertsWeights)
            for expert in mlp.experts[: mlp.in_host]
            for matrix in (expert.gate_up, expert.down)
        ]
        assert share_of.bytes_beside("cuda:0") == sum(held)
        (plain,) = stage_shares(models, layers, 1, draft_here=False)
        assert (share_of.bytes_on("cpu"), share_of.bytes_beside("cpu")) == (plain.bytes_on("cpu"), 0)
        again = loader.load([AS_GPU], None, lambda loaded, total: None, held=HeldWeights.of(stage, layers))
        assert again.layer_bytes == stage.layer_bytes
        assert again.host_weight_bytes == stage.host_weight_bytes


def test_stages_of_layers_that_share_keys_take_what_is_said(tmp_path: Path) -> None:
    """Two sizes of keys, layers without any, and inputs of each layer, whose table stays in the file."""
    path = checkpoints.write_gemma4(tmp_path, layers=6, sharing=2, per_layer=8, experts=4)
    models = Models(read_model_size(path, None), None)
    assert models.target.last_cut == 2
    for layers in (LayerRange(0, 2), LayerRange(2, 6), LayerRange(0, 6)):
        stage = load(path, layers, None)
        (share,) = stage_shares(models, layers, 1, draft_here=False)
        assert share.weight_bytes == stage.weight_bytes
        [caches] = stage.allocate(100, models.block_rows).caches
        caches.reserve(100)
        assert cache_bytes(models, share, 100, 1) == sum(allocated(cache) for cache in caches.attentions)


def test_what_sliding_layers_give_back_is_not_counted(tmp_path: Path) -> None:
    """Their caches as a session grows, and what a step reads of them."""
    target = read_model_size(checkpoints.write_gemma3(tmp_path, layers=6, window=40), None)
    models, layers = Models(target, None), LayerRange(0, 6)
    assert [layer.window for layer in target.layers] == [40, 40, None] * 2
    [caches] = load(tmp_path, layers, None).allocate(4000, models.block_rows).caches
    (share,) = stage_shares(models, layers, 1, draft_here=False)
    most, token_bytes = 0, target.layers[0].token_bytes
    for length in range(1, 4001):
        caches.reserve(length)
        caches.free_unseen(length)
        most = max(most, caches.size_bytes)
        if length in (1, 500, 550, 806, 3878):
            # Pages are counted whole, and the four layers' rows on a CPU come and go one by one.
            unused = 0 if length <= 550 else 4 * token_bytes * PAGE_ROWS
            assert most <= cache_bytes(models, share, length, 1) <= most + unused
            assert [layer.context_bytes(length) for layer in target.layers[1:3]] == [
                token_bytes * min(length, 40),
                token_bytes * length,
            ]


def matrices(parts: object) -> Iterator[Weight]:
    """All matrices among the fields of a layer's weights."""
    if isinstance(parts, Weight):
        yield parts
    elif is_dataclass(parts):
        for field in fields(parts):
            yield from matrices(getattr(parts, field.name))


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_step_reads_the_matrices_that_are_said(pairs: Pairs, family: str, dtype: str | None) -> None:
    """Layer by layer and at the head, the bytes that a one-row step is said to read are those of the real matrices."""
    path, _ = pairs[family]
    target = read_model_size(path, dtype)
    stage = load(path, LayerRange(0, len(target.layers)), dtype)

    held = [sum(weight.nbytes for weight in matrices(layer)) for layer in stage.segments[0].weights]
    assert held == [layer.read_bytes for layer in target.layers]
    assert stage.head is not None
    assert stage.head.weight.nbytes == target.head_bytes
    assert target.tied_head or (stage.embedding is not None and stage.embedding.nbytes == target.embedding_bytes)


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_drafts_take_what_is_said(pairs: Pairs, family: str, dtype: str | None) -> None:
    """A draft's weights and its caches below, at and above a sliding window; what it captures, and where."""
    path, directory = pairs[family]
    target = read_model_size(path, dtype)
    size = read_draft_size(directory, target, dtype)
    draft = drafter_of(open_checkpoint(directory)).load(
        open_checkpoint(directory), CPU[0], dtype, lambda loaded, total: None
    )

    assert size.cpu_bytes == draft.weight_bytes
    assert (size.capture_layers, size.block_size) == (draft.config.capture_layers, draft.config.block_size)
    for length in (1, 31, 200, 542, 798, 2078):
        state, block = draft.allocate(length), draft.config.block_size
        sizes = []
        for end in range(1, length + block + 1):
            for cache in state.caches.values():
                cache.free_unseen(end - block)
                cache.reserve(end)
            sizes.append(state.size_bytes)
        row_bytes = size.cache_bytes(1) // (1 + block)
        # Pages of a layer that slides are counted whole, and rows on a CPU come and go one by one.
        unused = 0 if length <= 542 or draft.config.window is None else row_bytes * PAGE_ROWS
        assert max(sizes) <= size.cache_bytes(length) <= max(sizes) + unused


def test_a_selector_is_counted_where_logits_are_made(pairs: Pairs, tmp_path: Path) -> None:
    """Beside the draft's layers, or in the last stage where hidden rows go there; together it is as much."""
    path = pairs["qwen3"][0]
    directory = checkpoints.write_draft(tmp_path / "draft", path, own=DFLASH2)
    target = read_model_size(path, None)
    size, checkpoint, held = read_draft_size(directory, target, None), open_checkpoint(directory), {}
    for place in (HeadPlace.LOADED, HeadPlace.PROJECTED):
        models = Models(target, size, place)
        projected = place is HeadPlace.PROJECTED
        draft = drafter_of(checkpoint).load(checkpoint, CPU[0], None, lambda loaded, total: None, projected=projected)
        [stage] = stage_shares(models, LayerRange(0, 6), 1, draft_here=False)
        head = 0 if projected else target.draft_head_bytes(size.item_bytes, on_cpu=True)
        assert draft_share(models).cpu_bytes == draft.weight_bytes + head
        held[place] = stage.cpu_bytes
    chooser = drafter_of(checkpoint).load_chooser(checkpoint, CPU[0], "float32")
    assert held[HeadPlace.PROJECTED] - held[HeadPlace.LOADED] == chooser.nbytes == size.chooser_bytes > 0


def test_packed_drafts_take_what_is_said(pairs: Pairs, tmp_path: Path) -> None:
    """On a CPU, which multiplies by some matrices packed and by others unpacked, those of keys and values twice."""
    case = CASES["ct-4-zeros-32"]
    settings = case.settings | {"ignore": ["fc"]}
    path, dense = write_packed(pairs["qwen3"][1], tmp_path, settings, case.pack, case.which)
    target = read_model_size(pairs["qwen3"][0], None)
    sizes = {dtype: read_draft_size(path, target, dtype) for dtype in ("bfloat16", "float32")}
    for dtype, size in sizes.items():
        checkpoint = open_checkpoint(path)
        draft = drafter_of(checkpoint).load(checkpoint, CPU[0], dtype, lambda loaded, total: None)
        assert isinstance(draft, DFlashDraft)
        held = [draft.fc, *draft.context, *(matrix for layer in draft.layers for matrix in matrices_of(layer))]
        norms = sum(tensor.nbytes for tensor in storage.load_tensors(dense).values() if tensor.dim() == 1)
        assert size.cpu_bytes == sum(matrix.nbytes for matrix in held) + norms
    assert sizes["bfloat16"].weight_bytes < sizes["float32"].weight_bytes < sizes["float32"].cpu_bytes


def test_a_step_reads_the_experts_that_a_row_goes_through(pairs: Pairs) -> None:
    """Three of eight alike, beside attention and the router; a layer without experts is read whole."""
    target = read_model_size(pairs["qwen3_moe"][0], "float32")
    attention, expert, router, dense = 4 * 64 * (64 + 32 + 32 + 64), 4 * 3 * 64 * 32, 4 * 8 * 64, 4 * 3 * 64 * 128

    assert [layer.read_bytes for layer in target.layers[:2]] == [attention + router + 3 * expert, attention + dense]
    assert target.layers[0].weight_bytes > attention + router + 8 * expert


def test_captured_blocks_cost_their_columns_of_fc(pairs: Pairs) -> None:
    """A stage that sums features keeps fc's columns for its own captures; plain slices need none."""
    path, directory = pairs["qwen3"]
    target = read_model_size(path, "float32")
    draft = read_draft_size(directory, target, "float32")
    config, fc = drafter_of(open_checkpoint(directory)).read_fc(open_checkpoint(directory))
    for layers in (LayerRange(0, 3), LayerRange(3, 6)):
        stage = load(path, layers, "float32", CaptureRequest(config.capture_layers, fc))
        capture = stage.segments[0].capture
        columns = 0 if capture is None or capture.fc is None else capture.fc.nbytes
        summed, plain = (
            stage_shares(Models(target, draft, transport=kind), layers, 1, draft_here=False)[0].weight_bytes
            for kind in (FeatureTransport.SUM, FeatureTransport.SLICES)
        )
        assert summed - plain == columns


def test_several_devices_share_a_stage_as_the_worker_spreads_it(pairs: Pairs) -> None:
    """The embedding on the first, the head on the last, layers evenly; together what one device would hold and, where
    the two are one matrix, that once more."""
    path, _ = pairs["qwen3"]
    models = Models(read_model_size(path, None), None)
    whole = LayerRange(0, 6)
    (alone,) = stage_shares(models, whole, 1, draft_here=False)
    shares = stage_shares(models, whole, 4, draft_here=False)

    assert [len(share.layers or ()) for share in shares] == [1, 2, 1, 2]
    assert sum(share.weight_bytes for share in shares) == alone.weight_bytes + models.target.head_bytes
    assert alone.weight_bytes == models.target.weight_bytes
    with pytest.raises(InvalidArgument, match=r"layers \[0, 2\) cannot be spread over 3 devices"):
        stage_shares(models, LayerRange(0, 2), 3, draft_here=False)


def test_layers_are_counted_by_kind(pairs: Pairs) -> None:
    """Three linear layers to a full one; only the latter grow with the length."""
    size = read_model_size(pairs["qwen3_5"][0], None)

    kinds = [layer.kind for layer in size.layers]
    assert kinds == ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
    assert [layer.token_bytes > 0 for layer in size.layers] == [kind == "full_attention" for kind in kinds]
    assert [layer.state_bytes > 0 for layer in size.layers] == [kind == "linear_attention" for kind in kinds]


@pytest.fixture
def broken(pairs: Pairs, tmp_path: Path) -> Path:
    """A copy of a checkpoint in one file, to be damaged."""
    source = pairs["qwen3"][0]
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text((source / "config.json").read_text())
    storage.save_tensors(copy, storage.load_tensors(source), None)
    assert read_model_size(copy, None) == read_model_size(source, None)
    return copy


def test_damaged_files_are_refused(broken: Path) -> None:
    """Missing, cut off or no safetensors: the file is named."""
    weights = broken / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (b"", content[:100], b"\xff" * 64, b"\2\0\0\0\0\0\0\0[]"):
        weights.write_bytes(damaged)
        with pytest.raises(DataLoss, match=r"model\.safetensors cannot be read"):
            read_model_size(broken, None)
    weights.unlink()
    with pytest.raises(NotFound, match=r"model\.safetensors is missing"):
        read_model_size(broken, None)


@pytest.mark.parametrize(
    ("index", "text"), [({}, "no weight_map"), ({"weight_map": {"a": "../b"}}, "not a file of that directory")]
)
def test_a_senseless_index_is_refused(broken: Path, index: object, text: str) -> None:
    """An index without a map, or with one that leads out of the directory."""
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidArgument, match=text):
        read_model_size(broken, None)


@pytest.mark.parametrize(
    ("gone", "text"),
    [
        ("model.embed_tokens.weight", "embed_tokens"),
        ("model.norm.weight", r"model\.norm\.weight is missing"),
        ("model.layers.2.", r"model\.layers\.2\.input_layernorm\.weight is missing"),
    ],
)
def test_missing_tensors_are_named(broken: Path, gone: str, text: str) -> None:
    """What no decoder can lack."""

    def remove(tensors: dict[str, object]) -> None:
        for name in [name for name in tensors if name.startswith(gone)]:
            del tensors[name]

    storage.edit_tensors(broken, remove)
    with pytest.raises(InvalidArgument, match=text):
        read_model_size(broken, None)


def test_a_layer_of_another_kind_is_refused(broken: Path) -> None:
    """A tensor that the family has not is refused as a worker would refuse it."""

    def rename(tensors: dict[str, object]) -> None:
        tensors["model.layers.1.self_attn.kv_a_proj.weight"] = tensors.pop("model.layers.1.self_attn.k_proj.weight")

    storage.edit_tensors(broken, rename)
    with pytest.raises(InvalidArgument, match=r"model\.layers\.1\.self_attn\.k_proj\.weight is missing"):
        read_model_size(broken, None)


def test_quantised_weights_are_refused(broken: Path) -> None:
    """An element type that no worker serves."""
    weights = broken / "model.safetensors"
    content = weights.read_bytes()
    assert b'"BF16"' in content
    weights.write_bytes(content.replace(b'"BF16"', b'"F8E4"', 1))
    with pytest.raises(Unimplemented, match="stored as F8E4"):
        read_model_size(broken, None)


def test_a_draft_for_another_target_is_refused(pairs: Pairs, tmp_path: Path) -> None:
    """A target given as a draft, another hidden size, captures beyond the target's blocks."""
    target = read_model_size(pairs["qwen3"][0], None)
    with pytest.raises(Unimplemented, match=r"not a draft of a known kind \(architectures: \w+\); known kinds: dflash"):
        read_draft_size(pairs["qwen3"][0], target, None)
    narrow = read_model_size(checkpoints.write_qwen3(tmp_path / "narrow", hidden=32), None)
    with pytest.raises(InvalidArgument, match="another model than narrow: its hidden_size is 64, the target's 32"):
        read_draft_size(pairs["qwen3"][1], narrow, None)
    short = read_model_size(checkpoints.write_qwen3(tmp_path / "short", layers=2), None)
    with pytest.raises(InvalidArgument, match="than short: it captures block"):
        read_draft_size(pairs["qwen3"][1], short, None)
