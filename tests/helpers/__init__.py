"""What many tests share: tiny models, and what is done with them."""
