"""What people ask of generate, in random combinations, against a stock model without a cache, its layers undone."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

from helpers.families import DENSE, build, distance, naive, run
from skipdecode import Schedule, SkipCache, attach, detach
from skipdecode.model.cache_name import CACHE
from skipdecode.model.inspect import decoder_layers
from torture.attempt import Attempt, Found, Kind
from torture.models import WORDS, draw_batch, draw_model, draw_schedule

#: Embeddings of these are inputs like any other, and cached and uncached logits are close.
PLAIN = tuple(DENSE)


class Biased(LogitsProcessor):
    """A processor of one's own: some tokens are likelier after an even last one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        bias = torch.linspace(-2, 2, scores.shape[1]).expand_as(scores)
        return torch.where((input_ids[:, -1:] % 2 == 0), scores + bias, scores)


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        """A prompt, or a token."""
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Nothing more comes."""


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A character for each id."""
    characters = Tokenizer(models.BPE({chr(i): i for i in range(WORDS)}, []))
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="\0", padding_side="left")


def draw_options(random: Random, alone: bool) -> dict[str, Any]:
    """Options of generate that may stand together."""
    options: dict[str, Any] = {"max_new_tokens": random.randint(2, 14)}
    beams = random.choice((1, 1, 1, 2, 3))
    if random.random() < 0.5:
        options |= {"do_sample": True, "temperature": random.choice((0.3, 1.0, 2.0))}
        options |= random.choice(({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"typical_p": 0.9}))
    if beams > 1:
        options |= {
            "num_beams": beams,
            "length_penalty": random.choice((-1.0, 1.0)),
            "early_stopping": random.random() < 0.5,
        }
    if beams > 1 or "do_sample" in options:
        options["num_return_sequences"] = random.randint(1, max(beams, 1 if beams > 1 else 3))
    more: list[dict[str, Any]] = [
        *(
            {"repetition_penalty": 1.5},
            {"no_repeat_ngram_size": 2},
            {"min_new_tokens": 2},
            {"bad_words_ids": [[5], [6, 7]]},
        ),
        *({"eos_token_id": [3, 9, 40, 77]}, {"suppress_tokens": list(range(20, 60))}, {"renormalize_logits": True}),
        *({"logits_processor": LogitsProcessorList([Biased()])}, {"forced_eos_token_id": 9}, {"guidance_scale": None}),
        *(
            {"stop_strings": [chr(a) for a in range(40, 70)], "tokenizer": tokenizer()},
            {"exponential_decay_length_penalty": (2, 1.1)},
        ),
    ]
    for choice in random.sample(more, random.randint(0, 3)):
        options |= choice
    if "exponential_decay_length_penalty" in options or "forced_eos_token_id" in options:
        options["eos_token_id"] = [3, 9, 40, 77]
    if alone and beams == 1 and options.get("num_return_sequences", 1) == 1 and random.random() < 0.5:
        options["streamer"] = Heard()
    return options


def options(attempt: Attempt) -> None:
    """Sampling, beams, processors, stop strings, several texts, streams: those of the naive model."""
    random = attempt.random
    (name, model), plan, inputs = draw_model(attempt, PLAIN), draw_schedule(random), draw_batch(random)
    given = draw_options(random, alone=len(inputs["input_ids"]) == 1)
    seed, width = random.randrange(2**31), inputs["input_ids"].shape[1]
    heard = given.get("streamer")
    torch.manual_seed(seed)
    ours = run(model, inputs, plan, **given)
    if heard is not None and heard.tokens != ours.sequences[0].tolist():
        raise Found(f"{name}, {plan}, {given}: streamed {heard.tokens}, returned {ours.sequences.tolist()}")
    given.pop("streamer", None)
    with naive(model, plan, width) as stock:
        torch.manual_seed(seed)
        theirs = run(stock, inputs, use_cache=False, **given)
    attempt.counts["texts"] += len(ours.sequences)
    if torch.equal(ours.sequences, theirs.sequences):
        return
    # One step in which rounding decides between two tokens, and all is different from there.
    for step, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=False)):
        if a.shape != b.shape or distance(a, b) > 1e-4:
            lengths = inputs["attention_mask"].sum(1).tolist()
            raise Found(
                f"{name}, {plan}, {given}, {lengths} tokens: logits of step {step} differ\n"
                f"{ours.sequences.tolist()}\n{theirs.sequences.tolist()}"
            )
    attempt.counts["ties"] += 1


