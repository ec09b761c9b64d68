"""Rows that have ended leave their batch: nobody's text changes, and the model computes fewer rows."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from skipdecode.evaluation.methods import get_method
from skipdecode.generation.batch import Decoding, Passes, generate_batch
from skipdecode.generation.batch import _unpadded as unpadded
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria

import skipdecode
from helpers.families import DENSE, FAMILIES, FORMS, SCHEDULES, TOP, build
from helpers.tiny import TEXTS
from skipdecode import Schedule, SkipCache, attach, detach
from skipdecode.data.tokenize import encode_prompts
from skipdecode.evaluation.early_exit import install_exits
from skipdecode.generation import finished_rows
from skipdecode.generation.generate import generate_ids
from skipdecode.generation.stats import Completion, GenerationStats
from skipdecode.model.cache import total_kv_bytes
from skipdecode.model.cache_name import CACHE
from skipdecode.model.gate import patches_on
from skipdecode.model.inspect import decoder_layers

PAD, END, NEW = 0, 1, 16
LENGTHS = (9, 5, 2, 7, 3, 4, 8, 6)
WIDTH = max(LENGTHS)
#: After how many tokens the rows end; the sixth runs out of them.
ENDS = (3, 13, 6, 1, 9, 99, 4, 8)
#: Rows of each pass if those that have ended leave when half have: four of eight by token 6, two of four by 9.
ROWS = [8] * 6 + [4] * 3 + [2] * 4 + [1] * 3


class Tokenizer:
    """Tokens are their own text."""

    pad_token_id = PAD

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))


class Ends(LogitsProcessor):
    """Ends each row after so many tokens, and not before."""

    def __init__(self, ends: tuple[int, ...]) -> None:
        self.ends = torch.tensor(ends)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends = self.ends.repeat_interleave(len(scores) // len(self.ends)) == input_ids.shape[1] - WIDTH + 1  # beams
        scores[:, END] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, END] = 0.0
        return scores


class Sees(LogitsProcessor):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.ids.append(input_ids)
        return scores


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, 128, (n,), generator=generator).tolist() for n in LENGTHS]


@contextmanager
def passes(model: PreTrainedModel) -> Iterator[list[int]]:
    """Rows that each forward pass computes."""
    rows: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    yield rows
    hook.remove()


@contextmanager
def all_stay() -> Iterator[None]:
    """No row leaves: the batches that the others are compared with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finished_rows, "SHARE", 0.0)
        yield


def write(
    model: PreTrainedModel, decoding: Decoding, ends: tuple[int, ...] = ENDS, **options: Any
) -> tuple[list[Completion], GenerationStats]:
    processors = LogitsProcessorList([*options.pop("logits_processor", []), Ends(ends)])
    defaults: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": END, "logits_processor": processors}
    torch.manual_seed(0)
    return generate_batch(model, Tokenizer(), prompts(), decoding, **(defaults | options))


#: Tokens that end a text where nothing else does: every ninth.
OFTEN: dict[str, Any] = {"eos_token_id": list(range(3, 128, 9)), "max_new_tokens": NEW}
PLANS = {"stock": None, **{key: SCHEDULES[key] for key in ("top-to-1", "even", "prompt-wide")}}
#: All of them for a family of each form; of the others, the schedule that falls within the prompt, and the stock cache
#: where it holds other things than keys and values.
CASES = [
    (name, key)
    for name in FAMILIES
    for key in PLANS
    if name in FORMS or key == "prompt-wide" or (key == "stock" and name not in DENSE)
]


@pytest.mark.parametrize(("name", "key"), CASES)
def test_no_text_changes_and_fewer_rows_are_computed(name: str, key: str) -> None:
    """Sampled, and greedy for each form: sliding windows, recurrent layers, lent keys, depths that fall meanwhile."""
    model, plan = build(name), PLANS[key]
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 40}
    for options in (sampled, {}) if name in FORMS and key == "top-to-1" else (sampled,):
        with all_stay():
            stay, full = write(model, plan, **options)
        with passes(model) as rows:
            left, cost = write(model, plan, **options)
        assert left == stay
        assert [row.tokens for row in left] == [min(end, NEW) for end in ENDS]
        assert rows == ROWS
        assert (cost.steps, cost.layer_steps, cost.tokens) == (full.steps, full.layer_steps, full.tokens)
        assert cost.peak_kv_bytes <= full.peak_kv_bytes


