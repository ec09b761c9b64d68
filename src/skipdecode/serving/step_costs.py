"""What steps cost on this machine, learned while it serves, and how many new requests to let in together. No vLLM here.

A step that holds a prompt runs all layers once for all its rows, where a decode step runs few. Letting prompts in by
groups pays this extra once per group, and leaves slots empty meanwhile. Both are seconds, and differ by machine, model
and load: so they are measured from the steps themselves. This is the switching threshold of exclusive batching
(arXiv 2606.00516, its proposition 1, for texts that may end at any step), with sums in place of its logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, sqrt

#: Steps over which a measurement counts less and less: decode steps, steps with prompts (fewer), and of all steps those
#: that say how long requests are (texts are longer than steps).
MEMORY = (256, 64, 1024)
#: Seen before anything is concluded: decode steps, steps with prompts, texts that ended.
ENOUGH = (32, 16, 8)
#: A step that takes longer than so many times what was expected was held up by something else.
SPIKE = 4.0
#: Standard errors by which the extra of a step with prompts must exceed nothing.
DOUBT = 2.0
#: Prompt tokens of steps that differ by less than this share of their mean do not say what is extra and what is theirs.
ALIKE = 0.05
#: A group is chosen for this share of a request's seconds, not for less.
WORTH = 0.02


@dataclass
class Line:
    """``y = fixed + each * x`` through points of which older ones count less, neither of the two below zero.

    Weighted means and squares are kept up to date one point at a time (West, 1979), so that nothing cancels out.
    """

    memory: int
    count: int = 0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """One more point."""
        kept = 1 - 1 / self.memory
        self.count += 1
        self.weight = self.weight * kept + 1
        dx, dy = x - self.x, y - self.y
        self.x += dx / self.weight
        self.y += dy / self.weight
        self.xx = self.xx * kept + dx * (x - self.x)
        self.xy = self.xy * kept + dx * (y - self.y)
        self.yy = self.yy * kept + dy * (y - self.y)

    @property
    def each(self) -> float:
        """The slope. Of points at one place it is nothing."""
        if self.xx <= 0:
            return 0.0
        each = max(self.xy / self.xx, 0.0)
        if each * self.x <= max(self.y, 0.0):
            return each
        return max(self.xy + self.weight * self.x * self.y, 0.0) / (self.xx + self.weight * self.x**2)

    @property
    def fixed(self) -> float:
        """Where the line meets ``x = 0``."""
        return max(self.y - self.each * self.x, 0.0)

    @property
    def sure(self) -> float:
        """What of ``fixed`` noise does not explain; nothing where points at one place leave it open."""
        if self.xx <= 0 or self.weight <= 2:
            return 0.0
        spread = max(self.yy - self.each * self.xy, 0.0) / (self.weight - 2)
        error = sqrt(spread * (1 / self.weight + self.x**2 / self.xx))
        return max(self.fixed - DOUBT * error, 0.0)

    def at(self, x: float) -> float:
        """The line's height."""
        return self.fixed + self.each * x


@dataclass
class StepCosts:
    """Seconds of steps, as they were lately.

    Attributes:
        decode: of a step without prompts, by rows.
        prompts: what prompts add to a step, by their tokens.
    """

    decode: Line = field(default_factory=lambda: Line(MEMORY[0]))
    prompts: Line = field(default_factory=lambda: Line(MEMORY[1]))
    _rows: float = 0.0
    _prompt_tokens: float = 0.0
    _ended: float = 0.0
    _endings: int = 0

    def add(self, seconds: float, rows: int, prompt_tokens: int, ended: int) -> None:
        """One step.

        Args:
            seconds: that it took.
            rows: requests that decoded in it.
            prompt_tokens: tokens of prompts in it.
            ended: requests that ended since the step before.
        """
        kept = 1 - 1 / MEMORY[2]
        self._rows = self._rows * kept + rows
        self._prompt_tokens = self._prompt_tokens * kept + prompt_tokens
        self._ended = self._ended * kept + ended
        self._endings += ended
        expected = self.decode.at(rows)
        if not prompt_tokens:
            if rows:
                self.decode.add(rows, min(seconds, SPIKE * expected) if self.decode.count >= ENOUGH[0] else seconds)
        elif self.decode.count >= ENOUGH[0]:  # before that, nobody knows what the step would have taken without
            if self.prompts.count >= ENOUGH[1]:
                seconds = min(seconds, SPIKE * (expected + self.prompts.at(prompt_tokens)))
            self.prompts.add(prompt_tokens, seconds - expected)

    @property
    def known(self) -> bool:
        """Whether enough was seen to conclude anything."""
        seen = (self.decode.count, self.prompts.count, self._endings)
        # Rows fade where nobody decodes any more: requests of one token.
        return all(count >= enough for count, enough in zip(seen, ENOUGH, strict=True)) and self._rows >= 1

    @property
    def steps(self) -> float:
        """Decode steps of a request, on average."""
        return self._rows / self._ended if self._ended > 0 else inf

    def per_request(self, slots: int) -> list[float]:
        """Machine seconds that a request takes where requests always wait, if they are let in by 1, 2, … ``slots``.

        Of ``slots`` rows, one ends about every ``steps / slots`` steps; a step's fixed seconds are paid in full however
        many slots are empty. Where more than one ends per step, they come in together anyway.
        """
        idle = list(accumulate(1 / (slots - empty) for empty in range(slots)))
        anyway = min(max(round(slots / self.steps), 1), slots)
        constant = self.steps * self.decode.each + self._prompt_tokens / self._ended * self.prompts.each
        extra, fixed = self.prompts.sure, self.steps * self.decode.fixed
        groups = (max(group, anyway) for group in range(1, slots + 1))
        return [constant + (extra + fixed * idle[group - 1]) / group for group in groups]

    def group(self, slots: int, now: int = 1) -> int:
        """How many new requests to let in together; 1 where it is not known, or not worth anything.

        Args:
            slots: requests that may run at once.
            now: the group so far, which stays while another is not worth the change.
        """
        if not self.known:
            return 1
        if self.prompts.xx < self.prompts.weight * (ALIKE * self.prompts.x) ** 2:
            return now  # groups of prompts of one length would make themselves forgotten
        costs = self.per_request(slots)
        limit = (1 + WORTH) * min(costs)
        kept = (group for group in (1, now) if group <= slots and costs[group - 1] <= limit)
        return next(kept, costs.index(min(costs)) + 1)

    def __str__(self) -> str:
        decode, prompts = self.decode, self.prompts
        return (
            f"a decode step takes {1e3 * decode.fixed:.1f} ms and {1e3 * decode.each:.2f} ms a row, prompts add "
            f"{1e3 * prompts.fixed:.1f} ms (at least {1e3 * prompts.sure:.1f}) and {1e3 * prompts.each:.3f} ms a token "
            f"to a step, a request takes {self.steps:.0f} decode steps"
        )
