"""How an engine runs."""

from dataclasses import dataclass

import pallas_kernels


@dataclass(frozen=True)
class EngineConfig:
    """Limits and choices of an engine; all of them fix compiled shapes or the size of the pool.

    Attributes:
      max_seqs: sequences that run at once, the rows of the block table.
      max_model_len: longest sequence in tokens, prompt and answer together.
      max_tokens_per_step: tokens one step computes; longer prompts are prefilled in chunks.
      decode_steps: decode steps that may follow one another in one call of the device, without the host between them
        (see `Engine.step`); 1 for none. Pages for so many tokens are taken ahead.
      memory_utilization: fraction of the device's memory for weights, temporaries and pages.
      prefix_caching: let requests with the same beginning share pages.
      sliding_window: keys that every layer of the model looks back on at most; pages behind it are given back. None
        when some layer sees everything.
      implementation: attention implementation, a key of `pallas_kernels.IMPLEMENTATIONS`; None to choose by platform.

    Raises:
      ValueError: a value is out of range.
    """

    max_seqs: int = 32
    max_model_len: int = 2048
    max_tokens_per_step: int = 512
    decode_steps: int = 8
    memory_utilization: float = 0.9
    prefix_caching: bool = True
    sliding_window: int | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_seqs", "max_model_len", "decode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens_per_step < self.max_seqs:
            raise ValueError(
                f"max_tokens_per_step must be at least max_seqs = {self.max_seqs} (one token for each sequence), "
                f"got {self.max_tokens_per_step}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, or None for none, got {self.sliding_window}")
        if not 0 < self.memory_utilization <= 1:
            raise ValueError(f"memory_utilization must be in (0, 1], got {self.memory_utilization}")
        if self.implementation is not None and self.implementation not in pallas_kernels.IMPLEMENTATIONS:
            allowed = ", ".join(pallas_kernels.IMPLEMENTATIONS)
            raise ValueError(f"implementation must be one of {allowed} or None, got {self.implementation!r}")

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Lengths of a packed batch in which every sequence has one token.

        Few running sequences do not pay for max_seqs rows: 1, powers of two from 8, from 32 on also the halves between
        them, and max_seqs. Up to 4 rows another program is not worth compiling.
        """
        if self.max_seqs <= 4:
            return (self.max_seqs,)
        sizes = {1} | {1 << n for n in range(3, self.max_seqs.bit_length())}
        sizes |= {size + size // 2 for size in sizes if size >= 32}
        return (*sorted(size for size in sizes if size < self.max_seqs), self.max_seqs)

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Lengths of a packed batch that prefills: powers of two from 16, from 256 on also the quarters between them
        (a step of so many tokens costs what they compute, padding too), and max_tokens_per_step."""
        sizes = {1 << n for n in range(4, self.max_tokens_per_step.bit_length())}
        sizes |= {size + size * quarters // 4 for size in sizes if size >= 256 for quarters in (1, 2, 3)}
        return (*sorted(size for size in sizes if size < self.max_tokens_per_step), self.max_tokens_per_step)
