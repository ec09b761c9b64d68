"""Checkpoints: what a name stands for, and that what is loaded is what was saved."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    T5Config,
)

import skipdecode
from helpers.families import FAMILIES, LAYERS, build, prompts, run
from helpers.tiny import TEXTS, train_tokenizer
from skipdecode import Schedule, load
from skipdecode.errors import FileError, MissingExtra, ModelError, UnsupportedModel, UsageError
from skipdecode.generation.job import GenerationJob
from skipdecode.loading import load as loading
from skipdecode.loading.load import DEMO, Checkpoint
from skipdecode.model.adapter import GENERATION, Adapter, save_adapter
from skipdecode.model.config import config_schedules, set_entry, to_config_entry, trained_schedules

WEIGHTS = "model.safetensors"
CONSTANT = Schedule(LAYERS, 4, 4, horizon=1, decay="constant")


@pytest.fixture
def model(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be changed."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def edit(file: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values), encoding="utf-8")


def reweigh(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Write other weights."""
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})


def adapter_for(folder: Path, base: str, model: Path) -> Path:
    """An adapter for the checkpoint in ``model``, whose folder names ``base``."""
    full = AutoModelForCausalLM.from_pretrained(model)
    save_adapter(folder, Adapter(full.config.hidden_size, 4, {2.0: CONSTANT}), full, base)
    return folder


# --- what a name stands for


def test_everything_of_a_name_comes_from_one_place(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder ./demo beside the demo model would mix two checkpoints: it is refused until it is written ./demo."""
    edit(model / "generation_config.json", max_length=77)
    demo, here = Checkpoint.resolve("demo"), Checkpoint.resolve(model)
    assert demo.path == str(DEMO)
    assert here.path == str(model)
    assert here.generation_config.max_length == 77 != demo.generation_config.max_length
    assert len(here.tokenizer) != len(demo.tokenizer)
    assert here.num_layers == LAYERS
    assert sorted(demo.schedules) == [1, 2, 3, 4, 5]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert Checkpoint.resolve("demo") == demo
    (tmp_path / "demo").rmdir()
    model.rename(tmp_path / "demo")
    assert Checkpoint.resolve("./demo").path == str(tmp_path / "demo")
    with pytest.raises(ModelError, match=r"write \./demo"):
        Checkpoint.resolve("demo")


@pytest.mark.parametrize("name", ["./none", "/none/at/all", "runs/fast/last", "~/model", "fast/", "none.GGUF"])
def test_a_path_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no model at"):
        Checkpoint.resolve(name)


def test_a_name_that_nobody_has_is_one_line() -> None:
    with pytest.raises(ModelError, match="nobody/opt-x cannot be loaded") as caught:
        _ = Checkpoint.resolve("nobody/opt-x").config
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_without_a_causal_lm_is_named(tmp_path: Path) -> None:
    """That of a PEFT adapter, which is not merged, or of an unfinished training; an encoder-decoder's."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no config\.json"):
        Checkpoint.resolve(tmp_path)
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="decoder-only"):
        _ = Checkpoint.resolve(tmp_path).config


# --- adapters


