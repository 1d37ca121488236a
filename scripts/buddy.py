"""A buddy allocator: what systems with contiguous caches take memory from."""


class Buddy:
    """Gives out contiguous blocks whose sizes are powers of two, splits larger ones and merges what is free again
    (Knuth, The Art of Computer Programming, volume 1, section 2.5).

    Args:
      size: slots; a size that is no power of two is several blocks from the beginning.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: dict[int, set[int]] = {1 << order: set() for order in range(size.bit_length())}
        self._taken: dict[int, int] = {}
        start = 0
        for block in sorted(self._free, reverse=True):
            if size & block:
                self._free[block].add(start)
                start += block

    @property
    def num_free(self) -> int:
        """Slots in no block that was given out."""
        return sum(block * len(starts) for block, starts in self._free.items())

    def allocate(self, size: int) -> int | None:
        """The start of a block of at least `size` slots, the lowest of the smallest that will do; None if none is."""
        wanted = 1 << (size - 1).bit_length()
        block = next((block for block, starts in self._free.items() if block >= wanted and starts), None)
        if block is None:
            return None
        start = min(self._free[block])
        self._free[block].remove(start)
        while block > wanted:
            block //= 2
            self._free[block].add(start + block)
        self._taken[start] = wanted
        return start

    def block_size(self, start: int) -> int:
        """Slots of the block at `start`, which was given out."""
        return self._taken[start]

    def release(self, start: int) -> None:
        """Takes a block back, and merges it with its neighbour as long as that is free too."""
        block = self._taken.pop(start)
        while (start ^ block) in self._free[block]:
            self._free[block].remove(start ^ block)
            start &= ~block
            block *= 2
        self._free[block].add(start)
