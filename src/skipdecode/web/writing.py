"""Write one prompt's text at several speeds at the same time, and say how far each is."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..generation.batch import Passes, generate_batch
from ..model.attach import attach
from ..model.cache import SkipCache, total_kv_bytes
from ..schedule import Schedule
from .turns import Turns

#: Seconds between two looks at texts that are being written.
LOOK = 0.15


@dataclass(frozen=True)
class Written:
    """A text so far.

    Attributes:
        tokens: of the text, its end-of-sequence token among them.
        seconds: of computing, the prompt's among them; waiting for other texts does not count.
        kv_bytes: bytes of keys and values that are held.
        depths: layers that each decode step ran.
        done: the text ended, or was stopped.
    """

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    kv_bytes: int = 0
    depths: tuple[int, ...] = ()
    done: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of computing so far."""
        return self.tokens / self.seconds if self.seconds else 0.0


class _Turn(Passes):
    """Counts passes, and ends a turn after each: ``generate`` goes on when it is this text's turn again."""

    def __init__(self, writer: _Writer) -> None:
        super().__init__(every=True)  # a turn ends when its kernels have run
        self.writer = writer

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return (1,) whether the text is to stop."""
        super().__call__(input_ids, scores, **kwargs)
        return torch.full((1,), self.writer.next_turn(input_ids[0]), device=input_ids.device)


class _Writer(threading.Thread):
    """Writes one text."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ids: Sequence[int],
        schedule: Schedule,
        turns: Turns,
        number: int,
        stop: threading.Event,
        options: dict[str, Any],
    ) -> None:
        super().__init__(daemon=True)
        self.model, self.tokenizer, self.ids, self.options = model, tokenizer, list(ids), options
        self.turns, self.number, self.stop = turns, number, stop
        self.cache = SkipCache(attach(model), schedule)
        self.now = Written()
        self.error: BaseException | None = None

    def next_turn(self, ids: Tensor) -> bool:
        """Note how far the text is, wait for the next turn, and return whether to stop."""
        self.turns.end(self.number)
        try:
            new = ids[len(self.ids) :].tolist()
            text = self.tokenizer.decode(new, skip_special_tokens=True).strip()
            held, depths = total_kv_bytes(self.cache), tuple(self.cache.step_depths)
            self.now = Written(text, len(new), self.turns.seconds[self.number], held, depths)
        finally:  # whatever goes wrong is raised within a turn, which the thread ends
            self.turns.begin(self.number)
        return self.stop.is_set()

    def run(self) -> None:
        """Write the text; what goes wrong is kept in ``error``."""
        self.turns.begin(self.number)
        try:
            generate_batch(
                self.model, self.tokenizer, [self.ids], lambda _: self.cache, passes=_Turn(self), **self.options
            )
        except BaseException as error:  # raised where the texts are waited for
            self.error = error
        finally:
            self.turns.end(self.number, last=True)
            self.now = replace(self.now, done=True)


def write_side_by_side(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    schedules: Sequence[Schedule],
    machine: threading.Lock,
    **options: Any,
) -> Generator[list[Written]]:
    """Write a text at each schedule, token by token in turn; yield all of them a few times a second, and at the end.

    Each text is what ``generate`` alone would write. Closing the generator stops the writing.

    Args:
        ids: token ids of the prompt.
        machine: held while a token is computed, so that others on the same machine wait.
        options: of :func:`skipdecode.generation.batch.generate_batch`.

    Raises:
        SkipDecodeError: the model cannot skip exactly, or an option is wrong.
    """
    turns, stop = Turns(range(len(schedules)), machine), threading.Event()
    writers = [
        _Writer(model, tokenizer, ids, schedule, turns, number, stop, options)
        for number, schedule in enumerate(schedules)
    ]
    for writer in writers:
        writer.start()
    try:
        while True:
            if alive := [writer for writer in writers if writer.is_alive()]:
                alive[0].join(LOOK)
            if error := next((writer.error for writer in writers if writer.error), None):
                raise error
            yield [writer.now for writer in writers]
            if not alive:
                return
    finally:
        stop.set()
