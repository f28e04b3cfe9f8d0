"""Attention over the paged KV pool, one typed op with several implementations, and what moves KV within the pool."""
