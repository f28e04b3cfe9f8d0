"""The blocks of the KV pool, on the host: who holds them, in what order, and what may be found in them again."""
