"""Weights in and out: round trips, files that `transformers` loads, and errors that name names."""

import json
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from fastask_jax.model import init_params, load_params, make_mesh, save_params
from fastask_jax.model.directories import replaced_directory

INDEX = "model.safetensors.index.json"


def draw(cfg):
    """Parameters of plausible sizes, without compiling anything."""
    random = np.random.default_rng(3)
    abstract = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))

    def leaf(keys, shape):
        if len(shape) - (keys[0].key == "blocks") == 1:
            return random.uniform(0.5, 1.5, shape).astype(np.float32)
        return random.normal(0, 0.15, shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(lambda keys, x: leaf(keys, x.shape), abstract)


@pytest.fixture(scope="module")
def params(small):
    return draw(small)


@pytest.fixture
def saved(small, params, tmp_path):
    save_params(tmp_path, small, params)
    return tmp_path


@pytest.fixture
def sharded(small, params, tmp_path):
    save_params(tmp_path / "sharded", small, params, max_shard_bytes=10_000)
    return tmp_path / "sharded"


def overrides(cfg):
    """The fields that a Hugging Face config doesn't hold."""
    names = ("dtype", "delta_chunk", "moe_implementation", "scan_unroll", "remat")
    return {name: getattr(cfg, name) for name in names}


def equal(tree, other):
    return jax.tree.structure(tree) == jax.tree.structure(other) and jax.tree.all(
        jax.tree.map(np.array_equal, tree, other)
    )


def test_round_trip_is_exact(small, params, saved):
    cfg, loaded = load_params(saved, **overrides(small))
    # Fields that play no part in a model without dense layers aren't written.
    assert cfg == small
    assert equal(loaded, params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(loaded))


def test_bfloat16_halves_the_file_and_keeps_the_vectors(small, params, saved, tmp_path):
    low = tmp_path / "low"
    save_params(low, small, params, dtype="bfloat16")
    sizes = [(path / "model.safetensors").stat().st_size for path in (low, saved)]
    assert sizes[0] < 0.65 * sizes[1]
    _, loaded = load_params(low)
    mixer = loaded["blocks"]["layer_0"]["mixer"]
    np.testing.assert_array_equal(mixer["a_log"], params["blocks"]["layer_0"]["mixer"]["a_log"])
    np.testing.assert_allclose(loaded["embedding"], params["embedding"], rtol=1e-2)
    with pytest.raises(ValueError, match="dtype must be"):
        save_params(low, small, params, dtype="int8")
    with pytest.raises(ValueError, match="max_shard_bytes must be"):
        save_params(low, small, params, max_shard_bytes=0)
    huge = params | {"embedding": np.array(params["embedding"])}
    huge["embedding"][0, 0] = 3.4e38
    with pytest.raises(ValueError, match="embed_tokens.weight has weights too large for bfloat16"):
        save_params(tmp_path / "huge", small, huge, dtype="bfloat16")
    assert not (tmp_path / "huge").exists()


def test_parameters_may_be_bfloat16(small, params, saved):
    _, loaded = load_params(saved, param_dtype="bfloat16")
    mixer, exact = loaded["blocks"]["layer_0"]["mixer"], params["blocks"]["layer_0"]["mixer"]
    for name, leaf in mixer.items():
        vector = name in ("a_log", "dt_bias", "norm")
        assert leaf.dtype == (np.float32 if vector else ml_dtypes.bfloat16), name
        np.testing.assert_array_equal(leaf, exact[name].astype(leaf.dtype))
    assert loaded["embedding"].dtype == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match="param_dtype must be float32 or bfloat16"):
        load_params(saved, param_dtype="float16")
    with pytest.raises(ValueError, match="a mesh or shardings, not both"):
        load_params(saved, mesh=make_mesh(devices=jax.devices()[:1]), shardings={})


def test_half_precision_files_are_read(small, params, saved):
    edit(saved, lambda tensors: tensors.update({k: v.astype("e") for k, v in tensors.items()}))
    _, loaded = load_params(saved)
    half = jax.tree.map(lambda leaf: leaf.astype(np.float16).astype(np.float32), params)
    assert equal(loaded, half)


