"""Publication of models: the upload, the model card, and code with which transformers alone runs them."""
