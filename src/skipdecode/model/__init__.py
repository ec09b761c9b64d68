"""Schedule, gates and cache: they decide which layers a position runs, and skip the rest."""
