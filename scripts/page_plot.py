"""A picture of the page pool over time: who has which page, and how full the pool is."""

from pathlib import Path

import numpy as np

from paged_jax import Engine

_CACHED, _FREE = -1, -2


class PageHistory:
    """Looks at an engine's pages after every step.

    Args:
      engine: the engine, as it steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._owners: list[np.ndarray] = []
        self._shared: list[np.ndarray] = []

    def record(self) -> None:
        """Takes a column of the picture."""
        page_map = self._engine.page_map()
        owners = np.full(self._engine.layout.num_pages - 1, _FREE)
        for page_id in page_map.cached:
            owners[page_id - 1] = _CACHED
        for page_id, users in page_map.users.items():
            owners[page_id - 1] = users[0]
        self._owners.append(owners)
        self._shared.append(np.array([page for page, users in page_map.users.items() if len(users) > 1], int))

    def plot(self, path: Path) -> None:
        """Writes the picture; the format goes by the file's name.

        Raises:
          ValueError: no step was recorded, or the format is unknown.
        """
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        if not self._owners:
            raise ValueError("nothing was computed, so there is nothing to plot")
        owners = np.stack(self._owners, axis=1)
        used = int(np.flatnonzero((owners != _FREE).any(axis=1)).max(initial=0)) + 1  # pages never touched are left out
        requests = {owner: i for i, owner in enumerate(np.unique(owners[owners >= 0]))}
        colours = [_colour(i) for i in range(len(requests))]
        index = np.full(owners.shape, 0)
        index[owners == _CACHED] = 1
        for owner, i in requests.items():
            index[owners == owner] = 2 + i

        figure = Figure(figsize=(10, 7), layout="constrained")
        pages, occupancy = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        pages.imshow(
            index[:used],
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            cmap=ListedColormap([(1.0, 1.0, 1.0), (0.78, 0.78, 0.78), *colours]),
            vmin=0,
            vmax=1 + max(len(requests), 1),
            extent=(0.5, owners.shape[1] + 0.5, 0.5, used + 0.5),
        )
        for step, shared in enumerate(self._shared, start=1):
            if len(shared):
                pages.plot(np.full(len(shared), step), shared, linestyle="", marker=".", color="black", markersize=2)
        pages.set_ylabel("page id")
        pages.set_title("Pages of the pool, coloured by request; black dots: used by several")
        legend = [
            Patch(facecolor=(0.78, 0.78, 0.78), label="cached, unused"),
            Patch(facecolor="white", edgecolor="grey", label="free"),
        ]
        legend += [Patch(facecolor=colours[i], label=f"request {owner}") for owner, i in list(requests.items())[:12]]
        if len(requests) > 12:
            legend.append(Patch(facecolor="none", label=f"and {len(requests) - 12} more"))
        pages.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, fontsize=8)

        steps = np.arange(1, owners.shape[1] + 1)
        live, cached = (owners >= 0).sum(axis=0), (owners == _CACHED).sum(axis=0)
        occupancy.stackplot(steps, live, cached, labels=["live", "cached"], colors=["#4477aa", "#c7c7c7"], step="mid")
        occupancy.axhline(len(owners), color="black", linewidth=0.8, linestyle="--", label="pool")
        occupancy.set_xlabel("step")
        occupancy.set_ylabel("pages")
        occupancy.set_ylim(0, len(owners) * 1.05)
        occupancy.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, fontsize=8)
        figure.savefig(path, dpi=120)


def _colour(i: int) -> tuple[float, float, float]:
    """Colours far apart however many there are: hues by the golden ratio, in three brightnesses."""
    from matplotlib.colors import hsv_to_rgb

    red, green, blue = hsv_to_rgb((i * 0.618034 % 1.0, (0.75, 0.5, 0.9)[i % 3], (0.85, 0.95, 0.65)[i % 3]))
    return float(red), float(green), float(blue)
