"""Checkpoints and what they run on: loading and checks, int8 and prepacked layers, offload, devices and memory."""
