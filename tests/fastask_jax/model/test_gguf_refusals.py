"""GGUF files that would load as another model than they are: metadata that this decoder doesn't
follow, and tensors that lie where they can't."""

import struct

import numpy as np
import pytest

from fastask_jax.model.gguf import GGUFFile

gguf = pytest.importorskip("gguf")

TENSORS = {
    "token_embd.weight": np.arange(48 * 16, dtype=np.float32).reshape(48, 16),
    "blk.0.attn_norm.weight": np.ones(20, np.float32),  # 80 bytes: padding follows
    "output_norm.weight": np.ones(16, np.float32),
}
FIELDS = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 16,
    "feed_forward_length": 32,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
ADD = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}


def write(path, change=()):
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (FIELDS | dict(change)).items():
        name = key if key.startswith("general.") else f"llama.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            getattr(writer, ADD[type(value)])(name, value)
    for name, value in TENSORS.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 8**-0.5,
    "attention.sliding_window": 0,
    "attention.value_length": 8,
    "embedding_scale": 1.0,
    "logit_scale": 0.0,
    "residual_scale": 1.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.factor": 1.0,
    "rope.scaling.finetuned": False,
    "rope.scaling.type": "none",
    "vocab_size": 48,
}


def test_neutral_metadata_changes_nothing(tmp_path):
    plain = GGUFFile(write(tmp_path / "plain.gguf")).hf_config()
    assert GGUFFile(write(tmp_path / "x.gguf", NEUTRAL)).hf_config() == plain


@pytest.mark.parametrize(
    "key, value",
    [
        ("attention.causal", False),
        ("attention.clamp_kqv", 1.0),
        ("attention.scale", 0.5),
        ("attention.sliding_window", 8),
        ("attn_logit_softcapping", 50.0),
        ("embedding_scale", 2.0),
        ("expert_weights_norm", False),
        ("logit_scale", 0.5),
        ("logit_scale", float("nan")),
        ("logit_scale", "1"),
        ("residual_scale", 0.5),
        ("rope.scale_linear", 4.0),
        ("rope.scaling.attn_factor", 0.5),
        ("rope.scaling.factor", 4.0),
        ("use_parallel_residual", True),
    ],
)
def test_metadata_that_changes_the_computation_is_refused(tmp_path, key, value):
    path = write(tmp_path / "x.gguf", {key: value})
    with pytest.raises(ValueError, match=rf"x.gguf: llama.{key} is {value!r}, which changes the"):
        GGUFFile(path).hf_config()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"vocab_size": 49}, r"vocab_size is 49, but only the number of rows of .* \(48\)"),
        ({"attention.head_count": 2.0}, "head_count is 2.0, not a number that is whole and at"),
        ({"attention.head_count": 0}, "head_count is 0, not a number that is whole and at least 1"),
        ({"attention.head_count_kv": [2]}, r"head_count_kv is \[2\], not a number that is whole"),
        ({"attention.head_count_kv": True}, "head_count_kv is True, not a number that is whole"),
        ({"block_count": 1.0}, "block_count is 1.0, not a number that is whole"),
        ({"rope.freq_base": 0.0}, "rope.freq_base is 0.0, not a number that is finite and above 0"),
        ({"rope.freq_base": float("inf")}, "rope.freq_base is inf, not a number that is finite"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "epsilon is 0.0, not a number that is finite"),
        ({"attention.layer_norm_rms_epsilon": "1e-5"}, "epsilon is '1e-5', not a number"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path, change, message):
    path = write(tmp_path / "x.gguf", change)
    with pytest.raises(ValueError, match=f"x.gguf: llama.*{message}"):
        GGUFFile(path).hf_config()


@pytest.mark.parametrize("value", [0, True, 32.0, "32"])
def test_a_senseless_alignment_is_refused(tmp_path, value):
    path = write(tmp_path / "x.gguf", {"general.alignment": value})
    with pytest.raises(ValueError, match=f"x.gguf .* general.alignment is {value!r}, not a whole"):
        GGUFFile(path)


@pytest.mark.parametrize(
    "name, offset",
    [
        ("output_norm.weight", 3),  # unaligned
        ("output_norm.weight", 0),  # over the embedding
        ("output_norm.weight", 48 * 64 + 64),  # over the tensor before it
        ("output_norm.weight", 48 * 64 + 128),  # behind a hole
        ("token_embd.weight", 32),  # over the tensor behind it
    ],
)
def test_tensors_lie_one_behind_another(tmp_path, name, offset):
    path = write(tmp_path / "x.gguf")
    whole = path.read_bytes()
    np.testing.assert_array_equal(GGUFFile(path).read("model.norm.weight"), np.ones(16))
    key = name.encode()
    at = whole.index(key) + len(key) + 4 + 8 * TENSORS[name].ndim + 4
    path.write_bytes(whole[:at] + struct.pack("<Q", offset) + whole[at + 8 :] + bytes(256))
    with pytest.raises(ValueError, match=f"x.gguf is corrupt: tensor {name} starts at .* fetch"):
        GGUFFile(path)