def test_shards_are_small_and_listed(small, params, sharded):
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    index = json.loads((sharded / INDEX).read_text())
    assert set(index["weight_map"].values()) == set(files)
    total = 0
    for name in files:
        # Read by the safetensors package: the files are what it takes them for.
        with safe_open(sharded / name, framework="np") as file:
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]
            assert all(index["weight_map"][key] == name for key in file.keys())
            assert file.metadata() == {"format": "pt"}
        assert sum(sizes) <= 10_000 or len(sizes) == 1
        total += sum(sizes)
    assert total == index["metadata"]["total_size"]
    assert equal(load_params(sharded)[1], params)


def test_what_is_replaced_and_what_is_kept(small, params, sharded):
    (sharded / "tokenizer.json").write_text("{}")
    changed = jax.tree.map(lambda leaf: leaf + 1, params)
    save_params(sharded, small, changed, extras=lambda path: (path / "more").write_text("x"))
    found = sorted(path.name for path in sharded.iterdir())
    assert found == ["config.json", "model.safetensors", "more", "tokenizer.json"]
    assert equal(load_params(sharded)[1], changed)
    assert [path.name for path in sharded.parent.iterdir()] == ["sharded"]


def test_a_directory_that_holds_more_than_a_model_is_left_alone(small, params, saved):
    (saved / "data").mkdir()
    with pytest.raises(FileExistsError, match="holds the directory data"):
        save_params(saved, small, params)
    with pytest.raises(NotADirectoryError, match="is a file"):
        save_params(saved / "config.json", small, params)
    assert equal(load_params(saved)[1], params)


def test_an_error_or_a_kill_leaves_the_earlier_model(small, params, sharded):
    def fail(path):
        assert (path / "model.safetensors").exists()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        save_params(sharded, small, jax.tree.map(lambda leaf: leaf + 1, params), extras=fail)
    assert [path.name for path in sharded.parent.iterdir()] == ["sharded"]
    assert equal(load_params(sharded)[1], params)
    # What kills leave behind: a half-written model, and one between the two renames.
    (sharded.parent / ".sharded.partial").mkdir()
    sharded.rename(sharded.parent / ".sharded.old")
    (sharded.parent / ".sharded.old" / "tokenizer.json").write_text("{}")
    save_params(sharded, small, params)
    assert (sharded / "tokenizer.json").exists()
    assert [path.name for path in sharded.parent.iterdir()] == ["sharded"]


def test_replaced_directory_is_of_use_to_others(tmp_path):
    with replaced_directory(tmp_path / "a" / "b", ours=["adapter*"]) as folder:
        (folder / "adapter.json").write_text("1")
        assert not (tmp_path / "a" / "b").exists()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["adapter.json"]


def edit(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_missing_surplus_and_misshapen_tensors_are_named(saved):
    name = "model.layers.1.mlp.gate.weight"
    edit(saved, lambda tensors: tensors.update({name: tensors[name][:2].copy()}))
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 24\), expected \(4, 24\)"):
        load_params(saved)
    edit(saved, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"missing tensors: {name}"):
        load_params(saved)
    edit(saved, lambda tensors: tensors.update({name: np.ones((4, 24), np.float32)}))
    edit(saved, lambda tensors: tensors.update({"model.extra": np.ones(3, np.float32)}))
    with pytest.raises(ValueError, match="surplus tensors: model.extra"):
        load_params(saved)


def test_skipped_tensors_are_named(saved, params, caplog):
    edit(saved, lambda tensors: tensors.update({"mtp.norm.weight": np.ones(3, np.float32)}))
    assert equal(load_params(saved)[1], params)
    assert "no use for: mtp.norm.weight" in caplog.text


def test_a_stored_tied_head_must_be_the_embedding(saved, params):
    head = np.asarray(params["embedding"])
    edit(saved, lambda tensors: tensors.update({"lm_head.weight": head}))
    load_params(saved)
    edit(saved, lambda tensors: tensors.update({"lm_head.weight": head + 1}))
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        load_params(saved)