def embeddings(attempt: Attempt) -> None:
    """Input embeddings instead of ids: the same tokens."""
    random = attempt.random
    (name, model), plan, inputs = draw_model(attempt, PLAIN), draw_schedule(random), draw_batch(random)
    expected = run(model, inputs, plan)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    mask = inputs["attention_mask"]
    found = run(model, {"inputs_embeds": embeds, "attention_mask": mask}, plan)
    if not torch.equal(found.sequences, expected.sequences[:, mask.shape[1] :]):
        raise Found(f"{name}, {plan}: from embeddings {found.sequences}, from ids {expected.sequences}")


def types(attempt: Attempt) -> None:
    """In bfloat16 and float16: full depth is the stock model to the bit; runs repeat; depths are those asked for."""
    random = attempt.random
    name = random.choice(PLAIN)
    dtype = random.choice((torch.bfloat16, torch.float16))
    model, plan, inputs = build(name).to(dtype), draw_schedule(random), draw_batch(random)
    stock = run(model, inputs)
    attach(model)
    for again in (run(model, inputs), run(model, inputs, Schedule.full(plan.num_layers))):
        if not all(map(torch.equal, stock.logits, again.logits)):
            raise Found(f"{name}, {dtype}: full depth is not the stock model")
    one, two = run(model, inputs, plan), run(model, inputs, plan)
    if not all(map(torch.equal, one.logits, two.logits)):
        raise Found(f"{name}, {dtype}, {plan}: a second run differs")
    depths = [plan.depth(step) for step in range(len(one.logits) - 1)]
    if one[CACHE].step_depths != depths:
        raise Found(f"{name}, {dtype}, {plan}: ran {one[CACHE].step_depths}, not {depths}")


class Interrupt(BaseException):
    """Comes out of a layer in the middle of a pass."""


def lives(attempt: Attempt) -> None:
    """A model through copies, pickles, saving, errors in the middle, attach and detach: each text as from a new one."""
    random = attempt.random
    name = random.choice(PLAIN)
    model, inputs = build(name), draw_batch(random)
    plans: list[Schedule | None] = [draw_schedule(random), draw_schedule(random), None]
    expected = [run(attach(build(name)), inputs, plan).sequences for plan in plans]
    caches = []
    for _ in range(8):
        way = random.choice(("attach", "detach", "deepcopy", "pickle", "reload", "error", "second"))
        attempt.counts[way] += 1
        if way == "attach":
            attach(model)
        elif way == "detach":
            detach(model)
        elif way == "deepcopy":
            model = copy.deepcopy(model)
        elif way == "pickle":
            model = pickle.loads(pickle.dumps(model))
        elif way == "reload":
            model.save_pretrained(attempt.folder / "saved")
            model = type(model).from_pretrained(
                attempt.folder / "saved", attn_implementation=model.config._attn_implementation
            )
        elif way == "error":
            _break(model, inputs, plans[0], random)
        else:
            cache = SkipCache(attach(model), plans[0])
            run(model, inputs, **{CACHE: cache})
            caches.append(weakref.ref(cache))
            del cache
        index = random.randrange(len(plans))
        if not torch.equal(run(model, inputs, plans[index]).sequences, expected[index]):
            raise Found(f"{name}: after {way}, {plans[index]} writes something else")
    gc.collect()
    if any(cache() for cache in caches):
        raise Found(f"{name}: a cache is still held")


def _break(model: PreTrainedModel, inputs: dict[str, Tensor], plan: Schedule | None, random: Random) -> None:
    left = [random.randrange(20)]

    def fail(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Interrupt

    handle = random.choice(list(decoder_layers(model))).register_forward_pre_hook(fail)
    try:
        run(model, inputs, plan)
    except Interrupt:
        pass
    finally:
        handle.remove()


KINDS: dict[str, Kind] = {attack.__name__: attack for attack in (options, embeddings, types, lives)}
