"""What SkipDecode is compared with. Nothing imports these files: the registry of methods loads them by name."""