def test_files_that_are_missing_or_broken(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        load_params(tmp_path / "nowhere")
    weights = saved / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="model.safetensors is cut short: it has"):
        load_params(saved)
    for broken in (b"", b"not a tensor file", whole[:100], struct.pack("<Q", 2**60), b"\0" * 8):
        weights.write_bytes(broken)
        with pytest.raises(ValueError, match="model.safetensors can't be read"):
            load_params(saved)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load_params(saved)
    for text, message in (
        ("{", "isn't valid JSON"),
        ("[]", "holds no object"),
        ('{"model_type": "llama", "model_type": "qwen3"}', "has model_type twice"),
        ("[" * 100_000, "nested too deeply"),
    ):
        (saved / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_params(saved)


def with_header(header, data=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "header, message",
    [
        ([], "can't be read"),
        ({"x": 1}, "can't be read"),
        ({"x": {"dtype": "F32", "shape": [2]}}, "can't be read"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "doesn't fill the bytes"),
        ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, "isn't one"),
    ],
)
def test_headers_that_make_no_sense(saved, header, message):
    (saved / "model.safetensors").write_bytes(with_header(header, b"\0" * 64))
    with pytest.raises(ValueError, match=message):
        load_params(saved)


def test_an_unsupported_type_is_named(saved):
    name = "model.norm.weight"
    edit(saved, lambda tensors: tensors.update({name: tensors[name].astype(np.int8)}))
    with pytest.raises(ValueError, match=f"{name} in .* has type I8; supported are F32, F16, BF16"):
        load_params(saved)


def test_an_index_that_contradicts_the_files(sharded):
    index = json.loads((sharded / INDEX).read_text())
    name, file = next(iter(index["weight_map"].items()))

    def write(**change):
        (sharded / INDEX).write_text(json.dumps(index | change))

    write(weight_map=index["weight_map"] | {name: "model-00002-of-00002.safetensors"})
    with pytest.raises(FileNotFoundError, match="points to model-00002-of-00002.safetensors"):
        load_params(sharded)
    write(weight_map=index["weight_map"] | {"x": file})
    with pytest.raises(ValueError, match=f"says that {file} holds x, but it doesn't"):
        load_params(sharded)
    write(weight_map=index["weight_map"] | {name: "../secret"})
    with pytest.raises(ValueError, match="isn't the name of a file there"):
        load_params(sharded)
    for broken in ("{", "{}", "[]", '{"weight_map": 3}'):
        (sharded / INDEX).write_text(broken)
        with pytest.raises(ValueError, match="isn't an index of safetensors files"):
            load_params(sharded)
    write()
    (sharded / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"points to {file}, which is missing"):
        load_params(sharded)


def test_a_tensor_in_two_files_is_refused(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors = load_file(first)
    save_file(load_file(second) | tensors, second)
    with pytest.raises(ValueError, match="is in both"):
        load_params(sharded)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("label", ["tiny", "llama3_rope", "qwen3", "qwen3_moe", "qwen3_5"])
def test_transformers_loads_what_we_save(references, tmp_path, logits_of, label):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    cfg = references.CONFIGS[label]
    # What transformers writes is what we read,
    model, _ = references.torch_model(cfg)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / INDEX).exists()
    loaded, params = load_params(tmp_path / "theirs", **overrides(cfg))
    # and what we write is what it reads.
    save_params(tmp_path / "ours", loaded, params, max_shard_bytes=20_000)
    assert (tmp_path / "ours" / INDEX).exists()
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 33))
    with torch.no_grad():
        expected, got = (m(torch.from_numpy(tokens)).logits.numpy() for m in (model, again))
    np.testing.assert_array_equal(got, expected)
    if label == "llama3_rope":  # test_parity compares our logits with theirs for all families
        np.testing.assert_allclose(logits_of(cfg, params, tokens), expected, atol=1e-5)


@pytest.mark.parametrize("kind", [np.asarray, jax.numpy.asarray])
def test_weights_that_are_not_finite_are_not_saved(small, params, kind, tmp_path):
    bad = jax.tree.map(kind, params | {"embedding": np.full_like(params["embedding"], np.nan)})
    with pytest.raises(ValueError, match="NaN or infinity in 1 of .* arrays, embedding first"):
        save_params(tmp_path / "policy", small, bad)
    assert not any(tmp_path.iterdir())
