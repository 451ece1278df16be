"""A package in vLLM's place: its server's routes without a model, as far as the engine uses them."""
