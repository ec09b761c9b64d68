"""Check of an engine before it serves: what it generates, against teacher-forced passes of transformers' model.

Each speed is asked alone, where decode steps run from CUDA graphs if there are any, then all at once, then each goes on
from another's text, which the prefix cache may hold. The reference has the engine's dtype, and is loaded on the CPU.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

from ..errors import UnsupportedModel
from ..loading.load import Checkpoint
from ..model.attach import attach, teacher_forced
from ..model.inspect import decoder_layers
from .settings import GPU_WORKER, TESTED, Serving, serving_of

logger = logging.getLogger(f"vllm.{__name__}")
#: Tokens of the prompts, new tokens of each, and the likeliest tokens of each step that are compared.
LENGTHS, NEW, TOP = (6, 33, 56), 16, 5
#: What rounding explains: most difference of log-probabilities, in nats, of any token, and in the mean; or so many
#: times what noise of the dtype's precision behind each layer changes. SmolLM2 in bfloat16 was at 1.4 and 1.2 times it.
MOST, MEAN, TIMES = 0.02, 0.002, 3
#: And most difference of a hidden state's norm, as a share of it, in float32 and in other dtypes.
NORM, ROUNDED_NORM = 1e-3, 0.05


class Request(NamedTuple):
    """A prompt of token ids, and its speed-up."""

    prompt: tuple[int, ...]
    speedup: float


#: Lets the engine write :data:`NEW` tokens for requests, all at once, and gives vLLM's ``CompletionOutput`` of each.
Ask = Callable[[Sequence[Request]], Sequence[Any]]
#: Lets workers record norms of hidden states, or gives what one has recorded: (layer, norms of a step's tokens).
Record = Callable[[bool], Sequence[tuple[int, list[float]]]]


def is_needed(vllm_config: Any, serving: Serving) -> bool:
    """Whether an engine is checked: on a GPU, on a release of vLLM that was not tested, or where the user asks."""
    import vllm

    on_gpu = vllm_config.parallel_config.worker_cls == GPU_WORKER
    return serving.check or on_gpu or vllm.__version__.split("+")[0] != TESTED


def check_engine(engine: Any, serving: Serving) -> None:
    """Check an ``LLMEngine``."""

    def ask(requests: Sequence[Request]) -> list[Any]:
        found: dict[str, Any] = {}
        names = [f"self-check {uuid4()}" for _ in requests]
        for name, request in zip(names, requests, strict=True):
            engine.add_request(name, *_asked(request))
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
        return [found[name] for name in names]

    def record(begin: bool) -> Any:
        return engine.collective_rpc("skipdecode_record", args=(begin,))[0]

    self_check(engine.vllm_config, serving, ask, record, logger.warning)


async def check_server(original: Any, client: Any, *args: Any, **kwargs: Any) -> None:
    """Check an ``AsyncLLM`` where its server is ready but for listening; ``original`` then makes the server."""
    loop = asyncio.get_running_loop()

    async def one(request: Request) -> Any:
        outputs = client.generate(*_asked(request), f"self-check {uuid4()}")
        return [output async for output in outputs][-1].outputs[0]

    def ask(requests: Sequence[Request]) -> list[Any]:
        started = [asyncio.run_coroutine_threadsafe(one(request), loop) for request in requests]
        return [each.result() for each in started]

    def record(begin: bool) -> Any:
        found = client.collective_rpc("skipdecode_record", args=(begin,))
        return asyncio.run_coroutine_threadsafe(found, loop).result()[0]

    serving: Any = serving_of(client.vllm_config)
    await asyncio.to_thread(self_check, client.vllm_config, serving, ask, record, logger.warning)
    await original(client, *args, **kwargs)


def _asked(request: Request) -> tuple[Any, Any]:
    """vLLM's prompt and SamplingParams of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    same: dict[str, Any] = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "logprobs": TOP}
    same |= {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    params = SamplingParams(**same, extra_args={"speedup": request.speedup})
    return {"prompt_token_ids": list(request.prompt)}, params


@torch.no_grad()
def self_check(vllm_config: Any, serving: Serving, ask: Ask, record: Record, say: Callable[[str], object]) -> None:
    """Compare an engine with its plain model, and tell what was compared.

    Raises UnsupportedModel, which names the speed and the layer, if log-probabilities differ by more than rounding
    explains.
    """
    given = vllm_config.model_config
    if given.quantization is not None:
        say(f"skipdecode: not checked: transformers has no weights like those of {given.quantization}")
        return
    if 0 <= given.max_logprobs < TOP or given.logprobs_mode != "raw_logprobs":
        raise UnsupportedModel(f"skipdecode: the self-check needs --max-logprobs {TOP} and the mode raw_logprobs")
    reference = Reference(given, serving)
    source = random.Random(0)
    most = max(1, given.max_model_len - 2 * NEW)
    ids = range(min(given.get_vocab_size(), 1000))
    prompts = [tuple(source.choices(ids, k=min(length, most))) for length in LENGTHS]
    tokens: list[int] = []
    compared: list[tuple[float, float]] = []

    def compare(where: str, requests: Sequence[Request]) -> Sequence[Any]:
        answers = ask(requests)
        for request, found in zip(requests, answers, strict=True):
            (off, mean), (most_off, most_mean) = reference.distance(request, found)
            tokens.append(len(found.token_ids))
            compared.append((off, mean))
            if off <= most_off and mean <= most_mean:  # a NaN is not
                continue
            record(True)
            again = ask([request])[0]
            layer = reference.first_layer(request, again, record(False))
            raise UnsupportedModel(
                f"skipdecode: the self-check failed at {request.speedup:g}x, {where}, "
                f"{'in no single layer' if layer is None else f'first in layer {layer}'}: log-probabilities are off "
                f"by {off:.2g} nats, {mean:.2g} in the mean; rounding explains {most_off:.2g} and {most_mean:.2g}"
            )
        return answers

    speeds = [*serving.schedules]
    for speedup in speeds:
        compare("alone", [Request(prompt, speedup) for prompt in prompts])
    mixed = [Request(prompt, speedup) for speedup in speeds for prompt in prompts]
    answers = compare("among other speeds", mixed)
    # Another speed goes on from each text: the prefix cache must tell their keys and values apart.
    after = dict(zip(speeds, [*speeds[1:], *speeds[:1]], strict=True))
    turns = [Request((*r.prompt, *found.token_ids), after[r.speedup]) for r, found in zip(mixed, answers, strict=True)]
    compare("behind another speed's text", turns)
    listed = ", ".join(f"{speedup:g}x" for speedup in speeds)
    most, mean = map(max, zip(*compared, strict=True))
    say(
        f"skipdecode: self-check of {sum(tokens)} tokens at {listed}, alone, together and behind each other's texts: "
        f"off by {most:.1g} nats at most, {mean:.1g} in a text's mean, in {str(given.dtype).removeprefix('torch.')}"
    )


class Reference:
    """transformers' model in an engine's dtype, and its teacher-forced passes over what the engine wrote."""

    def __init__(self, given: Any, serving: Serving) -> None:
        checkpoint = Checkpoint.resolve(given.model, serving.adapter, given.revision)
        self.model: Any = attach(checkpoint.load(str(given.dtype).removeprefix("torch."), "cpu"))
        self.serving = serving
        self.noise = torch.finfo(given.dtype).eps
        self.norm = NORM if given.dtype == torch.float32 else ROUNDED_NORM
        self._norms: dict[int, Tensor] = {}  # (positions,) of each layer's output, in the newest pass without noise
        self._noisy: torch.Generator | None = None
        self._known: dict[tuple[Request, tuple[int, ...]], tuple[Tensor, Tensor, dict[int, Tensor]]] = {}
        for index, layer in enumerate(decoder_layers(self.model)):
            layer.register_forward_hook(partial(self._behind, index))

    def _behind(self, index: int, layer: Any, args: Any, output: Any) -> Any:
        """Keep a layer's norms, or add noise to its output."""
        hidden = output[0] if isinstance(output, tuple) else output
        if self._noisy is None:
            self._norms[index] = hidden[0].float().norm(dim=-1)
            return output
        shake = 2 * torch.rand(hidden.shape, generator=self._noisy) - 1
        hidden = (hidden.float() * (1 + self.noise * shake)).to(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def read(self, request: Request, found: Any) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Log-probabilities (tokens, vocabulary) of each new token, without and with noise; each layer's norms."""
        tokens = tuple(found.token_ids)
        if (request, tokens) not in self._known:
            plain, norms = self._forward(request, tokens), self._norms.copy()
            self._noisy = torch.Generator().manual_seed(0)
            self._known[request, tokens] = plain, self._forward(request, tokens), norms
            self._noisy = None
        return self._known[request, tokens]

    def _forward(self, request: Request, tokens: tuple[int, ...]) -> Tensor:
        ids = torch.tensor([[*request.prompt, *tokens[:-1]]])
        with teacher_forced(self.model, self.serving.schedules[request.speedup], len(request.prompt)):
            logits = self.model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0, -len(tokens) :]
        return logits.float().log_softmax(-1)

    def distance(self, request: Request, found: Any) -> tuple[tuple[float, float], tuple[float, float]]:
        """Most and mean difference of log-probabilities from the engine's, and those that rounding explains."""
        steps = enumerate(found.logprobs)
        rows = [(place, token, each.logprob) for place, step in steps for token, each in step.items()]
        places, tokens, values = zip(*rows, strict=True)
        expected, noisy = (part[list(places), list(tokens)] for part in self.read(request, found)[:2])
        off, rounding = (expected - torch.tensor(values)).abs(), (expected - noisy).abs()
        explained = max(MOST, TIMES * float(rounding.max())), max(MEAN, TIMES * float(rounding.mean()))
        return (float(off.max()), float(off.mean())), explained

    def first_layer(self, request: Request, found: Any, recorded: Sequence[tuple[int, list[float]]]) -> int | None:
        """First layer whose outputs have other norms than those that a worker recorded."""
        *_, expected = self.read(request, found)
        here: dict[int, list[float]] = {}
        for index, norms in recorded:
            here.setdefault(index, []).extend(norms)
        for index, norms in sorted(here.items()):
            same = expected[index][-len(norms) :]  # the prefix cache may have had the first positions
            if not bool(((torch.tensor(norms) - same).abs() <= self.norm * same).all()):
                return index
        return None
