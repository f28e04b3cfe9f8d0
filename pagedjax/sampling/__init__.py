"""How tokens are chosen: what a request asks for (host), and the sampler with its filters (device)."""