def test_a_text_does_not_depend_on_when_others_leave() -> None:
    """The longest row writes the same whatever ends beside it, alone from the second token on or never alone."""
    model = build("llama")
    texts = {write(model, TOP, (*[others] * 5, 99, others, others))[0][5].text for others in (1, 2, 7, 15, 99)}
    assert len(texts) == 1


def test_a_seeded_row_samples_as_it_does_alone() -> None:
    """Its random numbers are its own, whoever has left."""
    model = build("opt")
    options: dict[str, Any] = OFTEN | {"do_sample": True, "temperature": 1.5, "seed": 3}
    with passes(model) as rows:
        together = generate_ids(model, Tokenizer(), prompts(), TOP, 8, **options)
    alone = generate_ids(model, Tokenizer(), prompts(), TOP, 1, **options)
    assert together.completions == alone.completions
    assert rows[-1] < rows[0]


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 4},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1},
        {"begin_suppress_tokens": list(range(60))},
        {"exponential_decay_length_penalty": (3, 1.9)},
        {"forced_eos_token_id": 3},
    ],
    ids=lambda options: str(next(iter(options))),
)
def test_what_works_on_scores_sees_what_it_saw(options: dict[str, Any]) -> None:
    """All rows, from the prompt's first token on: also what counts from the prompt's end."""
    model = build("opt")
    stayed, left = Sees(), Sees()
    with all_stay():
        expected, _ = generate_batch(model, Tokenizer(), prompts(), TOP, logits_processor=[stayed], **OFTEN | options)
    with passes(model) as rows:
        found, _ = generate_batch(model, Tokenizer(), prompts(), TOP, logits_processor=[left], **OFTEN | options)
    assert rows[-1] < rows[0]
    assert found == expected
    assert all(map(torch.equal, left.ids, stayed.ids))


def test_rows_that_a_stop_string_ends_leave_too(checkpoint: Path) -> None:
    """As those do that a token ends."""
    model, tokenizer = skipdecode.load(str(checkpoint))
    ids = encode_prompts(tokenizer, TEXTS)
    options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12}
    free = generate_batch(model, tokenizer, ids, TOP, **options)[0]
    letters = Counter(letter for row in free for letter in {*row.text} - {"\ufffd"})
    options["stop_strings"] = [letter for letter, _ in letters.most_common(3)]
    with all_stay():
        stay = generate_batch(model, tokenizer, ids, TOP, **options)[0]
    with passes(model) as rows:
        assert generate_batch(model, tokenizer, ids, TOP, **options)[0] == stay
    assert rows[-1] <= len(ids) / 2


