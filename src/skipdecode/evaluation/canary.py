"""Compare the speeds of a running server with its full depth, through its API alone.

A prompt runs all layers. So one that ends with the text that a speed wrote has full depth's log-probabilities of that
text: full depth need not be among the server's speeds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from ..data.chat import Prompt
from ..errors import UsageError

#: Log-probabilities that are asked for at each position; vLLM's default limit (``--max-logprobs``).
LIKELIEST = 20
#: Seconds to wait for an answer.
TIMEOUT = 600
#: Least probability of the tokens that are taken as one: less is rounding.
LEAST = 1e-6

#: Token -> its log-probability, of the likeliest tokens at one position.
Likeliest = Mapping[int, float]
#: Of one compared token: its KL divergence, whether it is full depth's likeliest, how unlikely full depth finds it.
Position = tuple[float, bool, float]


@dataclass(frozen=True)
class Distance:
    """How far the texts of one speed are from full depth.

    Attributes:
        name: the model's name at this speed.
        speedup: its speed-up.
        texts: how many it wrote.
        tokens: how many of their tokens were compared: all but each first one, which follows the prompt.
        kl: mean KL divergence of the next token's distribution from full depth's, nats per token. Tokens that are not
            among the ``LIKELIEST`` of both are taken as one, so it is at most that of the whole vocabulary.
        same_token: share of the tokens that are full depth's most likely ones.
        nats: how unlikely full depth finds the texts, nats per token.
    """

    name: str
    speedup: float
    texts: int
    tokens: int
    kl: float
    same_token: float
    nats: float


class Server:
    """What is asked of a server.

    Args:
        url: its address, with or without ``/v1``.
        api_key: what ``--api-key`` of the server named, if it did.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(headers={"authorization": f"Bearer {api_key}"} if api_key else {}, timeout=TIMEOUT)

    def speeds(self) -> dict[float, str]:
        """Return the model's name at each speed-up, as ``/v1/models`` lists them. Raises UsageError without any."""
        try:
            names = [model["id"] for model in self._ask("GET", "/v1/models")["data"]]
        except (KeyError, TypeError):
            raise UsageError(f"{self.url}/v1/models lists no models: is it a server of skipdecode serve?") from None
        found: dict[float, str] = {}
        for name in names:
            match = re.fullmatch(r"(.+):([0-9.]+)x", name)
            if match and match[1] == names[0]:
                found[float(match[2])] = name
        if not found:
            raise UsageError(f"{self.url} offers {', '.join(names)}, no speeds: was it started by skipdecode serve?")
        return found

    def tokens(self, prompt: Prompt) -> list[int]:
        """Return a prompt's tokens; a conversation's end where the answer begins."""
        if isinstance(prompt, str):
            body: dict[str, Any] = {"prompt": prompt}
        else:
            begun = prompt[-1].role == "assistant"  # an answer that goes on
            body = {"messages": [message._asdict() for message in prompt]}
            body |= {"add_generation_prompt": not begun, "continue_final_message": begun}
        return list(self._ask("POST", "/tokenize", body)["tokens"])

    def write(self, name: str, prompt: Sequence[int], count: int) -> tuple[list[int], list[Likeliest]]:
        """Return the greedy text of at most ``count`` tokens by the model of this name, and the likeliest of each."""
        asked = {"max_tokens": count, "logprobs": LIKELIEST}
        choice = self._complete(name, prompt, asked | {"return_tokens_as_token_ids": True})["choices"][0]
        likeliest: list[Likeliest] = [
            {int(token.removeprefix("token_id:")): value for token, value in position.items()}
            for position in choice["logprobs"]["top_logprobs"]
        ]
        return list(choice["token_ids"]), likeliest

    def read(self, name: str, tokens: Sequence[int]) -> list[Likeliest]:
        """Return full depth's likeliest tokens at each place but the first, and the token that is there.

        Raises UsageError if a prompt of the model of this name does not run all layers.
        """
        answer = self._complete(name, tokens, {"max_tokens": 1, "prompt_logprobs": LIKELIEST})
        layers = (answer.get("metrics") or {}).get("skipdecode", {}).get("prompt_layer_tokens")
        if layers is None:
            raise UsageError(f"{self.url} does not say how many layers it ran: start it by skipdecode serve")
        if layers["run"] != layers["of"]:
            raise UsageError(
                f"prompts of {name} run {layers['run'] / layers['of']:.0%} of the layers, so the server has nothing to "
                "compare with: offer full depth too (--speedups 1,…)"
            )
        positions = answer["choices"][0]["prompt_logprobs"][1:]
        return [{int(token): found["logprob"] for token, found in position.items()} for position in positions]

    def _complete(self, name: str, prompt: Sequence[int], options: Mapping[str, Any]) -> Any:
        body = {"model": name, "prompt": list(prompt), "return_token_ids": True}
        body |= {"temperature": 0, "repetition_penalty": 1}  # whatever the model's generation_config.json says
        return self._ask("POST", "/v1/completions", {**body, **options})

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON of an answer. Raises UsageError if there is none, or if it is an error."""
        try:
            answer = self._client.request(method, self.url + path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UsageError(f"{self.url}{path} does not answer: {error}") from None
        if answer.is_error:
            raise UsageError(f"{self.url}{path} answers HTTP {answer.status_code}: {_reason(answer)}")
        try:
            return answer.json()
        except ValueError:
            raise UsageError(f"{self.url}{path} answers with no JSON: is it a server of skipdecode serve?") from None


def canary(
    server: Server,
    prompts: Sequence[Prompt],
    *,
    speedups: Sequence[float] | None = None,
    max_new_tokens: int = 64,
    concurrency: int = 8,
    on_text: Callable[[int, int], object] = lambda done, total: None,
) -> list[Distance]:
    """Let a server write a greedy text for each prompt at each speed, and compare them with its full depth.

    Args:
        server: where it is.
        prompts: texts or conversations.
        speedups: of those that the server offers; None: all but 1.
        max_new_tokens: the longest text.
        concurrency: requests at a time.
        on_text: called after each text with how many are done, and of how many.

    Raises:
        UsageError: the server does not answer, refuses a request, does not offer a speed, or runs fewer layers for
            prompts too; or no text has two tokens.
    """
    names = server.speeds()
    offered = ", ".join(names.values())
    chosen = sorted(names.keys() - {1.0}) if speedups is None else list(speedups)
    if not chosen:
        raise UsageError(f"{server.url} offers {offered} alone: there is nothing to compare")
    if missing := ", ".join(f"{speedup:g}x" for speedup in chosen if speedup not in names):
        raise UsageError(f"{server.url} offers {offered}, not {missing}")
    done: list[list[Position]] = []

    def one(unit: tuple[list[int], float]) -> list[Position]:
        tokens, speedup = unit
        text, likeliest = server.write(names[speedup], tokens, max_new_tokens)
        if len(text) < 2:
            return []
        full = server.read(names.get(1.0, names[speedup]), [*tokens, *text])[len(tokens) :]
        return [
            (divergence(wanted, here), max(wanted, key=wanted.__getitem__) == token, -wanted[token])
            for token, here, wanted in zip(text[1:], likeliest[1:], full, strict=True)
        ]

    pool = ThreadPoolExecutor(concurrency)
    try:
        work = [(tokens, speedup) for tokens in pool.map(server.tokens, prompts) for speedup in chosen]
        for positions in pool.map(one, work):
            done.append(positions)
            on_text(len(done), len(work))
    finally:
        pool.shutdown(cancel_futures=True)
    return [_distance(names[s], s, done[index :: len(chosen)]) for index, s in enumerate(chosen)]


def is_metrics(content: bytes) -> bool:
    """Tell whether a file is what :func:`metrics_text` wrote."""
    return content.startswith(b"# HELP skipdecode_canary_")


def metrics_text(found: Sequence[Distance], at: float) -> str:
    """Return the distances in Prometheus' text format; ``at``: when they were measured, seconds since 1970."""
    gauges = {
        "kl": ("KL divergence from full depth, nats per token", "kl"),
        "same_token_ratio": ("Share of tokens that are full depth's most likely ones", "same_token"),
        "nats": ("How unlikely full depth finds the texts, nats per token", "nats"),
        "tokens": ("Tokens that were compared", "tokens"),
    }
    lines = []
    for name, (about, field) in gauges.items():
        lines += [f"# HELP skipdecode_canary_{name} {about}", f"# TYPE skipdecode_canary_{name} gauge"]
        for each in found:
            labels = f'model_name={json.dumps(each.name.rpartition(":")[0])},speedup="{each.speedup:g}"'
            lines.append(f"skipdecode_canary_{name}{{{labels}}} {getattr(each, field):g}")
    about = "When it was measured, seconds since 1970"
    name = "skipdecode_canary_timestamp_seconds"
    return "\n".join([*lines, f"# HELP {name} {about}", f"# TYPE {name} gauge", f"{name} {at:.0f}", ""])


def divergence(full: Likeliest, here: Likeliest) -> float:
    """Return the KL divergence of ``here`` from ``full``, in nats; tokens that one of them lacks are taken as one."""
    both = full.keys() & here.keys()
    rest = [max(1 - sum(math.exp(each[token]) for token in both), LEAST) for each in (full, here)]
    likeliest = sum(math.exp(full[token]) * (full[token] - here[token]) for token in both)
    return likeliest + rest[0] * math.log(rest[0] / rest[1])


def _distance(name: str, speedup: float, texts: Sequence[Sequence[Position]]) -> Distance:
    positions = [position for text in texts for position in text]
    if not positions:
        raise UsageError(f"{name} wrote no text of two tokens: give other prompts, or more tokens")
    kl, same, nats = (sum(values) / len(positions) for values in zip(*positions, strict=True))
    return Distance(name, speedup, len(texts), len(positions), kl, same, nats)


def _reason(answer: httpx.Response) -> str:
    """Return the message of an error; of what is no JSON of vLLM's, its beginning."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
