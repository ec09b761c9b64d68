"""What a folder needs to be used, or shown, without this package: code for transformers, a model card, an upload."""
