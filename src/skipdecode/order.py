"""Layer orders: which layers a depth means. Depth ``n`` runs the ``n`` best-ranked: depths are nested."""

from __future__ import annotations

ORDERS = ("top", "bottom", "even")


def ranking(order: str | tuple[int, ...], num_layers: int, warmup: int) -> tuple[int, ...]:
    """All layers, those that run longest first.

    ``top`` (the paper's): ``warmup`` bottom layers, then from the top down. ``bottom``: 0, 1, 2, …, early termination.
    ``even``: first, last, then always the layer farthest from all ranked ones, the lowest on ties. A permutation
    stands for itself.
    """
    if isinstance(order, tuple):
        return order
    if order == "bottom":
        return tuple(range(num_layers))
    if order == "top":
        return (*range(warmup), *range(num_layers - 1, warmup - 1, -1))
    ranked, distance = [0], list(range(num_layers))  # from each layer to the nearest ranked one
    while len(ranked) < num_layers:
        ranked.append(max(range(num_layers), key=lambda i: (distance[i], -i)))
        distance = [min(known, abs(i - ranked[-1])) for i, known in enumerate(distance)]
    return tuple(ranked)
