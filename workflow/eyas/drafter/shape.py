"""The drafter's sizes, and the config.json that servers read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eyas.errors import EyasError

ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter and what it must know of its target."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    layers: tuple[int, ...]
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    norm_before_residual: bool = False
    """Whether the layer's residual is the normed state in place of the state itself (speculators' and vLLM's name)."""

    def config_json(self, layer_ids: list[int] | None = None) -> dict[str, Any]:
        """Contents of config.json; `layer_ids` in the convention of the server it is for.

        `target_hidden_size` is written only where it differs: SGLang takes its presence as a
        sign that the embedding cannot be the target's.
        """
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": False,
            "mlp_bias": False,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(layer_ids if layer_ids is not None else self.layers),
                "use_aux_hidden_state": True,
            },
        }
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(self, key) is not None:
                config[key] = getattr(self, key)
        if self.target_hidden_size != self.hidden_size:
            config["target_hidden_size"] = self.target_hidden_size
        if self.norm_before_residual:
            config["norm_before_residual"] = True
        return config

    @classmethod
    def from_config_json(cls, config: dict[str, Any]) -> DrafterShape:
        """The inverse of :meth:`config_json`; raises EyasError naming a key that is missing."""
        try:
            values = {
                name: config[name]
                for name in (
                    "vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
                    "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings",
                )
            }  # fmt: skip
            layers = tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        except (KeyError, TypeError) as exc:
            raise EyasError(f"the drafter's config.json has no {exc}; it is no EAGLE-3 drafter of Eyas") from None
        return cls(
            **values,
            target_hidden_size=config.get("target_hidden_size", config["hidden_size"]),
            layers=layers,
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=config.get("eos_token_id"),
            pad_token_id=config.get("pad_token_id"),
            norm_before_residual=bool(config.get("norm_before_residual")),
        )

    @classmethod
    def for_target(
        cls, target_config: Any, model_settings: dict[str, Any], draft_vocab_size: int, layers: list[int]
    ) -> DrafterShape:
        """Sizes from the target's (text) config, where `model_settings` (DrafterModel) leaves them open.

        Raises EyasError for heads that do not fit.
        """
        heads = model_settings["num_attention_heads"] or target_config.num_attention_heads
        kv_heads = model_settings["num_key_value_heads"] or getattr(target_config, "num_key_value_heads", None) or heads
        hidden = model_settings["hidden_size"] or target_config.hidden_size
        head_dim = model_settings["head_dim"] or getattr(target_config, "head_dim", None) or hidden // heads
        intermediate = (
            model_settings["intermediate_size"] or getattr(target_config, "intermediate_size", None) or 4 * hidden
        )
        if heads % kv_heads:
            raise EyasError(
                f"model.num_attention_heads: {heads} is no multiple of num_key_value_heads {kv_heads} (a null takes the"
                " target's)"
            )
        rope = getattr(target_config, "rope_parameters", None) or {}
        rope = rope.get("full_attention", rope)  # targets that have one for each kind of layer
        theta = rope.get("rope_theta") or getattr(target_config, "rope_theta", None) or 10000.0
        return cls(
            vocab_size=int(target_config.vocab_size),
            draft_vocab_size=draft_vocab_size,
            hidden_size=int(hidden),
            target_hidden_size=int(target_config.hidden_size),
            intermediate_size=int(intermediate),
            num_attention_heads=int(heads),
            num_key_value_heads=int(kv_heads),
            head_dim=int(head_dim),
            rms_norm_eps=float(getattr(target_config, "rms_norm_eps", None) or 1e-5),
            rope_theta=float(theta),
            max_position_embeddings=int(getattr(target_config, "max_position_embeddings", None) or 2048),
            layers=tuple(layers),
            bos_token_id=getattr(target_config, "bos_token_id", None),
            eos_token_id=getattr(target_config, "eos_token_id", None),
            pad_token_id=getattr(target_config, "pad_token_id", None),
            norm_before_residual=bool(model_settings.get("norm_before_residual")),
        )

    def describe(self) -> str:
        """The sizes in one line, for logs."""
        values = asdict(self)
        return ", ".join(f"{key} {values[key]}" for key in list(values)[:8])


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter checkpoint and its shape: the key contract of SGLang and vLLM."""
    h, ht, inner = shape.hidden_size, shape.target_hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return {
        "fc.weight": (h, 3 * ht),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (inner, h),
        "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "norm.weight": (h,),
        "lm_head.weight": (shape.draft_vocab_size, h),
        "d2t": (shape.draft_vocab_size,),
        "t2d": (shape.vocab_size,),
        "embed_tokens.weight": (shape.vocab_size, h),
    }
