"""Measure what skipping layers costs in quality and saves in time; calibrate schedules; check models."""
