"""``Modules``: the names of a decoder's parts in the checkpoints of a family, and how their weights lie there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Modules:
    """Names of modules. Those below a layer are relative to it.

    Attributes:
        layers, embedding, norm, head: of the model; ``norm`` is the last norm.
        positions: the table of learned positions; None where there is none.
        position_offset: the row of position 0 in that table.
        sinks: the scores of each head that belong to no key, in families that have them.
        attention: the module to which the scales of the KV cache belong.
        attention_norm: the norm of the attention's input; None where it is the residual stream itself.
        attention_out_norm: the norm of the attention's output, before it is added to the stream; None without.
        mlp_norm: the norm of the feed-forward's input; None where it is the residual stream itself, or where a parallel
            block has one norm for both.
        mlp_out_norm: the norm of the feed-forward's output; None without.
        q_norm, k_norm: the norms of queries and keys, in families that have them.
        qkv: the linears of queries, keys and values, or one that joins them.
        q_a, q_a_norm, q_b: of latent attention, the linear from the stream to the latent of the queries, its norm, and
            the linear from there to the queries; without that latent, ``qkv`` begins with the linear of the queries.
        kv_a, kv_a_norm, kv_b: the linear to the latent of keys and values and to the rotated key, the norm of that
            latent, and the linear from there to keys and values.
        out: the linear behind the attention.
        up: the linears that read the feed-forward's input: gate and up, one that joins them, or one without a gate.
        down: the linear that writes the feed-forward's output.
        router: the linear that gives each expert its score.
        score_bias: the tensor that corrects these scores.
        experts: the module that holds the experts, numbered.
        expert_up, expert_down: the linears of an expert, gate and up first.
        stacked: the tensors [experts, out, in] of all their gate and up projections joined, and of all their down
            projections, where they are not stored one by one. Those of their biases end in ``_bias``.
        stacked_transposed: these tensors are [experts, in, out].
        alternating: the rows of an expert's joined projections are those of gate and up in turn.
        shared_up, shared_down: the linears of the expert that every token takes.
        shared_gate: the linear of its gate.
        grouped: the joined linear holds for each key head its queries, then its key, then its value.
        interleaved: rotations pair neighbouring rows of queries and keys, not those half a head apart.
        transposed: dense weights of a layer's linears lie [in, out] (``Conv1D``).
        delta: the module of a gated delta net, in families that have them.
        delta_in: the linears of its q, k and v together, and of z, b and a; or one for q, k, v and z, and one for b
            and a, which hold what belongs to a key head side by side.
        delta_out: the linear behind it.
    """

    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    positions: str | None = None
    position_offset: int = 0
    norm: str = "model.norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm"
    kv_b: str = "self_attn.kv_b_proj"
    out: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    score_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    expert_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    stacked: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    stacked_transposed: bool = False
    alternating: bool = False
    shared_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    grouped: bool = False
    interleaved: bool = False
    transposed: bool = False
    delta: str = "linear_attn"
    delta_in: tuple[str, ...] = (
        "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"
    )
    delta_out: str = "linear_attn.out_proj"

    @property
    def norms(self) -> int:
        """Norms of the stream or of what is added to it, per layer."""
        norms = (self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm)
        return sum(norm is not None for norm in norms)

    def named_as_transformers(self, stored: Mapping[str, T], layers: int | None = None) -> dict[str, T]:
        """Tensors of a checkpoint by the names that transformers has for them today. Older checkpoints leave out the
        name of the model's body, call the output layer ``embed_out``, and hold masks and the frequencies of rotations,
        which are left out. So are layers that guess tokens further on: those called ``mtp``, and those beyond the
        number of ``layers`` (DeepSeek-V3's multi-token prediction)."""
        body = self.embedding.partition(".")[0]
        inside = self.embedding.removeprefix(f"{body}.")
        headless = any(name.startswith(f"{inside}.") for name in stored)
        left_out = re.compile(
            rf"{re.escape(self.layers)}\.\d+\.{re.escape(self.attention)}\.((masked_)?bias|rotary_emb\.inv_freq)|mtp\..*"
        )
        in_layer = re.compile(rf"{re.escape(self.layers)}\.(\d+)\.")
        found = {}
        for old, tensor in stored.items():
            name = old.replace("embed_out.", f"{self.head}.", 1) if old.startswith("embed_out.") else old
            if headless and not name.startswith((f"{self.head}.", f"{body}.", "score.")):
                name = f"{body}.{name}"
            of_layer = in_layer.match(name)
            guesses = layers is not None and of_layer is not None and int(of_layer[1]) >= layers
            if not guesses and not left_out.fullmatch(name):
                found[name] = tensor
        return found


LLAMA = Modules()
PHI3 = Modules(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
GEMMA2 = Modules(
    attention_out_norm="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)  # fmt: skip
VAULTGEMMA = Modules(mlp_norm="pre_feedforward_layernorm")
OLMO2 = Modules(
    attention_norm=None, attention_out_norm="post_attention_layernorm", mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
)  # fmt: skip
HYPERCLOVAX = Modules(attention_out_norm="post_norm1", mlp_out_norm="post_norm2")
MIXTRAL = Modules(
    router="block_sparse_moe.gate", score_bias="block_sparse_moe.e_score_correction_bias",
    experts="block_sparse_moe.experts", expert_up=("w1", "w3"), expert_down="w2",
)  # fmt: skip
QWEN2_MOE = Modules(
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"), shared_down="mlp.shared_expert.down_proj"
)
QWEN3_NEXT = replace(QWEN2_MOE, delta_in=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"))
GRANITE_MOE = Modules(
    router="block_sparse_moe.router.layer",
    stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    shared_up=("shared_mlp.input_linear",), shared_down="shared_mlp.output_linear",
)  # fmt: skip
GPT_OSS = Modules(router="mlp.router", expert_up=("gate_up_proj",), stacked_transposed=True, alternating=True)
GLM = Modules(up=("mlp.gate_up_proj",), interleaved=True)
GLM4 = replace(GLM, attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")
INTERLEAVED = Modules(interleaved=True)
COHERE = Modules(mlp_norm=None, interleaved=True)
STABLELM = Modules(q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm")
NEMOTRON = Modules(up=("mlp.up_proj",))
STARCODER2 = Modules(up=("mlp.c_fc",), down="mlp.c_proj")
PHI = Modules(
    norm="model.final_layernorm", mlp_norm=None, out="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2"
)  # fmt: skip
GPT_NEOX = Modules(
    layers="gpt_neox.layers", embedding="gpt_neox.embed_in", norm="gpt_neox.final_layer_norm", attention="attention",
    qkv=("attention.query_key_value",), out="attention.dense", up=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h",
    grouped=True,
)  # fmt: skip
FALCON = replace(
    GPT_NEOX, layers="transformer.h", embedding="transformer.word_embeddings", norm="transformer.ln_f",
    attention="self_attention", qkv=("self_attention.query_key_value",), out="self_attention.dense",
)  # fmt: skip
OPT = Modules(
    layers="model.decoder.layers", embedding="model.decoder.embed_tokens", norm="model.decoder.final_layer_norm",
    positions="model.decoder.embed_positions", position_offset=2, attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm", out="self_attn.out_proj", up=("fc1",), down="fc2",
)  # fmt: skip
GPT2 = Modules(
    layers="transformer.h", embedding="transformer.wte", norm="transformer.ln_f", positions="transformer.wpe",
    attention="attn", attention_norm="ln_1", mlp_norm="ln_2", qkv=("attn.c_attn",), out="attn.c_proj",
    up=("mlp.c_fc",), down="mlp.c_proj", transposed=True,
)  # fmt: skip
GPT_NEO = replace(
    GPT2, attention="attn.attention", out="attn.attention.out_proj", transposed=False,
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
)  # fmt: skip
GPT_BIGCODE = replace(GPT2, grouped=True, transposed=False)
GPTJ = replace(
    GPT2, positions=None, mlp_norm=None, qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"), out="attn.out_proj",
    up=("mlp.fc_in",), down="mlp.fc_out", interleaved=True, transposed=False,
)  # fmt: skip
