"""RecurrentGPT (arXiv:2608.15062) for transformers: prelude, looped core, coda. Part of an exported model.

Needs torch and transformers alone (4.57 and newer). `num_recurrences`, `kv_sharing`, `exit_threshold` and
`exit_criterion` are arguments of `forward` and of `generate`; their defaults are the configuration's.

Shapes: B batch, N tokens of this forward, T slots attended to, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from .adaptive_recurrent_gpt import ExitDivergence, StateChange, loop_until_still
from .blocks_recurrent_gpt import Block, Modulation
from .cache_recurrent_gpt import Place, RecurrentCache
from .configuration_recurrent_gpt import EXIT_CRITERIA, RecurrentGPTConfig

# transformers 5 calls an output's cache so
CACHE_FIELD = "cache" if "cache" in {f.name for f in fields(CausalLMOutputWithPast)} else "past_key_values"


@dataclass
class RecurrentGPTOutput(CausalLMOutputWithPast):
    """`recurrences` [B, N]: after how many steps each token left the loop; 0 for padding in an adaptive loop."""

    recurrences: torch.LongTensor | None = None


class RecurrentGPTPreTrainedModel(PreTrainedModel):
    config_class = RecurrentGPTConfig
    base_model_prefix = "model"
    _no_split_modules = ("Block",)
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            # a layer that starts otherwise says so: transformers 5 initializes each parameter once
            nn.init.normal_(module.weight, std=self.config.initializer_range * getattr(module, "initial_scale", 1.0))
            if getattr(module, "bias", None) is not None:
                nn.init.constant_(module.bias, getattr(module, "initial_bias", 0.0))
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


class Embedding(nn.Module):
    """Learned token and position embeddings."""

    def __init__(self, config: RecurrentGPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)


class RecurrentGPTModel(RecurrentGPTPreTrainedModel):
    """The model up to its final norm, and its head, which is the token embedding."""

    def __init__(self, config: RecurrentGPTConfig) -> None:
        super().__init__(config)
        self.embedding = Embedding(config)
        self.prelude = nn.ModuleList(Block(config) for _ in range(config.n_prelude))
        self.core = nn.ModuleList(Block(config) for _ in range(config.n_core))
        self.rule = Modulation(config)
        self.coda = nn.ModuleList(Block(config) for _ in range(config.n_coda))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding.tokens = value

    def forward(
        self,
        embedded_BND: torch.Tensor,
        mask: torch.Tensor | None,
        cache: RecurrentCache | None,
        place: Place,
        depth: int,
    ) -> torch.Tensor:
        """The final norm's output [B, N, D] at depth `depth`, from embeddings with positions."""
        h_BND = self.enter(embedded_BND, mask, cache, place)
        terms = self.rule.anchor_terms(h_BND) if depth else ()
        for step in range(1, depth + 1):
            here = Place(place.start, place.tokens, step, place.exact)
            h_BND = self.recur(h_BND, terms, mask, cache, here)
        return self.leave(h_BND, mask, cache, place)

    def adaptive(
        self,
        embedded_BND: torch.Tensor,
        mask: torch.Tensor | None,
        cache: RecurrentCache,
        place: Place,
        real_BN: torch.Tensor,
        criterion: str,
        threshold: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, each token leaving as `adaptive_recurrent_gpt` says; and the steps that each has taken."""
        h_BND = self.enter(embedded_BND, mask, cache, place)
        terms = self.rule.anchor_terms(h_BND)
        if criterion == "state":
            change = StateChange()
        else:
            change = ExitDivergence(lambda *arguments: self.head(self.leave(*arguments)), h_BND, mask, cache, place)
        h_BND, steps_BN = loop_until_still(self.recur, change, h_BND, terms, mask, cache, place, real_BN, threshold)
        return self.leave(h_BND, mask, cache, place), steps_BN

    def enter(
        self, h_BND: torch.Tensor, mask: torch.Tensor | None, cache: RecurrentCache | None, place: Place
    ) -> torch.Tensor:
        """The prelude: the anchor, and the loop's first state."""
        layers = [None] * len(self.prelude) if cache is None else cache.prelude
        for block, layer in zip(self.prelude, layers, strict=True):
            h_BND = block(h_BND, mask, layer, place)
        return h_BND

    def recur(
        self,
        h_BND: torch.Tensor,
        terms: tuple[torch.Tensor, ...],
        mask: torch.Tensor | None,
        cache: RecurrentCache | None,
        place: Place,
    ) -> torch.Tensor:
        """One recurrence, number `place.step`: all of its work for these tokens."""
        o_BND = self.rule.core_input(h_BND, terms)
        layers = [None] * len(self.core) if cache is None else cache.core(place.step)
        for block, layer in zip(self.core, layers, strict=True):
            o_BND = block(o_BND, mask, layer, place)
        return self.rule.update(h_BND, o_BND, terms)

    def leave(
        self, h_BND: torch.Tensor, mask: torch.Tensor | None, cache: RecurrentCache | None, place: Place
    ) -> torch.Tensor:
        """The coda and the final norm."""
        layers = [None] * len(self.coda) if cache is None else cache.coda
        for block, layer in zip(self.coda, layers, strict=True):
            h_BND = block(h_BND, mask, layer, place)
        return self.norm(h_BND)

    def head(self, hidden_BND: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_BND, self.embedding.tokens.weight)


class RecurrentGPTForCausalLM(RecurrentGPTPreTrainedModel, GenerationMixin):
    """The language model. Its head is the token embedding itself, so the two cannot come apart."""

    def __init__(self, config: RecurrentGPTConfig) -> None:
        super().__init__(config)
        self.model = RecurrentGPTModel(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding.tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embedding.tokens = value

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_recurrences: int | None = None,
        kv_sharing: str | None = None,
        exit_threshold: float | None = None,
        exit_criterion: str | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> RecurrentGPTOutput | tuple:
        """Logits [B, N or `logits_to_keep`, V], and with labels (shifted inside) the mean loss in nats.

        `num_recurrences` may be 0, or beyond what was trained; with `exit_threshold` it is the most a token may take.
        `attention_mask` [B, tokens so far] has 0 at padding; a mask [B, 1, N, T] is taken as it is. `cache` is also
        known as `past_key_values`. Without gradients, a cache is made where none is given, unless `use_cache` is off.
        """
        config = self.config
        depth = config.num_recurrences if num_recurrences is None else num_recurrences
        threshold = config.exit_threshold if exit_threshold is None else exit_threshold
        criterion = config.exit_criterion if exit_criterion is None else exit_criterion
        if depth < 0:
            raise ValueError(f"num_recurrences {depth}: must be 0 or more")
        if criterion not in EXIT_CRITERIA:
            raise ValueError(f"exit_criterion {criterion!r}: one of {', '.join(EXIT_CRITERIA)}")
        tokens_BND = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        (B, N, _), device = tokens_BND.shape, tokens_BND.device
        adaptive = threshold is not None and depth > 0
        wanted = config.use_cache and not torch.is_grad_enabled() if use_cache is None else use_cache
        given = past_key_values if cache is None else cache
        cache = self._own_cache(given, depth, kv_sharing) if wanted else None
        # an adaptive loop remembers tokens that have left, with a cache or without: prefills are exact in every kind
        memory = RecurrentCache(config, num_recurrences=depth, kv_sharing="last") if adaptive and not wanted else cache
        place = Place(0, N, exact=True) if memory is None else memory.place(N, device, exact=not adaptive)
        mask = _mask(attention_mask, memory, place, device, explicit=adaptive and N > 1)
        positions_BN = _positions(attention_mask, place, device) if position_ids is None else position_ids
        self._check_positions(positions_BN, memory, place)
        embedded_BND = tokens_BND + self.model.embedding.positions(positions_BN)
        if adaptive:
            real_BN = _real(attention_mask, B, N, device)
            mask = None if mask is None else mask.expand(B, -1, -1, -1)
            hidden_BND, steps_BN = self.model.adaptive(embedded_BND, mask, memory, place, real_BN, criterion, threshold)
        else:
            hidden_BND = self.model(embedded_BND, mask, memory, place, depth)
            steps_BN = torch.full((B, N), depth, device=device)
        if cache is not None:
            cache.finish(place)
        if isinstance(logits_to_keep, int):
            hidden_BND = hidden_BND[:, -logits_to_keep:] if logits_to_keep else hidden_BND
        else:
            hidden_BND = hidden_BND[:, logits_to_keep]
        logits_BNV = self.model.head(hidden_BND)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BNV, labels, vocab_size=config.vocab_size, **kwargs)
        output = RecurrentGPTOutput(loss=loss, logits=logits_BNV, recurrences=steps_BN, **{CACHE_FIELD: cache})
        return output.to_tuple() if return_dict is False else output

    def generate(
        self, inputs: torch.Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs
    ) -> Any:
        """As transformers' `generate`; `cache_implementation="static"` makes a static cache of this model's kind."""
        settings = generation_config or self.generation_config
        kind = kwargs.pop("cache_implementation", None) or settings.cache_implementation
        if kind not in (None, "dynamic", "static"):
            raise ValueError(f"cache_implementation {kind!r}: this model has `dynamic` (default) and `static`")
        if kind == "static":
            if settings.cache_implementation is not None:
                generation_config = copy.deepcopy(settings)
                generation_config.cache_implementation = None
            prompts = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
            tokens = next(prompt.shape[1] for prompt in prompts if prompt is not None)
            new = kwargs.get("max_new_tokens", settings.max_new_tokens)
            kwargs[CACHE_FIELD] = RecurrentCache(
                self.config,
                num_recurrences=kwargs.get("num_recurrences"),
                kv_sharing=kwargs.get("kv_sharing"),
                max_cache_len=tokens + new if new is not None else kwargs.get("max_length", settings.max_length) or 20,
            )
        return super().generate(inputs, generation_config, **kwargs)

    def _own_cache(self, given: Cache | None, depth: int, kv_sharing: str | None) -> RecurrentCache:
        """The cache given, if it is of this model's kind; `generate` gives transformers' own, empty: ours instead."""
        if isinstance(given, RecurrentCache):
            if given.num_recurrences != depth or kv_sharing not in (None, given.kv_sharing):
                raise ValueError(
                    f"the cache holds num_recurrences {given.num_recurrences}, kv_sharing {given.kv_sharing}; this "
                    f"call asks for {depth}, {kv_sharing}: give the same, or a new cache"
                )
            return given
        if given is not None and given.get_seq_length() > 0:
            raise ValueError(f"a filled {type(given).__name__} cannot be read: use RecurrentCache")
        return RecurrentCache(self.config, num_recurrences=depth, kv_sharing=kv_sharing)

    def _check_positions(self, positions_BN: torch.Tensor, cache: RecurrentCache | None, place: Place) -> None:
        """Raise `ValueError` if a token lies behind the last learned position; looks at values only if one may."""
        last = self.config.max_position_embeddings
        slots = place.tokens if cache is None else _slots(cache, place)
        if slots > last and not torch.compiler.is_compiling() and int(positions_BN.max()) >= last:
            raise ValueError(f"position {int(positions_BN.max())} is beyond max_position_embeddings {last}")


def _slots(cache: RecurrentCache, place: Place) -> int:
    """How many slots the tokens of this forward attend to."""
    if place.exact:
        return place.tokens
    return cache.max_slots if cache.max_slots is not None else place.start + place.tokens


def _positions(attention_mask: torch.Tensor | None, place: Place, device: torch.device) -> torch.Tensor:
    """Positions [B or 1, N]: a row counts from its first token that is no padding."""
    if attention_mask is None or attention_mask.ndim != 2:
        return place.slots_N(device)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -place.tokens :]