def test_an_adapters_folder_stands_for_its_model(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative base model is found here, or in a folder above the adapter's."""
    adapter = adapter_for(tmp_path / "results" / "fast", "model", model)
    for place in (tmp_path, Path("/")):
        monkeypatch.chdir(place)
        found = Checkpoint.resolve(adapter)
        assert found.path == str(model)
        assert found.adapter == adapter
        assert found.schedules == {2.0: CONSTANT}
        assert config_schedules(found.config) == {}
    loaded, _ = load(adapter, device="cpu")
    assert trained_schedules(loaded) == {2.0: CONSTANT}
    assert Checkpoint.resolve(model, adapter=adapter).load(device="cpu").config.to_dict() == loaded.config.to_dict()


def test_an_adapters_sampling_is_its_speeds_alone(model: Path, tmp_path: Path) -> None:
    """Greedy decoding has its penalty too, but no other option of it; at 1x the model is untouched."""
    adapter = adapter_for(tmp_path / "fast", str(model), model)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": -1}

    def write(name: Path, speedup: float, **more: Any) -> str:
        chosen = options | more
        (row,) = skipdecode.generate(*load(name, device="cpu"), ["the cat"], speedup=speedup, **chosen).completions
        job = GenerationJob(Checkpoint.resolve(name), ["the cat"], speedup=speedup, options=chosen)
        assert job.run().texts == [row.text]
        return row.text

    before = write(adapter, 2)
    (adapter / GENERATION).write_text('{"temperature": 0.2, "repetition_penalty": 50.0, "eos_token_id": 3}')
    assert Checkpoint.resolve(adapter).sampling == {"temperature": 0.2, "repetition_penalty": 50.0}
    assert write(adapter, 1) == write(model, 1)
    assert write(adapter, 2) != before == write(adapter, 2, repetition_penalty=1.0)


@pytest.mark.parametrize("base", ["/elsewhere/smollm2", "smollm2"])
def test_a_base_model_that_is_elsewhere_is_named_with_its_adapter(
    base: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = adapter_for(tmp_path / "fast", base, model)
    with pytest.raises(ModelError, match=rf"{base}.*--adapter .*fast"):
        _ = Checkpoint.resolve(adapter).config
    assert Checkpoint.resolve(model, adapter=adapter).num_layers == LAYERS


def test_an_adapter_of_another_model_or_none_is_refused(model: Path, tmp_path: Path) -> None:
    adapter = adapter_for(tmp_path / "fast", str(model), model)
    reweigh(model, lambda weights: {name: weight + 1 for name, weight in weights.items()})
    with pytest.raises(ModelError, match="trained on another model"):
        load(adapter, device="cpu")
    with pytest.raises(FileError, match="no adapter"):
        _ = Checkpoint.resolve(model, adapter=model).schedules


# --- weights


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda w: {k: v for k, v in w.items() if ".layers.3." not in k}, r"16 weights are missing .*\.layers\.3\."),
        (lambda w: {f"x.{k}": v for k, v in w.items()}, "weights are missing"),
        (lambda w: {k: v.flatten()[:10] for k, v in w.items()}, "size mismatch|ignore_mismatched_sizes"),
    ],
)
def test_weights_are_all_there_in_the_configs_shapes(model: Path, damage: Any, match: str) -> None:
    """transformers would fill in what is missing at random."""
    reweigh(model, damage)
    with pytest.raises(ModelError, match=match):
        load(model, device="cpu")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    """Tied heads, fused and split projections, buffers: none of them counts as missing."""
    written = build(name)
    written.save_pretrained(tmp_path)
    read = Checkpoint.resolve(tmp_path).read_weights().state_dict()
    assert all(torch.equal(read[key], value) for key, value in written.state_dict().items())


def test_in_float32_a_loaded_model_is_the_full_model(checkpoint: Path) -> None:
    """Bit for bit, with the full schedule and without one."""
    loaded, _ = load(checkpoint, dtype="float32", device="cpu")
    expected = run(AutoModelForCausalLM.from_pretrained(checkpoint).eval(), prompts())
    for schedule in (None, Schedule.full(LAYERS)):
        assert all(map(torch.equal, run(loaded, prompts(), schedule).logits, expected.logits))


