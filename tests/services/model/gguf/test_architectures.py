"""What a GGUF file says of a model, against the checkpoint that it was made of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, strategies as st

from services.errors import FlashsplitError, InvalidArgument, Unimplemented
from services.model.checkpoint_files import model_name, read_config, read_headers
from services.model.families import read_model_config
from services.model.target_tensors import TargetTensors, target_shapes
from services.model.text_files import GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, find_text_file
from tests.reference import checkpoints, storage
from tests.reference.gguf_files import all_of, q4_k_m, write_gguf

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False}
WRITERS: dict[str, Callable[[Path], Path]] = {
    "qwen3": lambda path: checkpoints.write_qwen3(path, layers=2, rope_theta=1e6, vocab=320),
    "qwen3-tied": lambda path: checkpoints.write_qwen3(path, layers=1, tied=True, kv_heads=1),
    "llama": lambda path: checkpoints.write_llama(path, head_dim=16, attention_bias=True),
    "qwen3_5": lambda path: checkpoints.write_qwen3_5(path, layers=4, linear_value_heads=6, nested=True, extras=True),
    "qwen3_moe": checkpoints.write_qwen3_moe,
    "qwen3_5_moe": checkpoints.write_qwen3_5_moe,
    "qwen3_next": checkpoints.write_qwen3_next,
    "gpt_oss": lambda path: checkpoints.write_gpt_oss(path, mlp=32, limit=7.0, rope_scaling=YARN),
    "gemma3": lambda path: checkpoints.write_gemma3(path, layers=7, pattern=6, scalar=16, stretched=True, cap=8.0),
    "gemma4": lambda path: checkpoints.write_gemma4(path, older=True),
    "gemma4-untied": lambda path: checkpoints.write_gemma4(path, older=True, tied=False, keys_as_values=False),
    "gemma4-experts": lambda path: checkpoints.write_gemma4(path, older=True, experts=8),
    "gemma4-sharing": lambda path: checkpoints.write_gemma4(
        path, older=True, layers=6, sharing=2, wide_mlp=True, per_layer=32
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_configuration_and_tensors_are_the_checkpoints(tmp_path: Path, name: str) -> None:
    checkpoint = WRITERS[name](tmp_path / name)
    path = write_gguf(
        checkpoint, tmp_path / "model.gguf", all_of("Q8_0"), joined=name in ("qwen3_next", "gemma4-experts")
    )
    raw = read_config(path)
    config, expected = read_model_config(raw), read_model_config(storage.read_config(checkpoint))
    assert replace(config, dtype=None) == replace(expected, dtype=None)
    text = storage.read_config(checkpoint).get("text_config", storage.read_config(checkpoint))
    assert raw["eos_token_id"] == text["eos_token_id"]

    headers = read_headers(path, raw, "--model")
    # Divisors of RoPE's frequencies are read as configuration.
    shapes = {name: header.shape for name, header in headers.items() if name != "rope_freqs.weight"}
    assert shapes == target_shapes(config)
    tensors = TargetTensors(config, headers, path)
    assert [len(tensors.layer(layer)) > 0 for layer in range(config.num_layers)]
    experts = config.experts is not None
    end = "experts.7.up_proj.weight" if experts else "mlp.up_proj.weight"
    [matrix] = [header for name, header in headers.items() if name.startswith("model.layers.0.") and name.endswith(end)]
    assert matrix.packed is not None
    assert (matrix.code, matrix.packed.bits, matrix.packed.group) == ("Q8_0", 8, 32)
    assert matrix.packed.stored_bytes == (32 if experts else 128) * 64 // 32 * 34


def write(path: Path, architecture: str, change: Callable[[gguf.GGUFWriter], None] = lambda writer: None) -> Path:
    """Write the header of a model of one layer, and its embedding alone."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    change(writer)
    writer.add_tensor("token_embd.weight", np.ones((8, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_gemma4_heads(writer: gguf.GGUFWriter, kv_heads: list[int], divisors: Sequence[float] = ()) -> None:
    """Add the sizes of Gemma 4's heads."""
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(8)
    writer.add_key_length_swa(4)
    writer.add_sliding_window(16)
    if divisors:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))


@pytest.mark.parametrize(
    ("architecture", "change", "error", "reason"),
    [
        (
            "mamba",
            lambda writer: None,
            Unimplemented,
            "general.architecture 'mamba' is not supported: known .* qwen3",
        ),
        (
            "qwen35",
            lambda writer: None,
            InvalidArgument,
            "qwen35.ssm.time_step_rank is missing; it must be a",
        ),
        (
            "qwen3",
            lambda writer: writer.add_string("qwen3.attention.head_count_kv", "2"),
            InvalidArgument,
            "qwen3.attention.head_count_kv is '2'; it must be a whole number of at least 1",
        ),
        (
            "qwen3",
            lambda writer: writer.add_key_value("qwen3.block_count", 2**31, gguf.GGUFValueType.UINT32),
            InvalidArgument,
            "block_count is 2147483648, but the file has 1 tensors in all",
        ),
        (
            "qwen3",
            lambda writer: writer.add_rope_freq_base(float("nan")),
            InvalidArgument,
            "qwen3.rope.freq_base is 'nan'; it must be a number above 0",
        ),
        (
            "qwen3moe",
            lambda writer: writer.add_expert_count(2**31),
            InvalidArgument,
            "expert_count is 2147483648, but blk.0.ffn_down_exps.weight is missing; it must be .experts, rows,",
        ),
        (
            "gemma3",
            lambda writer: writer.add_sliding_window_pattern([True, False]),
            InvalidArgument,
            "gemma3.attention.sliding_window_pattern is '.True, False.'; it must be true or false for each of 1 layers",
        ),
        (
            "gemma4",
            lambda writer: add_gemma4_heads(writer, [2, 1]),
            InvalidArgument,
            "gemma4.attention.head_count_kv is '.2, 1.'; it must be a whole number of at least 1 for each of 1 layers",
        ),
        (
            "gemma4",
            lambda writer: add_gemma4_heads(writer, [2]),
            InvalidArgument,
            "attention.head_count_kv is .2.; it must be one number for all full layers, and one for all sliding ones",
        ),
        (
            "gemma4",
            lambda writer: add_gemma4_heads(writer, [2], divisors=[1, 2, 1e30, 1e30]),
            InvalidArgument,
            "rope_freqs.weight must be 4 numbers, 1 for the first ones and at least 1e9 for all behind these",
        ),
    ],
)
def test_what_cannot_be_served_is_said(
    tmp_path: Path,
    architecture: str,
    change: Callable[[gguf.GGUFWriter], None],
    error: type[FlashsplitError],
    reason: str,
) -> None:
    with pytest.raises(error, match=f"model.gguf: {reason}"):
        read_config(write(tmp_path / "model.gguf", architecture, change))


def test_scaled_positions_are_the_familys_to_refuse_or_take(tmp_path: Path) -> None:
    def scale(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)

    config = read_config(write(tmp_path / "model.gguf", "qwen3", scale))
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }


def test_types_and_tensors_that_are_unknown_are_named(tmp_path: Path) -> None:
    checkpoint = checkpoints.write_qwen3(tmp_path / "qwen3", layers=1)
    path = write_gguf(checkpoint, tmp_path / "model.gguf", all_of("F32"))
    config = read_config(path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.attn_k_norm.weight", b"blk.0.attn_k_nose.weight"))
    headers = read_headers(path, config, "--model")
    with pytest.raises(InvalidArgument, match=r"tensor model.layers.0.self_attn.k_norm.weight is missing"):
        TargetTensors(read_model_config(config), headers, path).layer(0)

    wide = checkpoints.write_qwen3(tmp_path / "wide", layers=1, hidden=256, mlp=256)
    path = write_gguf(
        wide, tmp_path / "wide.gguf", lambda name, _: "TQ2_0" if name.endswith("up_proj.weight") else "F32"
    )
    with pytest.raises(Unimplemented, match=r"tensor blk.0.ffn_up.weight in .*wide.gguf is of type TQ2_0, which is"):
        read_headers(path, read_config(path), "--model")


@given(data=st.data())
def test_damaged_files_end_in_a_description_or_in_an_error(data: st.DataObject, tokens_file: Path) -> None:
    """Numbers that are other numbers, too: what follows from them stays small."""
    content = bytearray(tokens_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 1600))
        piece = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 4), st.just(bytes(8))))
        content[at : at + len(piece)] = piece
    path = tokens_file.with_name("damaged.gguf")
    path.write_bytes(content)
    with contextlib.suppress(FlashsplitError):
        config = read_config(path)
        headers = read_headers(path, config, "--model")
        read_model_config(config)
        assert all(header.stored_bytes(name) <= len(content) for name, header in headers.items())
    for name in (TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG):
        with contextlib.suppress(FlashsplitError):
            find_text_file(path, name)


@pytest.fixture(scope="module")
def tokens_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of one hybrid layer with a small tokenizer."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(16)
        writer.add_ssm_group_count(2)
        writer.add_ssm_time_step_rank(4)
        writer.add_ssm_inner_size(64)
        writer.add_rope_dimension_count(8)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["a", "b", "ab", "<|im_end|>"])
        writer.add_token_types([1, 1, 1, 3])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(3)
        writer.add_chat_template("{{ messages }}")

    return write(tmp_path_factory.mktemp("damaged") / "model.gguf", "qwen35", add)


def test_a_directory_of_files_says_which_to_name(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "qwen3")
    with pytest.raises(InvalidArgument, match=f"has no config.json but GGUF files: name one, like {path}"):
        read_config(tmp_path)


def test_a_file_is_called_by_its_name_without_its_place_among_several(tmp_path: Path) -> None:
    assert model_name(Path("/models/Qwen3-0.6B-Q4_K_M.gguf")) == "Qwen3-0.6B-Q4_K_M"
    assert model_name(Path("/models/Qwen3-Q4_K_M-00001-of-00003.gguf")) == "Qwen3-Q4_K_M"
    assert model_name(Path("/models/Qwen3-0.6B")) == "Qwen3-0.6B"
    checkpoint = checkpoints.write_qwen3(tmp_path / "qwen3", layers=1, hidden=256, mlp=256)
    whole = write_gguf(checkpoint, tmp_path / "whole.gguf", q4_k_m)
    write_gguf(checkpoint, tmp_path / "split.gguf", q4_k_m, split_max_tensors=5)
    first = next(iter(sorted(tmp_path.glob("split-00001-of-*.gguf"))))
    assert read_headers(first, read_config(first), "--model") == read_headers(whole, read_config(whole), "--model")
