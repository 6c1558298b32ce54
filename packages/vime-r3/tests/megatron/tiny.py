"""A tiny Megatron mixture of experts on the CPU, and the stand-ins that megatron-core needs there."""

import contextlib

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

EXPERTS, TOP_K, HIDDEN = 8, 2, 16


class _NoStates:
    """Stands in for the CUDA random-state tracker: nothing here draws random numbers after construction."""

    is_inference_rng_tracker = False

    def is_initialized(self):
        return True

    def get_states(self):
        return {}

    def set_states(self, states):
        pass

    def fork(self, name=""):
        return contextlib.nullcontext()


def seams():
    """Makes megatron-core 0.16.1 run without a GPU and without Transformer Engine, recomputation included."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    moe_utils.te_general_gemm = None
    megatron_random._CUDA_RNG_STATE_TRACKER = _NoStates()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    megatron_random._get_all_rng_states = lambda *args: ()
    megatron_random._set_all_rng_states = lambda *args: None
    megatron_random._fork_rng = contextlib.nullcontext


def start(store, rank=0, world=1, **parallel):
    """Yields once with process groups up."""
    seams()
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(**parallel)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def build(seed=0, mtp=0, pre=True, post=True, vp_stage=None, **settings):
    """A GPTModel of 3 layers, all with 8 experts and top-2 routing unless told otherwise."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        **{
            "num_layers": 3,
            "hidden_size": HIDDEN,
            "num_attention_heads": 2,
            "ffn_hidden_size": 32,
            "moe_ffn_hidden_size": 32,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": TOP_K,
            "moe_layer_freq": 1,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "bias_dropout_fusion": False,
            "bias_activation_fusion": False,
            "masked_softmax_fusion": False,
            "mtp_num_layers": mtp or None,
        }
        | settings
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if mtp else None
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=32,
        max_sequence_length=64,
        pre_process=pre,
        post_process=post,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp_spec,
        vp_stage=vp_stage,
    )


def random_ids(tokens, layers, seed=0):
    """Distinct ids ``[tokens, layers, top_k]`` that have nothing to do with the model's own choice."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, layers, EXPERTS, generator=generator).argsort(dim=-1)[..., :TOP_K]


def run(model, tokens, labels=None):
    """The model's output for ``tokens`` [batch, sequence]: losses with labels, logits without."""
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    return model(tokens, torch.arange(length)[None], mask, labels=labels)
