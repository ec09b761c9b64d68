"""Load and check checkpoints, make layers int8 or prepacked, offload them, and choose devices and memory."""
