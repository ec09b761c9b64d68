"""What a checkpoint is refused for: each with one line, before it is used, and none of its code ever runs."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from helpers.families import FAMILIES, LAYERS, build
from helpers.tiny import TEXTS, run, save_checkpoint
from skipdecode import Schedule, ScheduleError, SkipDecodeError, load, provenance
from skipdecode.data.tokenize import train_tokenizer
from skipdecode.errors import ModelError
from skipdecode.loading import device as device_module
from skipdecode.loading import load as loading
from skipdecode.model import config as checkpoint_config
from skipdecode.model.config import config_schedules, set_entry, to_config_entry

WEIGHTS = "model.safetensors"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that nothing is wrong with."""
    return save_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit(file: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")


def reweigh(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Write other weights."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})


def refused(folder: Path | str, match: str = ".", **options: Any) -> str:
    """The one line that loading ends with."""
    with pytest.raises(ModelError, match=match) as caught:
        load(str(folder), device="cpu", **options)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500
    return str(caught.value)


def outcome(folder: Path) -> str:
    """The line it is refused with, or that it was loaded."""
    try:
        checkpoint_config.schedule_for(loading.read_config(str(folder)))
        load(str(folder), device="cpu")
    except (ModelError, ScheduleError) as error:
        return str(error)
    return "loaded"


# --- F2: no code of a checkpoint runs


def spy(folder: Path, name: str) -> Path:
    """A module that leaves a mark where it is imported; the mark's path."""
    mark = folder.parent / "ran"
    (folder / f"{name}.py").parent.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(mark)!r}).touch()\n"
        "from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast\n"
        "class Config(OPTConfig):\n    model_type = 'spy'\n"
        "class Model(OPTForCausalLM):\n    config_class = Config\n"
        "class Tokens(PreTrainedTokenizerFast):\n    pass\n"
        "def generate(model, *args, **kwargs):\n    raise SystemExit\n",
        encoding="utf-8",
    )
    return mark


MAP = {"AutoConfig": "spy.Config", "AutoModelForCausalLM": "spy.Model", "AutoTokenizer": [None, "spy.Tokens"]}


@pytest.mark.parametrize("verb", ["generate", "check", "schedule"])
def test_code_of_a_checkpoint_is_refused_and_the_prompts_are_no_answer(model: Path, verb: str) -> None:
    """F2: transformers asks on standard input, where the prompts are, and on standard output, where the texts go."""
    mark = spy(model, "spy")
    edit(model / "config.json", model_type="spy", auto_map=MAP)
    done = run(verb, model, stdin=b"yes\nyes\nthe cat\n")
    assert (done.returncode, done.stdout, mark.exists()) == (2, "", False)
    assert "code of its own" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_code_beside_a_known_type_and_its_tokenizer_is_left_alone(model: Path) -> None:
    """F2: transformers' own classes are there, so nothing has to run."""
    mark = spy(model, "spy")
    spy(model, "custom_generate/generate")
    edit(model / "config.json", auto_map=MAP)
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": MAP["AutoTokenizer"]})
    done = run("generate", model, "--max-new-tokens", 2, stdin=b"the cat\nyes\n")
    assert (done.returncode, len(done.stdout.splitlines()), mark.exists()) == (0, 2, False)


def test_a_tokenizer_that_needs_code_is_refused(model: Path) -> None:
    """F2: of a class that transformers does not have."""
    mark = spy(model, "spy")
    edit(model / "config.json", model_type="gpt_neo")
    edit(
        model / "tokenizer_config.json",
        tokenizer_class="Tokens",
        auto_map={"AutoTokenizer": MAP["AutoTokenizer"]},
    )
    with pytest.raises(ModelError):
        loading.load_tokenizer(str(model))
    assert not mark.exists()


class Malice:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_pickle_is_never_run(model: Path, tmp_path: Path, protocol: int) -> None:
    """F2: neither as torch writes it nor bare."""
    (model / WEIGHTS).unlink()
    payload = {"model.decoder.embed_tokens.weight": Malice(tmp_path / "ran")}
    torch.save(payload, model / "pytorch_model.bin", pickle_protocol=protocol)
    refused(model, "never unpickled|cannot be loaded")
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(payload, protocol))
    refused(model, "never unpickled|cannot be loaded")
    assert not (tmp_path / "ran").exists()