class Malice:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_no_pickle_is_read(model: Path, tmp_path: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Malice(tmp_path / "ran")))
    with pytest.raises(ModelError, match="safetensors"):
        load(model, device="cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("known", [True, False])
def test_no_code_of_a_checkpoint_runs(known: bool, model: Path, tmp_path: Path) -> None:
    """Beside a model type of transformers it is left alone; without one the model is refused."""
    (model / "spy.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    edit(model / "config.json", auto_map={"AutoConfig": "spy.C", "AutoModelForCausalLM": "spy.M"})
    if known:
        load(model, device="cpu")
    else:
        edit(model / "config.json", model_type="spy")
        with pytest.raises(ModelError, match="custom code"):
            load(model, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_an_accelerators_weights_are_read_straight_onto_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: none passes through host memory."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta"))
    places: list[str] = []
    read = Checkpoint.read_weights

    def noted(self: Checkpoint, **options: Any) -> PreTrainedModel:
        found = read(self, **options)
        places.extend({weight.device.type for weight in found.parameters()})
        return found

    monkeypatch.setattr(Checkpoint, "read_weights", noted)
    load(model)
    assert places == ["meta"]


# --- what stands beside the weights


def test_padding_has_an_embedding(model: Path) -> None:
    """A padding token that was added without resizing the model would be an index out of range."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(model)
    loaded, tokenizer = load(model, device="cpu")
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token_id < loaded.get_input_embeddings().num_embeddings
    both = skipdecode.generate(loaded, tokenizer, TEXTS[:2], speedup=2, max_new_tokens=4)
    alone = [skipdecode.generate(loaded, tokenizer, [text], speedup=2, max_new_tokens=4) for text in TEXTS[:2]]
    assert both.completions == [each.completions[0] for each in alone]


def test_a_generation_config_is_optional(model: Path) -> None:
    """Without one, the ends that the model's config names count."""
    (model / "generation_config.json").unlink()
    checkpoint = Checkpoint.resolve(model)
    assert checkpoint.generation_config.eos_token_id == checkpoint.config.eos_token_id is not None
    assert checkpoint.load(device="cpu").generation_config.eos_token_id == checkpoint.config.eos_token_id


@pytest.mark.parametrize("content", ["{broken", "[]"])
def test_a_damaged_generation_config_is_named(model: Path, content: str) -> None:
    (model / "generation_config.json").write_text(content)
    with pytest.raises(FileError, match=r"generation_config\.json cannot be read"):
        _ = Checkpoint.resolve(model).generation_config


@pytest.mark.parametrize(
    ("file", "content"), [("tokenizer.json", "{}"), ("tokenizer_config.json", "[]"), ("config.json", None)]
)
def test_a_damaged_file_is_an_error_of_the_model(model: Path, file: str, content: str | None) -> None:
    if content is None:
        edit(model / file, num_hidden_layers="8")
    else:
        (model / file).write_text(content)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(model, device="cpu")


@pytest.mark.parametrize("content", [None, '{"do_sample": false, "top_k": 7}'])
def test_where_a_generation_config_names_no_end_a_turn_ends_as_the_template_ends_it(
    model: Path, content: str | None
) -> None:
    """By a special token behind the assistant's words, if there is one."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    end = tokenizer.convert_tokens_to_ids("<|turn|>")
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}END{% endfor %}"
    for template, extra in ((turns.replace("END", "<|turn|>\n"), {end}), (turns.replace("END", "\n"), set())):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(model)
        (model / "generation_config.json").unlink(missing_ok=True)
        if content is not None:
            (model / "generation_config.json").write_text(content)
        checkpoint = Checkpoint.resolve(model)
        assert checkpoint.generation_config.top_k == (content and 7)
        ends = checkpoint.generation_config.eos_token_id
        assert {*(ends if isinstance(ends, list) else [ends])} == extra | {checkpoint.config.eos_token_id}


def test_a_multimodal_config_brings_its_schedules(tmp_path: Path) -> None:
    """The language model alone is loaded, whose own config has no entry."""
    tokenizer = train_tokenizer(TEXTS * 20, 320)
    sizes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    text = FAMILIES["qwen3.5"][1] | {"vocab_size": len(tokenizer)}
    config = Qwen3_5Config(text_config=text, vision_config=sizes)
    schedules = {2.0: Schedule(LAYERS, 6, 2, 9, order="bottom")}
    set_entry(config, to_config_entry(schedules))
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = load(tmp_path, device="cpu")
    assert trained_schedules(loaded) == Checkpoint.resolve(tmp_path).schedules == schedules


def test_a_fingerprint_is_that_of_the_files_that_decide(model: Path, tmp_path: Path) -> None:
    """Other weights or another adapter make another one; a copy, or an output in the folder, does not."""
    first = Checkpoint.resolve(model).fingerprint
    assert Checkpoint.resolve(shutil.copytree(model, tmp_path / "copy")).fingerprint == first
    (model / "out.jsonl.partial").write_text("{}\n")
    assert Checkpoint.resolve(model).fingerprint == first
    adapter = adapter_for(tmp_path / "fast", str(model), model)
    adapted = Checkpoint.resolve(model, adapter).fingerprint
    assert adapted != first
    adapter_for(tmp_path / "fast", str(model), model)
    assert Checkpoint.resolve(model, adapter).fingerprint != adapted
    reweigh(model, lambda weights: {name: weight * 2 for name, weight in weights.items()})
    assert Checkpoint.resolve(model).fingerprint != first


def test_a_fingerprint_of_the_hub_is_that_of_the_commit() -> None:
    found = set()
    for commit in ("a", "b"):
        checkpoint = Checkpoint.resolve("you/base")
        vars(checkpoint)["config"] = SimpleNamespace(_commit_hash=commit)
        found.add(checkpoint.fingerprint)
    assert len(found) == 2


def test_offloaded_layers_take_no_packed_weights(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before weights are read."""
    monkeypatch.setattr(Checkpoint, "read_weights", None)
    with pytest.raises(UsageError, match="offloaded layers take no int8 or prepacked"):
        load(checkpoint, device="cpu", prepack=True, offload="disk")


# --- GGUF files

#: Names of a layer's weights in transformers, and in a GGUF file of type Llama.
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
END_OF_TURN = 7


def halves_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in GGUF's order: those that RoPE turns together stand side by side."""
    rows, size = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, size).swapaxes(1, 2).reshape(rows, size)


