"""What lies before and after a model's layers: embedding, final norm and head."""

import torch
import torch.nn.functional as F  # noqa: N812 (the field's usual name)
from torch import Tensor

from peers.engines.layers import rms_norm
from peers.engines.projection import linear, packed
from peers.engines.weights import Weights


class EmbeddingAndHead:
    """Embedding, final norm and head, ready to compute."""

    def __init__(self, weights: Weights) -> None:
        """Take the weights; raises `UserError` for one that is missing or does not fit."""
        self._model = model = weights.model
        size = (model.vocabulary_size, model.hidden_size)
        self._embedding = weights.take("model.embed_tokens.weight", *size)
        head = self._embedding if model.tied else weights.take("lm_head.weight", *size)
        # Products of two 16-bit numbers are exact in fp32, so a GPU needs no fp32 copy of the head.
        self._half = head.is_cuda and head.dtype != torch.float32
        self._head = head if self._half else packed(head.float())
        self._norm = weights.take("model.norm.weight", model.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states, keys and values."""
        return self._embedding.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """The stream [..., hidden] that the first layer gets."""
        return F.embedding(tokens, self._embedding)

    def finish(self, stream: Tensor) -> Tensor:
        """The hidden states of the stream that the last layer gives."""
        return rms_norm(self._model, stream, self._norm)

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """fp32 logits [..., vocabulary] of hidden states, before the temperature."""
        if self._half:
            flat = states.flatten(0, -2)
            logits = torch.mm(flat, self._head.t(), out_dtype=torch.float32)
            return logits.view(*states.shape[:-1], -1)
        return linear(states.float(), self._head)
