"""Pages of the console: each is a function of a reader and the address's query parameters that returns HTML."""
