"""Generation: batches of prompts, jobs that resume, and the engines that run them."""
