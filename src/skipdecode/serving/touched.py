"""What the plugin touches of vLLM, and a check of it against a release that was not tested.

Imports vLLM only when it checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pkgutil import resolve_name

#: Function or method -> the parameters that are passed to it or read from its calls, in order.
FUNCTIONS = {
    "vllm.compilation.wrapper.TorchCompileWithNoGuardsWrapper.__init__": "self",
    "vllm.config.set_current_vllm_config": "vllm_config",
    "vllm.distributed.cleanup_dist_env_and_memory": "",
    "vllm.entrypoints.generate.beam_search.offline.BeamSearchOfflineMixin.beam_search": "self",
    "vllm.entrypoints.generate.beam_search.online.BeamSearchOnlineMixin.beam_search": "self",
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest.to_sampling_params": "self",
    "vllm.entrypoints.openai.chat_completion.serving.build_per_request_timing_metrics": "metrics",
    "vllm.entrypoints.openai.completion.protocol.CompletionRequest.to_sampling_params": "self",
    "vllm.entrypoints.openai.completion.serving.build_per_request_timing_metrics": "metrics",
    "vllm.entrypoints.openai.models.serving.OpenAIModelRegistry.is_base_model": "self model_name",
    "vllm.entrypoints.openai.models.serving.OpenAIServingModels.__init__": "self base_model_paths",
    "vllm.entrypoints.openai.responses.protocol.ResponsesRequest.to_sampling_params": "self",
    "vllm.forward_context.get_forward_context": "",
    "vllm.forward_context.set_forward_context": "attn_metadata vllm_config num_tokens",
    "vllm.logger.init_logger": "name",
    "vllm.model_executor.models.utils.extract_layer_index": "layer_name",
    "vllm.v1.core.block_pool.generate_block_hash_extra_keys": "request start_token_idx end_token_idx start_mm_idx",
    "vllm.v1.core.kv_cache_coordinator.HybridKVCacheCoordinator.find_longest_cache_hit": (
        "self block_hashes max_cache_hit_length"
    ),
    "vllm.v1.core.kv_cache_manager.KVCacheManager.__init__": "self kv_cache_config",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots": "self request num_new_tokens",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks": "self request",
    "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys": "request start_token_idx end_token_idx start_mm_idx",
    "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager._remove_blocks_in_range": (
        "self request_id first_block last_block"
    ),
    "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager.allocate_new_blocks": (
        "self request_id num_tokens num_tokens_main_model"
    ),
    "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager.get_num_blocks_to_allocate": (
        "self request_id num_tokens"
    ),
    "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager.remove_skipped_blocks": (
        "self request_id processed_computed_tokens num_prompt_tokens"
    ),
    "vllm.v1.engine.async_llm.AsyncLLM.__init__": "self vllm_config stat_loggers",
    "vllm.v1.engine.async_llm.AsyncLLM.generate": "self prompt sampling_params",
    "vllm.v1.engine.async_llm.AsyncLLM.shutdown": "self timeout",
    "vllm.v1.engine.input_processor.InputProcessor.process_inputs": "self",
    "vllm.v1.engine.output_processor.OutputProcessor._update_stats_from_finished": (
        "self req_state finish_reason iteration_stats"
    ),
    "vllm.v1.engine.output_processor.OutputProcessor.abort_requests": "self request_ids internal",
    "vllm.v1.engine.output_processor.OutputProcessor.add_request": "self request",
    "vllm.v1.kv_cache_interface.FullAttentionSpec.is_uniform_with_collection": "self kv_cache_specs",
    "vllm.v1.kv_cache_interface.FullAttentionSpec.merge": "specs",
    "vllm.v1.kv_cache_interface.replace_as": "spec target_cls",
    "vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry._ensure_registered": "",
    "vllm.v1.kv_cache_spec_registry.KVCacheSpecRegistry.register": "kvcache_spec_cls manager_class",
    "vllm.v1.metrics.loggers.StatLoggerBase.__init__": "self vllm_config engine_index",
    "vllm.v1.metrics.loggers.StatLoggerBase.log_engine_initialized": "self",
    "vllm.v1.metrics.loggers.StatLoggerBase.record": "self scheduler_stats iteration_stats",
    "vllm.v1.worker.cpu_worker.CPUWorker.compile_or_warm_up_model": "self",
    "vllm.v1.worker.cpu_worker.CPUWorker.init_device": "self",
    "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager.dispatch": (
        "self num_reqs num_tokens uniform_token_count num_active_loras"
    ),
    "vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager.capture": "self lora_capture_hook",
    "vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager.run_fullgraph": "self desc",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner._dummy_run": "self num_tokens skip_attn is_profile",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.execute_model": "self",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.gather_batch_req_state": "self",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.get_kv_cache_spec": "self",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.initialize_kv_cache": "self",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.load_model": "self",
    "vllm.v1.worker.gpu.model_states.default.DefaultModelState.add_request": "self req_index new_req_data",
    "vllm.v1.worker.gpu.model_states.default.DefaultModelState.preprocess_state": "self input_batch block_tables",
    "vllm.v1.worker.gpu.model_states.default.DefaultModelState.remove_request": "self req_id",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._bookkeeping_sync": "self",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._dummy_run": "self num_tokens",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._model_forward": "self input_ids positions",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample": "self",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.get_kv_cache_spec": "self",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.initialize_kv_cache": "self",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.load_model": "self",
    "vllm.v1.worker.gpu_worker.Worker.compile_or_warm_up_model": "self",
    "vllm.v1.worker.gpu_worker.Worker.init_device": "self",
}
#: Class -> attributes of its instances that are read or written.
ATTRIBUTES = {
    "vllm.config.CompilationConfig": "backend inductor_compile_config",
    "vllm.forward_context.ForwardContext": (
        "attn_metadata slot_mapping skip_compiled cudagraph_runtime_mode all_moe_layers"
    ),
    "vllm.model_executor.layers.attention.attention.Attention": "kv_sharing_target_layer_name",
    "vllm.v1.attention.backend.CommonAttentionMetadata": (
        "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs num_actual_tokens "
        "max_query_len max_seq_len block_table_tensor slot_mapping causal is_prefilling positions"
    ),
    "vllm.v1.core.kv_cache_coordinator.HybridKVCacheCoordinator": ("attention_groups single_type_managers block_pool"),
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "coordinator empty_kv_cache_blocks",
    "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager": (
        "req_to_blocks block_size kv_cache_spec _null_block"
    ),
    "vllm.v1.engine.async_llm.AsyncLLM": "input_processor output_processor errored",
    "vllm.v1.engine.output_processor.OutputProcessor": "request_states",
    "vllm.v1.engine.output_processor.RequestState": (
        "request_id is_prefilling prompt_len num_cached_tokens detokenizer stats"
    ),
    "vllm.v1.metrics.stats.RequestStateStats": "first_token_ts last_token_ts first_token_latency",
    "vllm.v1.request.Request": (
        "sampling_params num_prompt_tokens num_computed_tokens num_in_flight_tokens request_id status"
    ),
    "vllm.v1.worker.gpu.cudagraph_utils.BatchExecutionDescriptor": "cg_mode num_tokens num_reqs num_active_loras",
    "vllm.v1.worker.gpu.input_batch.InputBatch": (
        "num_reqs positions seq_lens seq_lens_cpu_upper_bound is_prefilling_np"
    ),
    "vllm.v1.worker.gpu.model_runner.BatchReqState": "req_ids idx_mapping_np num_scheduled_tokens",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": (
        "model_state req_states attn_groups model vllm_config lora_capture_cases cudagraph_manager max_num_tokens"
    ),
    "vllm.v1.worker.gpu.states.RequestState": "num_computed_tokens_np prompt_len",
    "vllm.v1.worker.gpu_input_batch.InputBatch": (
        "num_reqs req_ids num_computed_tokens_cpu num_computed_tokens_cpu_tensor num_prompt_tokens "
        "num_prompt_tokens_cpu_tensor block_table generators"
    ),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": (
        "input_batch requests query_start_loc attn_groups seq_lens optimistic_seq_lens_cpu positions "
        "discard_request_mask model_config vllm_config device model max_num_tokens"
    ),
    "vllm.v1.worker.utils.AttentionGroup": "backend layer_names kernel_block_size",
}


def changes() -> list[str]:
    """Return, in words, what of this is missing or takes other parameters in the vLLM that is installed."""
    return [*_changed_functions(), *_changed_attributes()]


def _changed_functions() -> Iterator[str]:
    for name, wanted in FUNCTIONS.items():
        try:
            given = list(inspect.signature(resolve_name(name)).parameters)
        except (ImportError, AttributeError) as error:
            yield f"{name} is gone ({error})"
            continue
        if [each for each in given if each in wanted.split()] != wanted.split():
            yield f"{name} takes {', '.join(given) or 'nothing'}, where {', '.join(wanted.split())} is expected"


def _changed_attributes() -> Iterator[str]:
    for name, wanted in ATTRIBUTES.items():
        try:
            kind = resolve_name(name)
        except (ImportError, AttributeError) as error:
            yield f"{name} is gone ({error})"
            continue
        ours = [each for each in kind.__mro__ if each.__module__.startswith("vllm")]
        source = "".join(map(inspect.getsource, ours))
        for each in wanted.split():
            fields = any(each in vars(one) or each in getattr(one, "__annotations__", ()) for one in ours)
            if not fields and f"self.{each}" not in source:
                yield f"{name} has no attribute {each}"