@pytest.fixture(scope="module")
def original() -> PreTrainedModel:
    """A tiny Llama with grouped heads."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "max_position_embeddings": 128}
    config = LlamaConfig(
        **sizes, vocab_size=320, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def gguf_file(original: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It as a GGUF file in float32, with a BPE tokenizer whose turns end with END_OF_TURN."""
    gguf: Any = pytest.importorskip("gguf", reason="needs gguf: pip install '.[gguf]' in a clone")
    path, config = tmp_path_factory.mktemp("gguf") / "tiny.GGUF", original.config
    tokenizer = train_tokenizer(TEXTS * 20, 320)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocabulary] + [f"<unused{i}>" for i in range(320 - len(vocabulary))]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_eot_token_id(END_OF_TURN)
    state = original.state_dict()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")):
        writer.add_tensor(f"{theirs}.weight", state[f"{ours}.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            weight = halves_together(weight, heads[theirs]) if theirs in heads else weight
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (path.parent / "generation_config.json").write_text('{"max_length": 77}')  # another model's
    return path


def test_a_gguf_file_is_the_original_and_can_be_saved(
    gguf_file: Path, original: PreTrainedModel, tmp_path: Path
) -> None:
    """Weights to the bit, as floats; the suffix may be in capitals."""
    loaded, tokenizer = load(gguf_file, dtype="float32", device="cpu")
    state = loaded.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in original.state_dict().items())
    loaded.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = load(tmp_path, device="cpu")
    options: dict[str, Any] = {"speedup": 2, "max_new_tokens": 6, "eos_token_id": -1}
    first, second = (skipdecode.generate(each, tokenizer, TEXTS[:3], **options) for each in (loaded, again))
    assert first.completions == second.completions


def test_a_gguf_files_turns_end(gguf_file: Path) -> None:
    """Its header names the end of a turn beside the end of a text; a file beside it is another model's."""
    checkpoint = Checkpoint.resolve(gguf_file)
    assert sorted(checkpoint.generation_config.eos_token_id) == [checkpoint.tokenizer.eos_token_id, END_OF_TURN]
    assert checkpoint.generation_config.max_length != 77
    assert checkpoint.load(device="cpu").generation_config.eos_token_id == checkpoint.generation_config.eos_token_id


def test_a_gguf_file_takes_an_adapter(gguf_file: Path, tmp_path: Path) -> None:
    """The adapter knows it again, and skips from the folder alone. A copy of the file has the same fingerprint."""
    full = Checkpoint.resolve(gguf_file).read_weights()
    save_adapter(tmp_path / "fast", Adapter(full.config.hidden_size, 4, {2.0: CONSTANT}), full, str(gguf_file))
    loaded, tokenizer = load(tmp_path / "fast", device="cpu")
    result = skipdecode.generate(loaded, tokenizer, TEXTS[:2], max_new_tokens=6, eos_token_id=-1)
    assert result.stats.layer_ratio == 2
    copy = shutil.copy(gguf_file, tmp_path)
    assert Checkpoint.resolve(copy).fingerprint == Checkpoint.resolve(gguf_file).fingerprint


def test_gguf_needs_its_package_and_memory(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="GGUF file cannot be offloaded"):
        load(gguf_file, offload="disk", device="cpu")
    monkeypatch.setattr(loading, "is_gguf_available", lambda: False)
    with pytest.raises(MissingExtra, match=r"\.\[gguf\]"):
        Checkpoint.resolve(gguf_file)
