"""Beam search: what a request asks for and which beams go on (host), and the best candidates of a step (device)."""
