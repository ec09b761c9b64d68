"""A page to play with: one prompt, several speeds side by side."""
