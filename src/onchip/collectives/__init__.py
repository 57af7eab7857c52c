"""The engine of products that overlap with communication: a ring of exchanges, one piece of a product at each step."""
