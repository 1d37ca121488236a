"""A model without attention whose next token is a hash of every token so far, as its pages hold them."""

import jax.numpy as jnp
import numpy as np

from paged_jax import KVLayout, write_kv

VOCAB = 11


class PageReader:
    """The page memory is all its state: a wrong, stale or missing page changes the token with near certainty.

    With a window, tokens before it do not count.
    """

    def __init__(self, window=None):
        self.window = window

    def __call__(self, params, token_ids, batch, kv):
        stored = jnp.stack([token_ids + 1, batch.positions + 1], axis=-1).astype(jnp.float32)[:, None]
        kv = write_kv(kv, stored, stored, batch, layer=0)
        rows = kv.pages[batch.block_tables].astype(jnp.int32)  # [seqs, pages, page_size, 4]
        held = rows[..., 0].reshape(rows.shape[0], -1)
        place = jnp.arange(held.shape[1], dtype=jnp.int32)
        right = rows[..., 1].reshape(held.shape) == place + 1
        sums = jnp.cumsum(jnp.where(right, held, 7919) * _weight(place), axis=1, dtype=jnp.int32)
        token = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        seq = (token[:, None] >= batch.cu_query_lens[1:]).sum(axis=1, dtype=jnp.int32)
        seq = jnp.minimum(seq, held.shape[0] - 1)
        chosen = sums[seq, batch.positions]
        if self.window is not None:
            before = batch.positions - self.window
            chosen = chosen - jnp.where(before < 0, 0, sums[seq, jnp.maximum(before, 0)])
        chosen = (chosen + params["shift"]) % VOCAB
        return (chosen[:, None] == jnp.arange(VOCAB, dtype=jnp.int32)).astype(jnp.float32), kv

    def logits(self, params, hidden):
        return hidden


def _weight(place):
    return (place * place * 31 + place * 17 + 7) % 97 + 1


def reader_params(shift=0):
    return {"shift": jnp.int32(shift)}


def reader_layout(num_pages, page_size):
    return KVLayout(num_layers=1, num_pages=num_pages, page_size=page_size, num_kv_heads=1, head_dim=2)


def expected(prompt, num_tokens, shift=0, window=None):
    """The greedy answer, from the tokens themselves."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        place = np.arange(len(tokens))
        weights = np.where(place >= len(tokens) - (window or len(tokens)), _weight(place), 0)
        tokens.append(int((((np.array(tokens) + 1) * weights).sum() + shift) % VOCAB))
    return tokens[len(prompt) :]