def _real(attention_mask: torch.Tensor | None, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """Which tokens of this forward are no padding, [B, N]."""
    if attention_mask is None or attention_mask.ndim != 2:
        return torch.ones(batch, tokens, dtype=torch.bool, device=device)
    return attention_mask[:, -tokens:].bool()


def _mask(
    attention_mask: torch.Tensor | None,
    cache: RecurrentCache | None,
    place: Place,
    device: torch.device,
    *,
    explicit: bool,
) -> torch.Tensor | None:
    """Which slot each token may see, [B, 1, N, T]; None, unless `explicit`, where that is all, or all before it.

    Padding sees itself, so that no row is empty; nobody else sees it.
    """
    T = place.tokens if cache is None else _slots(cache, place)
    if attention_mask is not None and attention_mask.ndim == 4:
        return attention_mask[..., :T]
    static = cache is not None and cache.max_slots is not None
    if attention_mask is not None and (attention_mask.shape[1] > T or (attention_mask.shape[1] < T and not static)):
        raise ValueError(f"attention_mask covers {attention_mask.shape[1]} tokens, cache and input hold {T}")
    plain = attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all()))
    if plain and not explicit and (place.exact or (place.tokens == 1 and not static)):
        return None
    slots_N1, slots_T = place.slots_N(device)[:, None], torch.arange(T, device=device)
    allowed = (slots_T <= slots_N1)[None, None]
    if plain:
        return allowed
    # a static cache has slots of tokens to come, which the order hides
    seen_BT = F.pad(attention_mask.bool(), (0, T - attention_mask.shape[1]), value=True)
    return (allowed & seen_BT[:, None, None]) | (slots_T == slots_N1)
