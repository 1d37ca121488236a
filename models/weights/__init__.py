"""Checkpoint readers: each gives a `TransformerConfig` and the parameters as a plain pytree of jax arrays."""