# --- F11: the weights


def without(layer: int) -> Damage:
    """Leave a layer's weights out."""
    return lambda f: reweigh(f, lambda w: {k: v for k, v in w.items() if f".layers.{layer}." not in k})


def poison(value: float, layer: int = 3) -> Damage:
    """One bad number in one weight."""

    def change(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        weights[f"model.decoder.layers.{layer}.fc1.weight"][1, 2] = value
        return weights

    return lambda folder: reweigh(folder, change)


def scaled(dtype: torch.dtype) -> Damage:
    """Weights of a type, as large as it has them: finite, though their sum may not be."""
    return lambda f: reweigh(f, lambda w: {k: torch.full_like(v, 6e4).to(dtype) for k, v in w.items()})


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (without(3), r"16 weights are missing.*model\.decoder\.layers\.3\."),
        (lambda f: reweigh(f, lambda w: {f"x.{k}": v for k, v in w.items()}), "weights are missing"),
        (lambda f: reweigh(f, lambda w: {"a": torch.ones(1)}), "weights are missing"),
        (lambda f: edit(f / "config.json", num_hidden_layers=6), r"32 weights.*not used.*\.layers\.6\."),
        (lambda f: edit(f / "config.json", num_hidden_layers=12), r"64 weights are missing.*\.layers\.10\."),
        (lambda f: edit(f / "config.json", enable_bias=False), "not used"),
        (lambda f: edit(f / "config.json", ffn_dim=65), r"fc1\.\w+ has the shape .*64.*65"),
        (lambda f: edit(f / "config.json", vocab_size=400), r"embed_tokens\.weight has the shape .304, .*400"),
        (lambda f: edit(f / "config.json", vocab_size=10**8), "config describes .* weights"),
        (lambda f: edit(f / "config.json", tie_word_embeddings=False), r"lm_head\.weight"),
        (poison(float("nan")), r"layers\.3\.fc1\.weight.*not finite"),
        (poison(float("inf")), r"layers\.3\.fc1\.weight.*not finite"),
        (poison(float("-inf"), 7), r"layers\.7\.fc1\.weight.*not finite"),
    ],
)
def test_weights_must_all_be_there_all_be_used_and_be_numbers(model: Path, damage: Damage, match: str) -> None:
    """F11: transformers fills in what is missing at random, and says so in a table."""
    damage(model)
    refused(model, match)
    done = run("generate", model, "--max-new-tokens", 4, stdin=b"the cat\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert [line for line in done.stderr.splitlines() if line.startswith("skipdecode: ")]
    assert "LOAD REPORT" not in done.stderr


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: reweigh(f, lambda w: w | {"lm_head.weight": w["model.decoder.embed_tokens.weight"].clone()}),
        lambda f: reweigh(f, lambda w: {k.removeprefix("model."): v for k, v in w.items()}),
        lambda f: reweigh(f, lambda w: w | {"model.decoder.layers.0.attn.rotary_emb.inv_freq": torch.ones(3)}),
        lambda f: reweigh(f, lambda w: w | {"model.decoder.layers.0.attn.attention.bias": torch.ones(1, 1, 3, 3)}),
        lambda f: reweigh(f, lambda w: w | {"model.decoder.version": torch.ones(1)}),
        lambda f: reweigh(f, lambda w: {k: v.to(torch.bfloat16) for k, v in w.items()}),
        scaled(torch.float16),
        scaled(torch.float32),
    ],
)
def test_what_harms_nothing_is_loaded(model: Path, damage: Damage) -> None:
    """F11: tied heads, keys without the base model's name, buffers that are computed, large numbers."""
    damage(model)
    load(str(model), device="cpu")


def test_an_adapter_is_named(model: Path) -> None:
    """It would be put into the model unmerged, and unsaid."""
    (model / "adapter_config.json").write_text("{}")
    refused(model, "PEFT adapter: merge it first")


