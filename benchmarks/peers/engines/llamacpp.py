"""llama.cpp through its own C interface: all rows are one batch, one call of llama_decode per step."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np

from peers.protocol import Generate, Job, serve


def load(job: Job) -> Generate:
    """Load a GGUF file.

    Options: ``gguf``, the file; ``forbidden``, tokens that are never chosen. No weights are laid out for AMX, whose
    kernels crashed with Q4_1.
    """
    llama_cpp.llama_backend_init()
    file, forbidden = job["options"]["gguf"], job["options"]["forbidden"]
    loading = llama_cpp.llama_model_default_params()
    loading.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(file.encode(), loading)
    words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    length = job["prompt_tokens"] + job["new_tokens"]

    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = job["rows"]
    params.n_ctx = job["rows"] * length
    params.n_batch = job["rows"] * job["prompt_tokens"]
    params.n_threads = params.n_threads_batch = job["threads"]
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise MemoryError(f"llama.cpp makes no context of {job['rows']} rows with {length} tokens")
    batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def step(columns: list[list[int]], position: int) -> list[int]:
        """Run rows of tokens from ``position`` on; the likeliest next token of each row."""
        batch.n_tokens = 0
        ends = []
        for row, tokens in enumerate(columns):
            for offset, token in enumerate(tokens):
                i = batch.n_tokens
                batch.token[i], batch.pos[i] = token, position + offset
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
                batch.logits[i] = offset == len(tokens) - 1
                batch.n_tokens += 1
            ends.append(batch.n_tokens - 1)
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode gave {code}")
        pointers = (llama_cpp.llama_get_logits_ith(context, end) for end in ends)
        arrays = [np.ctypeslib.as_array(ctypes.cast(p, ctypes.POINTER(ctypes.c_float)), (words,)) for p in pointers]
        for array in arrays:
            array[forbidden] = -np.inf
        return [int(array.argmax()) for array in arrays]

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        chosen = step(prompts, 0)
        rows = [[token] for token in chosen]
        for position in range(len(prompts[0]), len(prompts[0]) + new_tokens - 1):
            chosen = step([[token] for token in chosen], position)
            for row, token in zip(rows, chosen, strict=True):
                row.append(token)
        return rows

    return generate


if __name__ == "__main__":
    serve(load, "llama-cpp-python")
