"""Configuration of RecurrentGPT (arXiv:2608.15062). Part of an exported model: needs transformers alone."""

from __future__ import annotations

from transformers import PretrainedConfig

KV_SHARING = ("full", "last", "first", "average")
EXIT_CRITERIA = ("state", "kl")


class RecurrentGPTConfig(PretrainedConfig):
    """A model of `n_prelude` blocks, `n_core` blocks looped `num_recurrences` times, and `n_coda` blocks.

    `kv_sharing` is what the cache keeps of a core block's keys and values over the recurrences: `full` all of them,
    or one set per token: the `last` step's, the `first` one's, or their `average`. `exit_threshold`, where set, ends
    a token's loop at the first step whose change is below it; `exit_criterion` says which change: `state` is
    ‖h_k - h_(k-1)‖ / ‖h_(k-1)‖, `kl` is KL(p_k ‖ p_(k-1)) between the distributions of both exits, nats.
    """

    model_type = "recurrent_gpt"

    def __init__(
        self,
        vocab_size: int = 50257,
        max_position_embeddings: int = 1024,
        hidden_size: int = 768,
        num_attention_heads: int = 12,
        n_prelude: int = 1,
        n_core: int = 1,
        n_coda: int = 1,
        num_recurrences: int = 10,
        activation_function: str = "gelu",
        layer_norm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        anchor: bool = True,
        gate: bool = True,
        gate_bias: float = 4.0,
        gate_temperature: float = 1.0,
        eval_noise: bool = False,
        state_noise_std: float = 0.1,
        gate_noise_std: float = 0.1,
        kv_sharing: str = "full",
        exit_threshold: float | None = None,
        exit_criterion: str = "state",
        use_cache: bool = True,
        **kwargs,
    ) -> None:
        if activation_function not in ("gelu", "gelu_new"):
            raise ValueError(f"activation_function {activation_function!r}: gelu (exact) or gelu_new (tanh)")
        if hidden_size % num_attention_heads:
            raise ValueError(f"num_attention_heads {num_attention_heads} does not divide hidden_size {hidden_size}")
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.n_prelude, self.n_core, self.n_coda = n_prelude, n_core, n_coda
        self.num_recurrences = num_recurrences
        self.activation_function = activation_function
        self.layer_norm_epsilon = layer_norm_epsilon
        self.initializer_range = initializer_range
        self.anchor, self.gate = anchor, gate
        self.gate_bias, self.gate_temperature = gate_bias, gate_temperature
        self.eval_noise = eval_noise
        self.state_noise_std, self.gate_noise_std = state_noise_std, gate_noise_std
        self.kv_sharing = kv_sharing
        self.exit_threshold, self.exit_criterion = exit_threshold, exit_criterion
        self.use_cache = use_cache
        kwargs.setdefault("tie_word_embeddings", True)
        super().__init__(**kwargs)

    @property
    def num_hidden_layers(self) -> int:
        """Blocks that a token passes through at full depth."""
        return self.n_prelude + self.n_core * self.num_recurrences + self.n_coda