def test_what_belongs_to_no_decoder_is_named(model: Path) -> None:
    """F11: a value head or a vision tower is no part of a causal LM; that it was left out is said."""
    reweigh(model, lambda w: w | {"v_head.summary.weight": torch.ones(2)})
    with pytest.warns(UserWarning, match=r"v_head\.summary\.weight"):
        load(str(model), device="cpu")


def cut(count: int) -> Damage:
    """The last so many bytes of the weights go."""
    return lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-count])


def replace(name: str, data: bytes) -> Damage:
    """Write a file."""
    return lambda f: (f / name).write_bytes(data)


def folder_instead(folder: Path) -> None:
    """A folder of the file's name."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def sharded(files: dict[str, str]) -> Damage:
    """An index over shards, of which only those named exist."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        names = {key: files.get(key, "a.safetensors") for key in weights}
        index = {"metadata": {"total_size": 1}, "weight_map": names}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")

    return damage


BROKEN: dict[str, Damage] = {
    "empty": replace(WEIGHTS, b""),
    "cut in its header": lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:100]),
    "cut in its data": cut(1000),
    "one byte short": cut(1),
    "wrong length of header": lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 8 + (f / WEIGHTS).read_bytes()[8:]),
    "garbage": replace(WEIGHTS, bytes(range(256)) * 50),
    "zeros": replace(WEIGHTS, bytes(10_000)),
    "a folder": folder_instead,
    "gone": lambda f: (f / WEIGHTS).unlink(),
    "a shard is gone": sharded({"model.decoder.embed_tokens.weight": "b.safetensors"}),
    "the index is no JSON": lambda f: (sharded({})(f), (f / f"{WEIGHTS}.index.json").write_text("{")),
    "the index has no map": lambda f: (sharded({})(f), (f / f"{WEIGHTS}.index.json").write_text("{}")),
    "the index is a list": lambda f: (sharded({})(f), (f / f"{WEIGHTS}.index.json").write_text("[]")),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_a_damaged_weight_file_is_named(model: Path, damage: Damage) -> None:
    """G: each ended in a traceback of safetensors, torch or transformers."""
    damage(model)
    refused(model, str(model))


def test_a_sound_shard_is_read(model: Path) -> None:
    """The damage above is the shard, not the index."""
    sharded({})(model)
    load(str(model), device="cpu")


