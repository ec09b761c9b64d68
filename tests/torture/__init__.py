"""The longer campaign behind docs/reliability.md: kills, full disks, damaged files, threads, families, habits."""
