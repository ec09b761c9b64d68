"""What a budget costs in quality and gives on the clock: tables, calibration, checks."""