def test_a_damaged_pickle_is_named(model: Path) -> None:
    """G: cut anywhere, or not torch's at all; whole, it is read."""
    weights = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    torch.save(weights, model / "pytorch_model.bin")
    load(str(model), device="cpu")
    data = (model / "pytorch_model.bin").read_bytes()
    for part in (b"", data[:1], data[:50], data[:-1], data[: len(data) // 2], b"hello", bytes(1000), b"\x80\x04."):
        (model / "pytorch_model.bin").write_bytes(part)
        refused(model, str(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_sound_checkpoints_of_every_family_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    """F11: tied heads, fused and split projections, buffers: none of them is missing or left over."""
    written = build(name)
    written.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = loading.read_weights(str(tmp_path)).state_dict()
    assert all(torch.equal(read[key], value) for key, value in written.state_dict().items())
    reweigh(tmp_path, lambda w: w | {key: w[key].index_fill(0, torch.tensor(0), float("nan")) for key in [min(w)]})
    with pytest.raises(ModelError, match="not finite"):
        loading.read_weights(str(tmp_path))


def test_a_type_that_is_not_tested_is_said_to_be_so(model: Path) -> None:
    """The gate takes what looks like a stack of layers; whether that is exact, `skipdecode check` tells."""
    kind = {"model_type": "biogpt", "activation_function": "gelu"}
    edit(model / "config.json", **kind, hidden_act="gelu", intermediate_size=64, scale_embedding=False)
    config = loading.read_config(str(model))
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    with pytest.warns(UserWarning, match=r"'biogpt'.*skipdecode check"):
        load(str(model), device="cpu")


def test_what_is_tested_is_loaded_without_a_word(model: Path) -> None:
    """No warning that says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(str(model), device="cpu")
    assert {build(name).config.model_type for name in FAMILIES} <= loading.TESTED


# --- the files of text


JUNK = ["", "{", "null", "[]", "3", '"x"', "[" * 100_000, '{"a":' * 100_000, "\ufeff\x00", '{"a": \\ud800}']


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_what_is_no_json_object_is_named(model: Path, name: str) -> None:
    """G: transformers ends with a traceback, or goes on as if the file were not there."""
    for text in JUNK:
        (model / name).write_text(text, encoding="utf-8")
        assert name in refused(model)
    (model / name).write_bytes(b"\xff\xfe\x00")
    assert name in refused(model)


@pytest.mark.parametrize(
    "gone", [("tokenizer.json",), ("tokenizer_config.json",), ("tokenizer.json", "tokenizer_config.json")]
)
def test_missing_tokenizer_files(model: Path, gone: list[str]) -> None:
    """G: transformers makes a tokenizer of its own up, whose ids mean nothing to the model."""
    for name in gone:
        (model / name).unlink()
    assert "token" in refused(model)


def test_a_tokenizer_of_wrong_shape(model: Path) -> None:
    """G: its library raises a bare Exception."""
    good = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    for key in good:
        for value in (None, 3, "x", [3], {"type": "x"}):
            (model / "tokenizer.json").write_text(json.dumps(good | {key: value}), encoding="utf-8")
            assert len(outcome(model).splitlines()) == 1


def test_more_tokens_than_embeddings(model: Path) -> None:
    """G: an IndexError in the first prompt that has one."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    edit(model / "config.json", vocab_size=300)
    embedding = "model.decoder.embed_tokens.weight"
    reweigh(model, lambda w: w | {embedding: w[embedding][:300].clone()})
    refused(model, f"{config['vocab_size']} tokens.*300 embeddings")


# --- the config


WRONG: list[Any] = [None, "x", [1], {}, 1.5, -1, 0, 10**9, 10**30]
FIELDS = """
_remove_final_layer_norm activation_function architectures attention_dropout bos_token_id do_layer_norm_before
dropout dtype enable_bias eos_token_id ffn_dim hidden_size is_encoder_decoder layerdrop
max_position_embeddings model_type num_attention_heads num_hidden_layers pad_token_id quantization_config
auto_map tie_word_embeddings vocab_size word_embed_proj_dim
""".split()


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_of_any_field_of_a_config_loads_or_is_refused(model: Path, field: str) -> None:
    """G: 17 tracebacks and hangs; huggingface_hub's StrictDataclassError is no ValueError."""
    good = (model / "config.json").read_text(encoding="utf-8")
    for value in WRONG:
        (model / "config.json").write_text(json.dumps(json.loads(good) | {field: value}), encoding="utf-8")
        assert len(outcome(model).splitlines()) == 1


@pytest.mark.parametrize("layers", [-1, 0, 10**6, 10**30, 2.5, "8", None, True])
def test_layers_are_counted_before_they_are_made(model: Path, layers: Any) -> None:
    """G: a million layers hung."""
    edit(model / "config.json", num_hidden_layers=layers)
    with pytest.raises(ModelError, match=r"num_hidden_layers"):
        loading.read_config(str(model))


@pytest.mark.parametrize(
    "values",
    [{"cache_implementation": "foo"}, {"max_new_tokens": 0}, {"pad_token_id": "x"}, {"max_new_tokens": "x"}],
    ids=str,
)
def test_a_generation_config_that_transformers_refuses_is_named(model: Path, values: dict[str, Any]) -> None:
    """G: before weights are read, in one line."""
    edit(model / "generation_config.json", **values)
    refused(model, "generation_config")


@pytest.mark.parametrize(
    "values", [{"eos_token_id": [1, 2]}, {"eos_token_id": None}, {"top_k": None}, {"temperature": 1}]
)
def test_a_generation_config_of_right_types_is_taken(model: Path, values: dict[str, Any]) -> None:
    """Lists of ids, and whole numbers for fractions."""
    edit(model / "generation_config.json", **values)
    load(str(model), device="cpu")


# --- a config to start from


NO_CONFIG = [
    "{}",
    '{"model_type": 3}',
    '{"model_type": "none"}',
    '{"model_type": "opt", "hidden_size": "x"}',
    '{"model_type": "opt", "num_hidden_layers": 0}',
    '{"model_type": "opt", "num_hidden_layers": 1000000}',
    '{"model_type": "t5"}',
    '{"model_type": "spy", "auto_map": {"AutoConfig": "spy.Config"}}',
]


@pytest.mark.parametrize("text", [*JUNK, *NO_CONFIG])
def test_a_config_to_start_from_is_checked(tmp_path: Path, text: str) -> None:
    """G: --from-config."""
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SkipDecodeError, match="config"):
        loading.new_config(file)


@pytest.mark.parametrize(
    "values",
    [{"vocab_size": v} for v in (-1, 0, 3, 200, 10**12, "x", None, 2.5)]
    + [{"hidden_size": 33}, {"num_attention_heads": 0}, {"ffn_dim": 10**12}, {"activation_function": "x"}],
    ids=str,
)
def test_a_model_that_cannot_be_made_is_refused(whole: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    """G: --from-config with sizes that no model has; a vocabulary smaller than the alphabet."""
    file = Path(shutil.copy(whole / "config.json", tmp_path / "config.json"))
    edit(file, **values)
    with pytest.raises(SkipDecodeError):
        loading.from_config(file, TEXTS)


# --- devices, types, names


@pytest.mark.parametrize("device", ["meta", "cuda", "cpu:7", "nonsense", "", "cuda:99", "mps", "xla"])
def test_a_device_that_cannot_compute_is_refused_before_the_weights_are_read(model: Path, device: str) -> None:
    """G: `--device meta` loads nothing and computes nothing."""
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("it is there")
    (model / WEIGHTS).write_bytes(b"")
    with pytest.raises(ModelError, match=f"no device {device!r}"):
        load(str(model), device=device)


@pytest.mark.parametrize("dtype", ["Tensor", "float", "int8", "", "cuda", "bf16", torch.int8, torch.float64, 3, None])
def test_a_type_that_no_model_computes_in_is_refused_before_the_weights_are_read(model: Path, dtype: Any) -> None:
    """G: `--dtype Tensor`."""
    (model / WEIGHTS).write_bytes(b"")
    refused(model, "auto, float32, bfloat16 or float16", dtype=dtype)


@pytest.mark.parametrize("dtype", ["auto", "float32", torch.bfloat16])
def test_types_that_are_taken(model: Path, dtype: Any) -> None:
    """As words, and as torch's."""
    assert load(str(model), device="cpu", dtype=dtype)[0].dtype in (torch.float32, torch.bfloat16)


def test_a_hub_name_without_a_network_ends_in_one_line() -> None:
    """The hub's own error is several lines."""
    message = refused("nobody/opt-x")
    assert "nobody/opt-x" in message


@pytest.mark.parametrize("attention", ["nonsense", "flash_attention_2", ""])
def test_attentions_that_are_not_there(model: Path, attention: str) -> None:
    """transformers' words, in one line."""
    if attention:
        refused(model, str(model), attn_implementation=attention)


def test_everything_of_a_name_is_read_from_one_place(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C1: a checkpoint in ./demo mixed its tokenizer with the embedded weights. Now `demo` is refused beside one."""
    readers: list[Callable[[str], Any]] = [
        lambda name: loading.read_config(name).vocab_size,
        lambda name: loading.read_generation_config(name).max_length,
        lambda name: len(loading.load_tokenizer(name)),
        lambda name: loading.read_weights(loading.resolve(name)).config.vocab_size,
        lambda name: load(name, device="cpu")[0].generation_config.max_length,
        lambda name: provenance.identity(loading.resolve(name)),
    ]
    edit(model / "generation_config.json", max_length=77)
    embedded = [read("demo") for read in readers]
    expected = [read(str(model)) for read in readers]
    assert all(one != other for one, other in zip(embedded, expected, strict=True))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "notes.txt").write_text("no checkpoint")
    assert [read("demo") for read in readers] == embedded
    (tmp_path / "demo" / "notes.txt").unlink()
    (tmp_path / "demo").rmdir()
    model.rename(tmp_path / "demo")
    for given in ("./demo", str(tmp_path / "demo")):
        assert [read(given) for read in readers[:-1]] == expected[:-1]
        assert provenance.identity(loading.resolve(given)) != embedded[-1]
        assert loading.resolve(loading.resolve(given)) == str(tmp_path / "demo")
    for read in readers:
        with pytest.raises(ModelError, match=r"demo is the embedded checkpoint, and a folder here: give \./demo"):
            read("demo")
    (tmp_path / "demo" / "config.json").unlink()  # what is left is a tokenizer
    with pytest.raises(ModelError, match="a folder here"):
        loading.load_tokenizer("demo")
    shutil.rmtree(tmp_path / "demo")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "skipdecode_adapter.json").write_text("{}")  # an adapter stands for its model
    with pytest.raises(ModelError, match="a folder here"):
        loading.resolve("demo")


def test_an_accelerator_is_found_and_its_weights_are_read_straight_onto_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7, C21, simulated: no weight passes through host memory."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta"))
    monkeypatch.setattr(device_module, "check_device", lambda name: None)
    monkeypatch.setattr(loading, "check_tokenizer", lambda *_: None)
    read: list[torch.device] = []
    monkeypatch.setattr(loading, "check_weights", lambda _, m, __: read.extend(p.device for p in m.parameters()))
    loaded, _ = load(str(model))
    assert {place.type for place in read} == {"meta"}, "before anything was moved"
    assert loaded.device.type == "meta"


# --- what the config says of its training

ENTRY: dict[str, Any] = {"method": "skipdecode", "schedules": {"2": Schedule(8, 4, 2, horizon=8).to_dict()}}
BAD_ENTRIES: list[Any] = [value for value in WRONG if value] + [
    {"method": "skipdecode"},
    *({"method": value, "schedules": ENTRY["schedules"]} for value in WRONG if not isinstance(value, str)),
    *({"method": "skipdecode", "schedules": value} for value in WRONG),
    *({"method": "skipdecode", "schedules": {"2": value}} for value in WRONG),
    *({"method": "skipdecode", "schedules": {key: ENTRY["schedules"]["2"]}} for key in ("x", "nan", "inf", "-1", "")),
]


@pytest.mark.parametrize("entry", BAD_ENTRIES, ids=lambda entry: str(entry)[:60])
def test_an_entry_of_wrong_shape_is_a_schedule_error(model: Path, entry: Any) -> None:
    """G: "could not convert string to float", and methods that are no names."""
    edit(model / "config.json", skipdecode=ENTRY)
    config = loading.read_config(str(model))
    assert (checkpoint_config.trained_method(config), checkpoint_config.schedule_for(config)) == (
        "skipdecode",
        Schedule(8, 4, 2, horizon=8),
    )
    edit(model / "config.json", skipdecode=entry)
    config = loading.read_config(str(model))
    with pytest.raises(ScheduleError, match=r"\w") as caught:
        checkpoint_config.trained_method(config), checkpoint_config.schedule_for(config)
    assert len(str(caught.value)) < 500


def test_a_multimodal_config_brings_its_schedules(tmp_path: Path) -> None:
    """The language model alone is loaded, whose own config has no entry."""
    tokenizer = train_tokenizer(TEXTS * 20, 320)
    values = FAMILIES["qwen3.5"][1] | {"vocab_size": len(tokenizer)}
    sizes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=values, vision_config=sizes)
    schedules = {2.0: Schedule(LAYERS, 6, 2, 9, order="bottom")}
    set_entry(config, to_config_entry(schedules))
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load(str(tmp_path))
    assert config_schedules(model.config) == config_schedules(loading.read_config(str(tmp_path))) == schedules
