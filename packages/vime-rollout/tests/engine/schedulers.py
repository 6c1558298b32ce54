"""vLLM's schedulers without an engine around them, and what a worker would answer them."""

from __future__ import annotations

import numpy as np


def make(kind, folder, blocks, block_size=4, max_seqs=6, budget=24, length=128, capture=True):
    """A scheduler of class ``kind`` for the model in ``folder``, with ``blocks`` blocks of KV cache."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", enable_return_routed_experts=capture, max_model_len=length
        ),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs, max_num_batched_tokens=budget, max_model_len=length, enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
    )  # fmt: skip
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = "Async" in kind.__name__
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return kind(
        vllm_config=config, kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        block_size=block_size, hash_block_size=block_size, structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip


def request(name, prompt, params, block_size=4):
    """A request as the core has it."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(name, prompt, params, None, block_hasher=get_request_block_hasher(block_size, sha256))


def work(one, scheduled, ids=None, logprobs=None, block_size=4):
    """What a worker would answer: tokens that follow from their place, and ``ids(n)`` as the routes of the n tokens read."""
    from vllm.v1.outputs import ModelRunnerOutput, RoutedExpertsLists

    slots, sampled = [], []
    for name, count in scheduled.num_scheduled_tokens.items():
        found, blocks = one.requests[name], one.kv_cache_manager.get_block_ids(name)[0]
        first = found.num_computed_tokens - count
        slots += [blocks[at // block_size] * block_size + at % block_size for at in range(first, first + count)]
        sampled.append([] if found.is_prefill_chunk else [(7 * first + len(sampled)) % 57 + 3])
    names = list(scheduled.num_scheduled_tokens)
    answer = ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: index for index, name in enumerate(names)}, sampled_token_ids=sampled
    )
    if ids is not None:
        answer.routed_experts = RoutedExpertsLists(ids(len(slots)), np.array(slots, dtype=np.int64))
    if logprobs is not None:
        answer.logprobs = logprobs(len(names))
    return answer