# --- what is counted


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_the_peak_is_the_most_that_the_cache_held(kind: str) -> None:
    """Before rows leave, not at the end; and what they held is given back."""
    model, caches = attach(build("llama")), []

    def make(model: PreTrainedModel) -> DynamicCache:
        whole = Schedule.full(model.config.num_hidden_layers)
        caches.append(DynamicCache(config=model.config) if kind == "stock" else SkipCache(model, whole))
        return caches[-1]

    held: list[int] = []

    class Probe(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            held.append(total_kv_bytes(caches[-1]))
            return scores

    _, cost = write(model, make, logits_processor=[Probe()])
    assert cost.peak_kv_bytes == max(held)
    cut = ROWS.index(4)
    assert held[cut] < 0.6 * held[cut - 1]
    assert held[-1] < 0.3 * max(held)


@pytest.mark.parametrize("beams", [1, 2])
def test_a_batchs_cost_is_that_of_its_passes(beams: int) -> None:
    """Steps are passes after the prompt's; seconds lie within those of the call; a stock cache counts no rows."""
    model, counted, start = build("opt"), Passes(every=True), time.perf_counter()
    with passes(model) as rows:
        _, cost = write(model, None, num_beams=beams, passes=counted)
    took = time.perf_counter() - start
    assert cost.steps == counted.count - 1 == len(rows) - 1
    assert cost.layer_steps == cost.steps * model.config.num_hidden_layers
    assert counted.times == sorted(counted.times)
    assert len(counted.times) == counted.count
    assert counted.times[-1] - counted.times[0] <= cost.decode_seconds <= cost.seconds <= took
    assert cost.row_layers == cost.row_steps == 0
    once = Passes()
    write(model, None, passes=once)
    assert len(once.times) == 1


def test_one_rows_peak_is_its_caches() -> None:
    """Nobody leaves; layers that retire do."""
    model, caches = attach(build("llama")), []

    def make(model: PreTrainedModel) -> DynamicCache:
        caches.append(SkipCache(model, Schedule(model.config.num_hidden_layers, 4, 1, 8, prompt_layers="max")))
        return caches[-1]

    _, cost = generate_batch(model, Tokenizer(), prompts()[:1], make, max_new_tokens=NEW, eos_token_id=None)
    assert cost.peak_kv_bytes == caches[0].peak_kv_bytes > total_kv_bytes(caches[0])


def test_tokens_are_counted_up_to_what_ended_them() -> None:
    """A padding token that was written is a token; the end that comes last of all is one too."""
    zeros = LogitsProcessorList([Always(PAD)])
    rows, _ = write(build("opt"), None, logits_processor=zeros, pad_token_id=2, ends=(99,) * 8)
    assert {row.text for row in rows} == {" ".join(["0"] * NEW)}
    rows, _ = write(build("opt"), None, stopping_criteria=[Never()], ends=(NEW,) * 8)
    assert {(row.tokens, row.finish_reason) for row in rows} == {(NEW, "stop")}
    options: dict[str, Any] = {"num_beams": 2, "eos_token_id": None, "stopping_criteria": [FirstHalf()]}
    rows, _ = write(build("opt"), None, pad_token_id=2, **options)
    assert any(row.tokens < NEW for row in rows)
    assert not any("-1" in row.text.split() for row in rows)
    for row, count in (([5, 6, PAD, PAD], 2), ([PAD, PAD], 0), ([PAD], 0), ([5], None), ([PAD, 5], None), ([], None)):
        assert unpadded(row, PAD) == count


# --- where rows stay


class Always(LogitsProcessor):
    """Writes one token only."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.token]), 0.0)


class FirstHalf(StoppingCriteria):
    """Ends the first half of the rows after three tokens."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (torch.arange(len(input_ids)) < len(input_ids) // 2) & (input_ids.shape[1] >= WIDTH + 3)


class Never(StoppingCriteria):
    """Ends nothing."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"stopping_criteria": [Never()]}, {"eos_token_id": None}],
    ids=["beams", "criteria of the caller", "no end"],
)
def test_rows_stay_where_they_cannot_leave(options: dict[str, Any]) -> None:
    """Beams are put in order, others may end rows unnoticed, and without an end a row is written on."""
    model = build("opt")
    with passes(model) as rows:
        write(model, TOP, **options)
    assert len(set(rows)) == 1


def test_what_keeps_a_rows_place_is_found_before_the_batch() -> None:
    """One row alone, no end, a cache that is not ours, beams of the options or of the model, the caller's criteria."""
    model = build("opt")
    cache = DynamicCache(config=model.config)

    def tracked(
        rows: int = 8, stops: Any = (END,), cache: DynamicCache = cache, model: Any = model, **options: Any
    ) -> finished_rows.FinishedRows | None:
        return finished_rows.track_finished_rows(model, Tokenizer(), cache, rows, stops, None, options)

    class Other(DynamicCache):
        """Of a baseline, say."""

    reordering: Any = build("opt")
    reordering._reorder_cache = None  # a family's own rule for the order of beams

    tracker = tracked()
    assert tracker is not None
    assert tracked(rows=2) is not None
    assert tracked(rows=1) is None
    assert tracked(stops=()) is None
    assert tracked(num_beams=2) is None
    assert tracked(stopping_criteria=[Never()]) is None
    assert tracked(cache=Other(config=model.config)) is None
    assert tracked(model=reordering) is None
    assert tracker.peak_kv_bytes == 0
    with tracker as entered:
        assert entered is tracker is cache.finished_rows
    assert not hasattr(cache, "finished_rows")
    tracker.ended[1:] = True
    for name, shape in (("input_ids", (5, 1)), ("attention_mask", (8, 1, 1, 9)), ("token_type_ids", (8, 1))):
        assert tracker.before({name: (given := torch.ones(shape))})[name] is given


def test_rows_stay_with_a_methods_own_cache() -> None:
    """CALM's knows which of its rows have left a layer."""
    model = attach(build("opt"))
    method: Any = get_method("calm")
    model.generation_config.eos_token_id = END
    decoder = method.decoder(model, 0.5, NEW)
    with passes(model) as rows:
        write(model, decoder)
    assert set(rows) == {len(LENGTHS)}


def test_rows_stay_in_a_compiled_model() -> None:
    """Each number of rows may compile it anew."""
    model = build("opt")
    asked: Any = Tokenizer(), DynamicCache(config=model.config), 8, {END}, None, {}
    assert finished_rows.track_finished_rows(model, *asked) is not None
    model.compile()
    assert finished_rows.track_finished_rows(model, *asked) is None


def test_rows_stay_where_a_pass_is_given_what_we_do_not_know() -> None:
    """A tensor that might be by rows, and might not."""
    model = build("gpt2")

    def give(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"token_type_ids": torch.zeros_like(kwargs["input_ids"])}

    model.register_forward_pre_hook(give, with_kwargs=True)
    with passes(model) as rows:
        write(model, TOP)
    assert set(rows) == {len(LENGTHS)}


# --- nothing else is touched


def test_other_passes_of_the_same_model_keep_their_rows() -> None:
    """Those of another thread, say: in the middle of a batch, over as many rows."""
    model = build("opt")
    ids = torch.randint(2, 128, (len(LENGTHS), 4))
    with torch.no_grad():
        alone = model(ids).logits

    class Looks(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            cache = DynamicCache(config=model.config)
            assert torch.equal(model(ids, **{CACHE: cache}).logits, alone)
            return scores

    write(model, None, logits_processor=[Looks()])


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_the_patch_stays_and_holds_nothing(ends: str) -> None:
    """Whatever happens in between."""
    model = build("opt")

    class Fails(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if ends == "badly" and input_ids.shape[1] > WIDTH + 7:
                raise RuntimeError("on purpose")
            return scores

    with nullcontext() if ends == "well" else pytest.raises(RuntimeError, match="on purpose"):
        write(model, TOP, logits_processor=[Fails()])
    (patch,) = [patch for _, patch in patches_on(model) if isinstance(patch, finished_rows.RowsPatch)]
    assert not any(isinstance(value, (DynamicCache, finished_rows.FinishedRows)) for value in vars(patch).values())


def test_detach_takes_all_off() -> None:
    """Gates, guards, the patch of finished rows and CALM's exits, around an accelerate hook or within it."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = build("opt")
    layers = decoder_layers(model)
    hooks.add_hook_to_module(layers[0], hooks.ModelHook())

    def state() -> dict[str, dict[str, Any]]:
        return {
            name: {key: list(value.items()) if isinstance(value, dict) else value for key, value in vars(part).items()}
            for name, part in model.named_modules()
        }

    before = state()
    write(model, None)
    write(model, TOP)
    install_exits(attach(model, TOP))
    hooks.add_hook_to_module(layers[1], hooks.ModelHook())
    detach(model)
    hooks.remove_hook_from_module(layers[1])
    vars(layers[1]).pop("forward", None)  # accelerate leaves the bound method
    assert state() == before


def test_threads_share_a_model_while_it_is_copied() -> None:
    """Rows leave in each thread's batch; no pass meets another's rows, and copies take no cache along."""
    model = build("llama")
    expected = write(model, TOP)[0]
    failures: list[BaseException] = []
    going = threading.Event()

    def work() -> None:
        try:
            for _ in range(4):
                assert write(model, TOP)[0] == expected
        except BaseException as error:
            failures.append(error)

    def copies() -> None:
        while not going.is_set():
            try:
                copied = copy.deepcopy(model)
                assert [type(patch) for _, patch in patches_on(copied)].count(finished_rows.RowsPatch) == 1
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=work) for _ in range(4)]
    copier = threading.Thread(target=copies)
    for thread in (copier, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    going.set()
    copier.join()
    assert not failures
